"""What an engine does not honour is refused by name."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from djl_trtllm.batching.features import _not_honoured, gives_logprobs, require
from djl_trtllm.errors import UnsupportedParameterError
from djl_trtllm.executor.protocol import Feature
from djl_trtllm.request import GenerationRequest, Guide, GuideKind, Sampling

NO_BEAM_FIELD = "this engine's sampler does not have it; leave it out"
GUIDES = (
    "this engine cannot constrain its output; on TensorRT-LLM set option.guided_decoding_backend=xgrammar, on OpenVINO "
    "the engine's folder needs openvino_tokenizer.xml and openvino_detokenizer.xml: compile the model again, with a "
    "tokenizer that OpenVINO can convert (the compiler's log says if it could not)"
)
PENALTIES = "this engine's sampler ignores it; on TensorRT-LLM set option.sampler_type=TRTLLMSampler"
EVERYTHING = frozenset({*Sampling.__struct_fields__, *GenerationRequest.__struct_fields__, *Feature})


def asking(**sampling: object) -> GenerationRequest:
    return GenerationRequest(prompt="a", sampling=Sampling(**sampling))  # type: ignore[arg-type]


def guided(kind: GuideKind) -> GenerationRequest:
    return GenerationRequest(prompt="a", guide=Guide(kind, "a"))


CASES: dict[str, tuple[list[GenerationRequest], str]] = {
    "max_new_tokens": ([asking(max_new_tokens=4)], "'max_new_tokens'"),
    "min_new_tokens": ([asking(min_new_tokens=4)], "'min_new_tokens'"),
    "do_sample": ([asking(do_sample=True)], "'do_sample'"),
    "temperature": ([asking(do_sample=True, temperature=0.5)], "'temperature'"),
    "top_k": ([asking(do_sample=True, top_k=4)], "'top_k'"),
    "top_p": ([asking(do_sample=True, top_p=0.5)], "'top_p'"),
    "repetition_penalty": ([asking(repetition_penalty=1.5)], f"'repetition_penalty': {PENALTIES}"),
    "presence_penalty": ([asking(presence_penalty=0.5)], f"'presence_penalty': {PENALTIES}"),
    "frequency_penalty": ([asking(frequency_penalty=0.5)], f"'frequency_penalty': {PENALTIES}"),
    "seed": (
        [asking(do_sample=True, seed=0)],
        "'seed': this engine's sampler ignores it; leave it out, or set option.ignored_seed=warn to have such requests "
        "answered with a warning; on TensorRT-LLM option.sampler_type=TRTLLMSampler takes seeds",
    ),
    "ignore_eos": ([asking(ignore_eos=True)], "'ignore_eos'"),
    "min_p": ([asking(min_p=0.1)], "'min_p': use 'top_p'"),
    "no_repeat_ngram_size": ([asking(no_repeat_ngram_size=1)], "'no_repeat_ngram_size': use 'repetition_penalty'"),
    "beam_width": (
        [asking(beam_width=2)],
        "'num_beams' ('beam_width'): this engine has no beam search; use 'n' and 'best_of' with sampling, or "
        "TensorRT-LLM with option.max_beam_width",
    ),
    "length_penalty": ([asking(beam_width=2, length_penalty=0.5)], f"'length_penalty': {NO_BEAM_FIELD}"),
    "early_stopping": ([asking(beam_width=2, early_stopping=True)], f"'early_stopping': {NO_BEAM_FIELD}"),
    "beam_search_diversity_rate": (
        [asking(beam_width=2, beam_search_diversity_rate=0.5)],
        f"'beam_search_diversity_rate': {NO_BEAM_FIELD}",
    ),
    "stop_token_ids": ([GenerationRequest(prompt="a", stop_token_ids=(3,))], "'stop_token_ids'"),
    "bad": (
        [GenerationRequest(prompt="a", bad=("x",))],
        "'bad_words' ('bad_sequences'): this engine cannot exclude words",
    ),
    "top_logprobs": (
        [GenerationRequest(prompt="a", top_logprobs=2)],
        "'top_logprobs' (in completions 'logprobs' above 1): this engine has the chosen token's log-probability only; "
        "with beams no engine has more",
    ),
    Feature.JSON: ([guided(GuideKind.JSON_OBJECT), guided(GuideKind.JSON_SCHEMA)], f"a JSON guide: {GUIDES}"),
    Feature.REGEX: ([guided(GuideKind.REGEX)], f"a regular expression: {GUIDES}"),
    Feature.GRAMMAR: ([guided(GuideKind.GRAMMAR)], f"a grammar: {GUIDES}"),
    Feature.ADAPTERS: (
        [GenerationRequest(prompt="a", adapter="french")],
        "'adapters': this model is served without LoRA adapters; on TensorRT-LLM set option.enable_lora=true",
    ),
    Feature.LOGPROBS: (
        [GenerationRequest(prompt="a", logprobs=True, needs_logprobs=True)],
        "'logprobs' or 'best_of': this engine has no log-probabilities; on a compiled TensorRT engine set "
        "option.gather_generation_logits=true",
    ),
    Feature.BEAM_LOGPROBS: (
        [replace(asking(beam_width=2), logprobs=True, needs_logprobs=True)],
        "'logprobs' with 'num_beams': this engine has no log-probabilities of beams; leave out 'logprobs' or "
        "'num_beams'",
    ),
}
DONE_ABOVE = {
    **{"n": 2, "best_of": 2, "stop": ("x",), "truncate": 4, "logprobs": True, "asks_logprobs": True},
    "default_new_tokens": 30,
    "template": {"tools": []},
    "shown_tokens": ("<tool_call>",),
    "guide_from": "tool_choice",
}
"""Fields that need nothing of an engine."""

NAMED_BY_A_FEATURE = {"prompt", "prompt_ids", "messages", "sampling", "guide", "adapter", "needs_logprobs"}


def test_every_field_of_a_request_and_every_feature_has_a_case() -> None:
    fields = {*Sampling.__struct_fields__, *GenerationRequest.__struct_fields__}
    assert set(CASES) == (fields - set(DONE_ABOVE) - NAMED_BY_A_FEATURE) | (set(Feature) - {Feature.FREE_LOGPROBS})


@pytest.mark.parametrize("name", CASES)
def test_what_an_engine_does_not_honour_is_refused_by_name(name: str) -> None:
    requests, refusal = CASES[name]
    for request in requests:
        require(request, EVERYTHING)
        with pytest.raises(UnsupportedParameterError) as caught:
            require(request, EVERYTHING - {name})
        assert str(caught.value) == f"not supported by this backend: {refusal}"


def test_the_most_likely_tokens_of_beams_are_refused() -> None:
    with pytest.raises(UnsupportedParameterError, match=r"'top_logprobs' .* with beams no engine has more"):
        require(GenerationRequest(prompt="a", sampling=Sampling(beam_width=2), top_logprobs=2), EVERYTHING)


def test_everything_that_is_missing_is_in_one_message() -> None:
    sampling = Sampling(min_p=0.1)
    request = GenerationRequest(prompt="a", bad=("x",), sampling=sampling, guide=Guide(GuideKind.REGEX, "a"))
    with pytest.raises(UnsupportedParameterError) as caught:
        require(request, frozenset())
    missing = "; ".join(CASES[name][1] for name in ("min_p", "bad", Feature.REGEX))
    assert str(caught.value) == f"not supported by this backend: {missing}"


def test_a_guide_of_another_parameter_is_refused_by_that_ones_name() -> None:
    guide = Guide(GuideKind.JSON_SCHEMA, "{}")
    with pytest.raises(UnsupportedParameterError) as caught:
        require(GenerationRequest(prompt="a", guide=guide, guide_from="tool_choice"), frozenset())
    assert "'tool_choice', which needs a JSON guide: this engine cannot constrain its output" in str(caught.value)


@pytest.mark.parametrize(("name", "value"), DONE_ABOVE.items())
def test_what_the_server_does_itself_needs_nothing_of_the_engine(name: str, value: object) -> None:
    request = GenerationRequest(prompt="a")
    if name in Sampling.__struct_fields__:
        request = replace(request, sampling=replace(Sampling(), **{name: value}))
    else:
        request = replace(request, **{name: value})
    require(request, frozenset())


def test_fields_that_belong_to_sampling_or_beam_search_are_ignored_without_it() -> None:
    greedy = asking(temperature=0.5, top_k=4, top_p=0.5, seed=3, length_penalty=0.5, early_stopping=True)
    require(greedy, frozenset())
    require(asking(beam_search_diversity_rate=0.5), frozenset())


def test_what_an_engine_does_not_honour_is_derived_once() -> None:
    before = _not_honoured.cache_info().hits
    for _ in range(2):
        require(GenerationRequest(prompt="a"), frozenset({"temperature", "derived once"}))
    assert _not_honoured.cache_info().hits == before + 1


@pytest.mark.parametrize(("asks", "needs", "free"), list(product((False, True), repeat=3)))
def test_log_probabilities_go_to_those_who_want_them_or_where_they_are_free(
    asks: bool, needs: bool, free: bool
) -> None:
    request = GenerationRequest(prompt="a", logprobs=True, asks_logprobs=asks, needs_logprobs=needs)
    features = {Feature.FREE_LOGPROBS} if free else set()
    assert gives_logprobs(request, features | {Feature.LOGPROBS}) is (asks or needs or free)
    assert not gives_logprobs(request, features)


def test_beams_have_log_probabilities_where_the_engine_has_them_of_beams() -> None:
    request = replace(asking(beam_width=2), logprobs=True, asks_logprobs=True)
    assert gives_logprobs(request, {Feature.LOGPROBS, Feature.BEAM_LOGPROBS})
    assert not gives_logprobs(request, {Feature.LOGPROBS})
    require(request, frozenset({"beam_width", Feature.LOGPROBS}))  # an answer's format alone needs none
