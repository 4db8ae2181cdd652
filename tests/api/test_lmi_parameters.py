from __future__ import annotations

import json
from typing import Any

import pytest

from djl_trtllm.api import Call, lmi
from djl_trtllm.api.lmi_parameters import CHAT_FIELDS, INPUTS_PARAMETERS
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from djl_trtllm.executor.protocol import Guide, GuideKind


def parse(**parameters: Any) -> Call:
    return lmi.parse(json.dumps({"inputs": "The wolf", "parameters": parameters}).encode())


SCHEMA = Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')

HONOURED: list[tuple[str, Any, str, Any]] = [
    ("max_new_tokens", 7, "max_new_tokens", 7),
    ("min_new_tokens", 7, "min_new_tokens", 7),
    ("min_length", 7, "min_new_tokens", 7),
    ("min_tokens", 7, "min_new_tokens", 7),
    ("do_sample", True, "do_sample", True),
    ("temperature", 0.5, "temperature", 0.5),
    ("temperature", 2, "temperature", 2.0),
    ("top_k", 7, "top_k", 7),
    ("top_k", -1, "top_k", 0),
    ("top_p", 0.5, "top_p", 0.5),
    ("top_p", 1, "top_p", 1.0),
    ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
    ("presence_penalty", -2, "presence_penalty", -2.0),
    ("frequency_penalty", 2, "frequency_penalty", 2.0),
    ("seed", 2**64 - 1, "seed", 2**64 - 1),
    ("n", 2, "n", 2),
    ("best_of", 2, "best_of", 2),
    ("ignore_eos_token", True, "ignore_eos", True),
    ("ignore_eos", True, "ignore_eos", True),
    ("stop", "a", "stop", ("a",)),
    ("stop", ["a", "b", "a"], "stop", ("a", "b")),
    ("stop_sequences", ["a"], "stop", ("a",)),
    ("stop_sequences", [], "stop", ()),
    ("stop_token_ids", [3, 4], "stop_token_ids", (3, 4)),
    ("truncate", 7, "truncate", 7),
    ("min_p", 0.1, "min_p", 0.1),
    ("no_repeat_ngram_size", 3, "no_repeat_ngram_size", 3),
    ("bad_words", ["a", "b"], "bad", ("a", "b")),
    ("bad_words", "", "bad", ()),
    ("bad_sequences", [], "bad", ()),
    ("num_beams", 4, "beam_width", 4),
    ("beam_width", 2, "beam_width", 2),
    ("length_penalty", 0.5, "length_penalty", 0.5),
    ("early_stopping", True, "early_stopping", True),
    ("beam_search_diversity_rate", 0.5, "beam_search_diversity_rate", 0.5),
    ("adapters", "french", "adapter", "french"),
    ("adapters", ["french"], "adapter", "french"),
    ("adapters", [], "adapter", None),
    ("adapter_id", "", "adapter", None),
    ("grammar", {"type": "json", "value": {"type": "object"}}, "guide", SCHEMA),
    ("grammar", {"type": "regex", "value": "a+"}, "guide", Guide(GuideKind.REGEX, "a+")),
    ("guided_json", {"type": "object"}, "guide", SCHEMA),
    ("guided_json", '{"type": "object"}', "guide", SCHEMA),
    ("guided_regex", "a+", "guide", Guide(GuideKind.REGEX, "a+")),
    ("guided_choice", ["a.", "b"], "guide", Guide(GuideKind.REGEX, r"(a\.|b)")),
    ("guided_grammar", 'root ::= "a"', "guide", Guide(GuideKind.GRAMMAR, 'root ::= "a"')),
    ("response_format", {"type": "text"}, "guide", None),
    ("response_format", {"type": "json_object"}, "guide", Guide(GuideKind.JSON_OBJECT)),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}, "guide", SCHEMA),
    ("response_format", {"type": "json", "value": {"type": "object"}}, "guide", SCHEMA),
    ("guided_decoding", {"json": {"type": "object"}}, "guide", SCHEMA),
    ("guided_decoding", {"json_object": True, "regex": None}, "guide", Guide(GuideKind.JSON_OBJECT)),
]


@pytest.mark.parametrize(("name", "value", "field", "becomes"), HONOURED)
def test_honoured(name: str, value: Any, field: str, becomes: Any) -> None:
    request = parse(**{name: value}).request
    holder = request if hasattr(request, field) else request.sampling
    assert getattr(holder, field) == becomes


WRONG: list[tuple[str, Any]] = [
    ("max_new_tokens", 0),
    ("max_new_tokens", 2.0),
    ("max_new_tokens", "3"),
    ("max_new_tokens", True),
    ("max_new_tokens", 2**31),
    ("min_new_tokens", -1),
    ("do_sample", 1),
    ("do_sample", "true"),
    ("temperature", -0.1),
    ("temperature", True),
    ("temperature", "1"),
    ("top_k", -2),
    ("top_p", 0),
    ("top_p", 1.1),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("seed", -1),
    ("seed", 2**64),
    ("n", 0),
    ("best_of", 0),
    ("ignore_eos", 0),
    ("stop", True),
    ("stop", [""]),
    ("stop_sequences", [1]),
    ("stop_sequences", [str(i) for i in range(65)]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("truncate", 0),
    ("min_p", 1.5),
    ("no_repeat_ngram_size", -1),
    ("bad_words", [""]),
    ("num_beams", 0),
    ("num_beams", 65),
    ("early_stopping", 1),
    ("adapters", ["a", "b"]),
    ("adapters", [3]),
    ("grammar", {"type": "ebnf", "value": "x"}),
    ("grammar", "a+"),
    ("guided_json", "not json"),
    ("guided_json", []),
    ("guided_json", {"description": "x" * 70_000}),
    ("guided_regex", ""),
    ("guided_choice", []),
    ("guided_choice", [""]),
    ("guided_grammar", 3),
    ("response_format", {"type": "yaml"}),
    ("response_format", "json"),
    ("guided_decoding", {}),
    ("guided_decoding", {"regex": "a", "json_object": True}),
    ("details", "false"),
    ("return_full_text", 1),
    ("decoder_input_details", 0),
    ("output_formatter", 3),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(**{name: value})
    assert not isinstance(caught.value, UnsupportedParameterError)
    message = str(caught.value)
    assert f"'{name}' is " in message
    assert ": expected " in message


UNSUPPORTED: list[tuple[str, list[Any], Any]] = [
    ("top_n_tokens", [0], 1),
    ("prompt_logprobs", [0, False], 1),
    ("typical_p", [1, 1.0], 0.9),
    ("watermark", [False], True),
    ("logit_bias", [{}], {"1": 5}),
    ("cached_prompt", [], "x"),
    ("include_stop_str_in_output", [False], True),
    ("skip_special_tokens", [True], False),
    ("spaces_between_special_tokens", [True], False),
    ("logprobs", [0, 1, True, False], 5),
]


@pytest.mark.parametrize(("name", "neutral", "value"), UNSUPPORTED)
def test_unsupported_unless_neutral(name: str, neutral: list[Any], value: Any) -> None:
    for harmless in (None, *neutral):
        assert parse(**{name: harmless}).request.prompt == "The wolf"
    with pytest.raises(UnsupportedParameterError, match=f"'{name}' is .* not supported"):
        parse(**{name: value})


def test_a_request_has_one_guide() -> None:
    with pytest.raises(InvalidRequestError, match="give one"):
        parse(guided_regex="a+", guided_json={"type": "object"})


def test_beams_are_ranked_by_the_engine_and_not_sampled() -> None:
    sampling = parse(num_beams=3, n=2, temperature=0.7).request.sampling
    assert (sampling.sequences, sampling.n, sampling.best_of, sampling.do_sample) == (3, 2, None, False)
    for wrong in ({"num_beams": 2, "n": 3}, {"num_beams": 2, "best_of": 4}, {"num_beams": 17}):
        with pytest.raises(InvalidRequestError, match=r"beams|best_of"):
            parse(**wrong)


def test_log_probabilities_are_needed_where_they_rank_and_wanted_where_they_are_shown() -> None:
    assert not parse(details=True).request.needs_logprobs
    assert parse(details=True).request.logprobs
    assert parse(best_of=2).request.needs_logprobs


def test_every_row_is_tested_here() -> None:
    tested = {name for name, *_ in (*HONOURED, *UNSUPPORTED)}
    shown = {"details", "return_full_text", "decoder_input_details", "output_formatter"}
    assert set(INPUTS_PARAMETERS.rows) == tested | shown


@pytest.mark.parametrize(
    ("name", "value"), [("tools", [{}]), ("tool_choice", "required"), ("top_logprobs", 2), ("logit_bias", {"1": 1})]
)
def test_unsupported_in_chat(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameterError, match=name):
        lmi.parse(json.dumps({"messages": [{"role": "user", "content": "a"}], name: value}).encode())


def test_every_sampling_parameter_is_known_in_chat() -> None:
    shown = {"details", "return_full_text", "decoder_input_details"}
    assert set(INPUTS_PARAMETERS.rows) - shown <= set(CHAT_FIELDS.rows)


def test_null_is_not_given() -> None:
    assert parse(**dict.fromkeys(INPUTS_PARAMETERS.rows)).request == parse().request


def test_both_kinds_of_stop_strings_are_joined() -> None:
    assert parse(stop=["a", "b"], stop_sequences=["b", "c"]).request.stop == ("a", "b", "c")


def test_two_names_of_one_parameter_must_agree() -> None:
    assert parse(min_length=2, min_tokens=2).request.sampling.min_new_tokens == 2
    with pytest.raises(InvalidRequestError, match="mean the same"):
        parse(min_length=2, min_tokens=3)


def test_json_types_are_explained() -> None:
    with pytest.raises(InvalidRequestError, match=r"'top_k' is 5\.0: .*written without a decimal point: 5"):
        parse(top_k=5.0)
    with pytest.raises(InvalidRequestError, match=r"'do_sample' is \"True\": .*without quotation marks"):
        parse(do_sample="True")


def test_unknown_parameters_are_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidRequestError, match=r"unknown parameter \"temprature\", did you mean 'temperature'"):
        parse(temprature=1)
    with pytest.raises(InvalidRequestError, match=r'unknown parameter "qqqq"$'):
        parse(qqqq=1)
