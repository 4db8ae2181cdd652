"""What a request becomes: the whole of it, for each of the three forms."""

from __future__ import annotations

import json
from typing import Any

import pytest

from djl_trtllm.api import Call, sampling
from djl_trtllm.api.lmi import parse as lmi
from djl_trtllm.api.lmi.presentation import Presentation
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.request import GenerationRequest, Guide, GuideKind, Sampling
from tests.api.scripts import EOS, FAILURE, PROMPT, TEXT, answer, several

MESSAGES = [{"role": "user", "content": "Hello"}]
SAMPLED: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.75,
    "seed": 9,
    "min_p": 0.125,
    "no_repeat_ngram_size": 3,
    "max_new_tokens": 7,
}
GIVEN: dict[str, Any] = {
    **SAMPLED,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop": ["a"],
    "stop_token_ids": [3],
    "truncate": 4,
    "bad_words": ["b"],
    "guided_regex": "c+",
    "adapters": "french",
}
SAMPLING = Sampling(**SAMPLED, min_new_tokens=2, ignore_eos=True, do_sample=True)
OTHERS: dict[str, Any] = {
    "stop": ("a",),
    "stop_token_ids": (3,),
    "truncate": 4,
    "bad": ("b",),
    "guide": Guide(GuideKind.REGEX, "c+"),
    "adapter": "french",
}
SHORT = 30


def inputs(stream: bool = False, defaults: Options = Options(), **parameters: Any) -> Call:  # noqa: B008
    return lmi.parse_payload({"inputs": "The wolf", "parameters": parameters, "stream": stream}, defaults)


def chat(defaults: Options = Options(), **fields: Any) -> Call:  # noqa: B008
    return lmi.parse_payload({"messages": MESSAGES, **fields}, defaults)


def bedrock(forwarded: str | None = None, **fields: Any) -> Call:
    properties = {} if forwarded is None else {"x-amzn-sagemaker-forwarded-api": forwarded}
    return lmi.parse_payload({"prompt": "The wolf", **fields}, Options(bedrock_compat=True), properties)


def refusal(call: Any, *arguments: Any, **parameters: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        call(*arguments, **parameters)
    return str(caught.value).removeprefix(lmi.PREFIX)


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_a_request_that_asks_for_nothing_is_greedy_and_short() -> None:
    call = lmi.parse_payload({"inputs": "The wolf"})
    assert call.requests == (GenerationRequest(prompt="The wolf", default_new_tokens=SHORT),)
    assert not call.encoder.stream


def test_every_parameter_reaches_the_request() -> None:
    expected = GenerationRequest(prompt="The wolf", sampling=SAMPLING, default_new_tokens=SHORT, **OTHERS)
    assert inputs(**GIVEN).requests[0] == expected


def test_beams_reach_the_request() -> None:
    beams: dict[str, Any] = {"length_penalty": 0.5, "early_stopping": True, "beam_search_diversity_rate": 0.25}
    assert inputs(num_beams=3, temperature=0.5, n=2, **beams).requests[0] == GenerationRequest(
        prompt="The wolf",
        default_new_tokens=SHORT,
        sampling=Sampling(beam_width=3, n=2, temperature=0.5, **beams),
        logprobs=True,
    )


def test_log_probabilities_are_asked_for_needed_or_shown() -> None:
    def wants(call: Call) -> tuple[bool, bool, bool]:
        return call.requests[0].logprobs, call.requests[0].asks_logprobs, call.requests[0].needs_logprobs

    assert wants(inputs()) == (False, False, False)
    assert wants(inputs(details=True)) == (True, True, False)
    assert wants(inputs(details=False, defaults=Options(tgi_compat=True))) == (False, False, False)
    assert wants(inputs(defaults=Options(tgi_compat=True))) == (True, False, False)
    assert wants(inputs(stream=True)) == (True, False, False)
    assert wants(inputs(best_of=2)) == (True, False, True)
    assert wants(inputs(num_beams=2)) == (True, False, False)
    assert wants(chat()) == wants(chat(stream=True)) == (False, False, False)
    assert wants(chat(logprobs=True)) == (True, False, True)
    assert wants(chat(n=2, best_of=3)) == (False, False, True)
    for name in ("json", "jsonlines", "sse"):
        assert wants(chat(output_formatter=name)) == (True, False, False)
    assert wants(bedrock()) == (False, False, False)


def test_what_is_shown_is_what_was_asked_for() -> None:
    (plain, full, tgi) = (
        json.loads(answer(call.encoder, EOS))
        for call in (inputs(), inputs(return_full_text=True), inputs(defaults=Options(tgi_compat=True)))
    )
    assert (plain, full) == ({"generated_text": TEXT}, {"generated_text": PROMPT.text + TEXT})
    assert tgi[0]["details"]["prefill"] == []
    assert not inputs(details=True).encoder.wants_prompt_tokens
    call = inputs(details=True, decoder_input_details=True)
    assert call.encoder.wants_prompt_tokens
    assert len(json.loads(answer(call.encoder, EOS))["details"]["prefill"]) == 3


def test_an_error_before_the_prompt_was_tokenised_shows_the_inputs() -> None:
    line = json.loads(inputs(stream=True, details=True).encoder.error(FAILURE))
    assert line["details"]["inputs"] == "The wolf"


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_two_choices_of_a_token_are_sampling() -> None:
    assert [inputs(top_k=count).requests[0].sampling.do_sample for count in (0, 1, 2)] == [False, False, True]


def test_the_least_number_of_tokens_may_be_the_most() -> None:
    assert inputs(max_new_tokens=2, min_new_tokens=2).requests[0].sampling.min_new_tokens == 2
    for most, least in ((1, 2), (30, 31)):
        message = f"the least number of new tokens is {least}: expected at most 'max_new_tokens', which is {most}"
        assert refusal(inputs, max_new_tokens=most, min_new_tokens=least) == message
    assert refusal(inputs, min_new_tokens=31) == f"{message} by default"
    assert chat(min_new_tokens=10**6).requests[0].sampling.min_new_tokens == 10**6


def test_as_many_sequences_as_the_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(inputs, True, n=17) == "'n' is 17: expected at most 16"
    monkeypatch.setattr(sampling, "_MOST_SEQUENCES", 3)
    for name in ("n", "best_of", "num_beams"):
        three: dict[str, Any] = {name: 3}
        assert inputs(**three).requests[0].sampling.sequences == 3
        assert refusal(inputs, **{name: 4}) == f"'{name}' is 4: expected at most 3"
    assert refusal(inputs, n=2, best_of=4) == "'best_of' is 4: expected at most 3"
    assert refusal(inputs, n=2, num_beams=4) == "'num_beams' is 4: expected at most 3"
    assert refusal(inputs, n=4, best_of=4) == "'n' is 4: expected at most 3"
    told = refusal(inputs, n=2**40, best_of=2**40)
    assert told == f"'n' is {2**40}: expected at most 3"
    monkeypatch.setattr(sampling, "_MOST_SEQUENCES", 1)
    assert refusal(inputs, num_beams=2) == "'num_beams' is 2: expected at most 1"


def test_beams_are_greedy_and_their_number_is_what_is_generated() -> None:
    for beams in (2, 3):
        sampling = inputs(num_beams=beams, do_sample=True, temperature=0.7).requests[0].sampling
        assert (sampling.beam_width, sampling.sequences, sampling.n, sampling.best_of) == (beams, beams, 1, None)
        assert not sampling.do_sample
    assert inputs(num_beams=1, do_sample=True).requests[0].sampling.do_sample


def test_beams_and_best_of_are_one_number() -> None:
    for beams in (2, 3):
        assert inputs(num_beams=beams, best_of=beams).requests[0].sampling.best_of is None
        assert refusal(inputs, num_beams=beams, best_of=5) == (
            f"'num_beams' is {beams} and 'best_of' 5: give one of them"
        )
    assert refusal(inputs, num_beams=3, best_of=2) == "'num_beams' is 3 and 'best_of' 2: give one of them"
    assert inputs(num_beams=1, best_of=2).requests[0].sampling.best_of == 2
    assert refusal(inputs, num_beams=2, n=3) == "'num_beams' is 2: expected at least 'n', which is 3"


def test_sequences_are_ranked_where_a_rank_can_be_seen() -> None:
    def counts(call: Call) -> tuple[int, int | None]:
        return call.requests[0].sampling.n, call.requests[0].sampling.best_of

    assert [counts(inputs(n=n)) for n in (1, 2, 3)] == [(1, None), (2, 2), (3, 3)]
    assert [counts(chat(n=n)) for n in (1, 2, 3)] == [(1, None), (2, None), (3, None)]
    assert counts(chat(n=2, best_of=3)) == (2, 3)
    tgi = Options(tgi_compat=True)
    assert counts(inputs(defaults=tgi, best_of=3)) == (3, 3)
    assert counts(inputs(defaults=tgi, n=1, best_of=3)) == (1, 3)
    assert counts(inputs(defaults=tgi, n=2)) == (2, 2)


def test_several_sequences_are_no_stream() -> None:
    told = (
        "'stream' is true and 'n', 'best_of' or 'num_beams' above 1: which sequence is the best is known only at the "
        "end, expected 'stream' to be false"
    )
    for parameters in ({"n": 2}, {"best_of": 2}, {"num_beams": 2}):
        assert refusal(inputs, True, **parameters) == told
    told = refusal(chat, stream=True, n=2, num_beams=3)
    assert told == (
        "'best_of' or 'num_beams' is 3, 'n' 2 and 'stream' true: which sequences are the best is known only at the "
        "end, expected 'best_of' to be 'n' and no beams in a stream"
    )
    assert chat(stream=True, n=2, num_beams=2).encoder.stream


# -- chat --------------------------------------------------------------------------------------------------------------


def test_a_chat_that_asks_for_nothing_samples_as_long_as_fits() -> None:
    assert chat().requests[0] == GenerationRequest(messages=MESSAGES, sampling=Sampling(do_sample=True))


def test_every_parameter_reaches_the_chat() -> None:
    expected = GenerationRequest(messages=MESSAGES, sampling=SAMPLING, **OTHERS)
    assert chat(**GIVEN).requests[0] == expected
    for name in ("max_tokens", "max_completion_tokens"):
        seven: dict[str, Any] = {name: 7}
        assert chat(**seven).requests[0].sampling.max_new_tokens == 7


@pytest.mark.parametrize(
    ("options", "usage"),
    [({"include_usage": True}, True), ({"include_usage": False}, False), ({}, False), ({"include_usage": 1}, False)],
)
def test_a_chats_stream_has_usage_where_that_is_asked_for(options: dict[str, Any], usage: bool) -> None:
    body = answer(chat(stream=True, stream_options=options).encoder, EOS)
    assert (b'"usage":' in body) is usage
    assert b'"usage":' not in answer(chat(stream=True).encoder, EOS)


def test_a_chat_shows_its_log_probabilities_where_that_is_asked_for() -> None:
    for logprobs in (False, True):
        (choice,) = json.loads(answer(chat(logprobs=logprobs).encoder, EOS))["choices"]
        assert (choice["logprobs"] is not None) is logprobs


def test_a_chat_in_another_form_has_details_and_tgis_names() -> None:
    assert "details" in json.loads(answer(chat(output_formatter="json").encoder, EOS))
    tgi = chat(Options(tgi_compat=True), output_formatter="json")
    assert json.loads(answer(tgi.encoder, EOS))[0]["details"]["seed"] == 7
    assert chat(output_formatter="none", stream=True).encoder.stream
    assert not chat(output_formatter="none").encoder.stream


def test_several_choices_of_a_chat_have_a_place_in_every_form() -> None:
    for name in ("jsonlines", "sse", "3p", "3p_stream"):
        assert (
            chat(n=1, output_formatter=name).encoder.content_type == lmi.FORMATTERS[name](Presentation()).content_type
        )
        body = json.loads(answer(chat(n=2, output_formatter=name).encoder, several(2)))
        assert len(body["details"]["best_of_sequences"]) == 1
    body = json.loads(answer(chat(n=2, output_formatter="json_chat").encoder, several(2)))
    assert len(body["choices"]) == 2


# -- Bedrock -----------------------------------------------------------------------------------------------------------


def test_a_bedrock_request_is_sampled_unless_its_temperature_is_zero() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, do_sample=True)
    assert bedrock().requests[0] == GenerationRequest(prompt="The wolf", sampling=sampling, default_new_tokens=512)
    given = Sampling(max_new_tokens=7, temperature=1.0, top_p=1.0, do_sample=True)
    assert bedrock(max_gen_len=7, temperature=1, top_p=1).requests[0].sampling == given
    assert not bedrock(temperature=0).requests[0].sampling.do_sample


def test_a_bedrock_answer_begins_with_the_prompt() -> None:
    assert json.loads(answer(bedrock().encoder, EOS))["body"]["generation"] == PROMPT.text + TEXT


def test_a_bedrock_stream_is_asked_for_by_the_invocation() -> None:
    streamed = bedrock("InvokeEndpointWithResponseStream").encoder
    assert (streamed.stream, streamed.content_type) == (True, "application/jsonlines")
    assert json.loads(answer(streamed, EOS).splitlines()[0])["body"]["generation"]
    assert not bedrock("InvokeEndpoint").encoder.stream and not bedrock().encoder.stream


def test_the_adapter_header_names_the_adapter_unless_the_body_does() -> None:
    header = {"x-amzn-sagemaker-adapter-identifier": "french"}
    assert lmi.parse(b'{"inputs": "a"}', None, Options(), header).requests[0] == GenerationRequest(
        prompt="a", default_new_tokens=SHORT, adapter="french"
    )
    assert lmi.parse(b'{"inputs": "a", "adapters": "dutch"}', None, Options(), header).requests[0].adapter == "dutch"
    for name in ("", "french"):
        header = {"x-amzn-sagemaker-adapter-identifier": name}
        assert lmi.parse(b'{"inputs": "a"}', None, Options(), header).requests[0].adapter == (name or None)
