"""The tables of the LMI dialect: what each parameter takes, refuses and becomes, wherever it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.api.lmi.parameters import BEDROCK_FIELDS, CHAT_FIELDS, INPUTS_FIELDS, INPUTS_PARAMETERS
from djl_trtllm.api.parameters import Problems, Table
from djl_trtllm.request import Guide, GuideKind
from tests.api.tables import check_tables

MOST = 2**31 - 1
BOOLEANS: tuple[list[Any], list[Any]] = ([(True, True), (False, False)], [0, 1, "true"])
COUNTS: tuple[list[Any], list[Any]] = ([(0, 0), (MOST, MOST)], [-1, MOST + 1, 2.0, "3", True])
NUMBERS: tuple[list[Any], list[Any]] = ([(1, 1), (MOST, MOST)], [0, MOST + 1, 2.0, "3", True])
STRINGS: list[Any] = [("a", ("a",)), (["a", "b", "a"], ("a", "b")), ([], ())]
PENALTIES: tuple[list[Any], list[Any]] = ([(-2, -2.0), (2, 2.0), (0.5, 0.5)], [-2.01, 2.01, True, "1"])
SCHEMA = Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')

# By target: its names, values and what they become, and values that are refused.
SAMPLING: dict[str, tuple[str, list[Any], list[Any]]] = {
    "do_sample": ("do_sample", *BOOLEANS),
    "top_k": ("top_k", [(0, 0), (7, 7), (MOST, MOST), (-1, 0)], [-2, MOST + 1, 1.0, "1", True]),
    "top_p": ("top_p", [(0.001, 0.001), (1, 1.0)], [0, 1.001, "1", True]),
    "repetition_penalty": ("repetition_penalty", [(0.001, 0.001), (1e9, 1e9)], [0, -1, "1"]),
    "presence_penalty": ("presence_penalty", *PENALTIES),
    "frequency_penalty": ("frequency_penalty", *PENALTIES),
    "seed": ("seed", [(0, 0), (2**64 - 1, 2**64 - 1)], [-1, 2**64, 1.0]),
    "n": ("n", [(1, 1), (2**70, 2**70)], [0, 1.0, True]),
    "best_of": ("best_of", [(1, 1), (2**70, 2**70)], [0, 1.0, True]),
    "min_new_tokens": ("min_new_tokens min_length min_tokens", *COUNTS),
    "stop": ("stop_sequences stop", STRINGS, ["", [""], [1], True, [str(i) for i in range(65)]]),
    "stop_token_ids": ("stop_token_ids", [([3, 4, 3], (3, 4)), ([], ())], [3, [-1], [True], ["3"]]),
    "ignore_eos": ("ignore_eos_token ignore_eos", *BOOLEANS),
    "truncate": ("truncate", *NUMBERS),
    "min_p": ("min_p", [(0, 0.0), (1, 1.0)], [-0.01, 1.01]),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", *COUNTS),
    "bad": ("bad_sequences bad_words", [*STRINGS, ("", ())], [[""], [1], 0]),
    "beam_width": ("num_beams beam_width", [(1, 1), (64, 64)], [0, 65, 1.0]),
    "length_penalty": ("length_penalty", [(0, 0.0), (10, 10.0)], [-0.1, 10.1]),
    "early_stopping": ("early_stopping", *BOOLEANS),
    "beam_search_diversity_rate": ("beam_search_diversity_rate", [(0, 0.0), (10, 10.0)], [-0.1, 10.1]),
    "output_formatter": ("output_formatter", [("sse", "sse"), ("", "")], [3, ["sse"]]),
}
ADAPTER: dict[str, tuple[str, list[Any], list[Any]]] = {
    "adapter": (
        "adapters adapter_id",
        [("french", "french"), (["french"], "french"), ([], None), ("", None), ([""], None)],
        [3, [3], ["a", "b"], {"a": 1}],
    ),
}
GUIDED = {
    "grammar": ({"type": "json", "value": {"type": "object"}}, SCHEMA),
    "guided_json": ({"type": "object"}, SCHEMA),
    "guided_regex": ("a+", Guide(GuideKind.REGEX, "a+")),
    "guided_choice": (["a"], Guide(GuideKind.REGEX, "(a)")),
    "guided_grammar": ("x", Guide(GuideKind.GRAMMAR, "x")),
    "response_format": ({"type": "text"}, None),
    "guided_decoding": ({"json_object": True}, Guide(GuideKind.JSON_OBJECT)),
}
OWN_OF_INPUTS: dict[str, tuple[str, list[Any], list[Any]]] = {
    "max_new_tokens": ("max_new_tokens", *NUMBERS),
    "temperature": ("temperature", [(0, 0.0), (2.5, 2.5), (100, 100.0)], [-0.1, True, "1"]),
    "details": ("details", *BOOLEANS),
    "return_full_text": ("return_full_text", *BOOLEANS),
    "prefill": ("decoder_input_details", *BOOLEANS),
}
STREAM: dict[str, tuple[str, list[Any], list[Any]]] = {"stream": ("stream", *BOOLEANS)}
OWN_OF_CHAT: dict[str, tuple[str, list[Any], list[Any]]] = {
    "max_new_tokens": ("max_tokens max_completion_tokens max_new_tokens", *NUMBERS),
    "temperature": ("temperature", [(0, 0.0), (2, 2.0)], [-0.1, 2.1, True]),
    **STREAM,
    "stream_options": ("stream_options", [({"a": 1}, {"a": 1})], [[], True]),
    "logprobs": ("logprobs", *BOOLEANS),
}
OF_BEDROCK: dict[str, tuple[str, list[Any], list[Any]]] = {
    "temperature": ("temperature", [(0, 0.0), (100, 100.0)], [-0.1]),
    "top_p": ("top_p", [(0.001, 0.001), (1, 1.0)], [0, 1.001]),
    "max_new_tokens": ("max_gen_len", *NUMBERS),
}

# By name: values that change nothing, others, and what the refusal adds.
NOT_HONOURED: dict[str, tuple[list[Any], list[Any], str]] = {
    "top_n_tokens": ([0], [1, 5], "tokens carry the chosen token's log-probability only"),
    "prompt_logprobs": ([0, False], [1, True], ""),
    "typical_p": ([1, 1.0], [0.9], "use 'top_p'"),
    "watermark": ([False, 0], [True, 1], ""),
    "logit_bias": ([{}], [{"1": 5}], ""),
    "cached_prompt": ([], ["x"], "equal prompt beginnings are reused by themselves (prefix caching)"),
    "include_stop_str_in_output": ([False], [True], ""),
    "skip_special_tokens": ([True], [False], ""),
    "spaces_between_special_tokens": ([True], [False], ""),
}
CHOSEN_ONLY = "only the chosen token's is available"
NO_TOOLS = "/v1/chat/completions has tool calls"
NOT_IN_INPUTS = NOT_HONOURED | {"logprobs": ([0, 1, True, False], [2, 5], CHOSEN_ONLY)}
NOT_IN_CHAT = NOT_HONOURED | {
    "top_logprobs": ([0, 1], [2], CHOSEN_ONLY),
    "tools": ([[]], [[{}]], NO_TOOLS),
    "tool_choice": (["none", "auto"], ["required", {"type": "function"}], NO_TOOLS),
}
IGNORED_IN_CHAT = "messages model user sagemaker_base_url"

TABLES = {
    "parameters": (INPUTS_PARAMETERS, SAMPLING | ADAPTER | OWN_OF_INPUTS, NOT_IN_INPUTS, GUIDED, "sagemaker_base_url"),
    "inputs": (INPUTS_FIELDS, ADAPTER | STREAM, NOT_HONOURED, {}, "inputs parameters model options"),
    "chat": (CHAT_FIELDS, SAMPLING | ADAPTER | OWN_OF_CHAT, NOT_IN_CHAT, GUIDED, IGNORED_IN_CHAT),
    "bedrock": (BEDROCK_FIELDS, OF_BEDROCK, {}, {}, "prompt"),
}


def read(table: Table, **given: Any) -> tuple[dict[str, Any], Problems]:
    problems = Problems()
    return table.read(given, problems, "parameter"), problems


@pytest.mark.parametrize("name", TABLES)
def test_every_name_of_a_table_is_tested_here(name: str) -> None:
    table, honoured, refused, guided, ignored = TABLES[name]
    names = [spelling for spellings, _, _ in honoured.values() for spelling in spellings.split()]
    assert sorted(table.rows) == sorted([*names, *refused, *guided, *ignored.split()])


@pytest.mark.parametrize("name", TABLES)
def test_values_become_those_of_their_target_under_any_name(name: str) -> None:
    table, honoured, _, guided, _ = TABLES[name]
    wrong = []
    for target, (spellings, values, _) in honoured.items():
        for spelling in spellings.split():
            for value, becomes in values:
                found, problems = read(table, **{spelling: value})
                same = found == {target: becomes} and type(found[target]) is type(becomes)
                if not same or problems != Problems():
                    wrong.append((spelling, value, found, problems))
    for spelling, (value, guide) in guided.items():
        if read(table, **{spelling: value}) != ({"guide": guide}, Problems()):
            wrong.append((spelling, value, *read(table, **{spelling: value})))
    assert wrong == []


@pytest.mark.parametrize("name", TABLES)
def test_other_values_are_refused_with_what_is_expected(name: str) -> None:
    table, honoured, _, _, _ = TABLES[name]
    taken = []
    for spellings, _, others in honoured.values():
        for spelling in spellings.split():
            for value in others:
                found, problems = read(table, **{spelling: value})
                begin = f"'{spelling}' is "
                if found or len(problems.invalid) != 1 or not problems.invalid[0].startswith(begin):
                    taken.append((spelling, value, found, problems))
    assert taken == []


@pytest.mark.parametrize("name", TABLES)
def test_what_is_not_honoured_is_taken_where_it_changes_nothing_and_refused_elsewhere(name: str) -> None:
    table, _, refused, _, ignored = TABLES[name]
    wrong = []
    for spelling, (neutral, others, advice) in refused.items():
        for value in (None, *neutral):
            if read(table, **{spelling: value}) != ({}, Problems()):
                wrong.append((spelling, value))
        for value in others:
            _, problems = read(table, **{spelling: value})
            end = f"not supported by this backend{': ' if advice else ''}{advice}"
            if problems.invalid or len(problems.unsupported) != 1 or not problems.unsupported[0].endswith(end):
                wrong.append((spelling, problems))
    for spelling in ignored.split():
        if read(table, **{spelling: [object]}) != ({}, Problems()):
            wrong.append((spelling, "not ignored"))
    assert wrong == []


def test_both_names_of_lists_are_joined() -> None:
    for table in (INPUTS_PARAMETERS, CHAT_FIELDS):
        lists = {"stop": ["a", "b"], "stop_sequences": ["b", "c"], "bad_words": ["a"], "bad_sequences": ["b"]}
        assert read(table, **lists) == ({"stop": ("a", "b", "c"), "bad": ("a", "b")}, Problems())


def test_a_number_that_is_too_large_or_a_word_is_reported_with_the_range() -> None:
    _, problems = read(INPUTS_PARAMETERS, top_k=-2, adapters=["a", "b"], adapter_id=3)
    assert problems.invalid == [
        f"'top_k' is -2: expected an integer from 0 to {MOST}, 0 for the whole vocabulary",
        '\'adapters\' is ["a","b"]: expected the name of an adapter, or a list of one '
        "(a request is one prompt, and has one adapter)",
        "'adapter_id' is 3: expected the name of an adapter, or a list of one",
    ]


IN_PARAMETERS = [name for name in INPUTS_PARAMETERS.rows if name not in INPUTS_FIELDS.rows]
BESIDE = "to requests without 'messages'"


@pytest.mark.parametrize(
    ("table", "names", "place"),
    [
        (INPUTS_PARAMETERS, ["inputs", "stream", "messages"], "beside 'parameters', not in it"),
        (INPUTS_FIELDS, IN_PARAMETERS, "in 'parameters'"),
        (INPUTS_FIELDS, ["prompt"], "to requests under option.bedrock_compat, here it is 'inputs'"),
        (CHAT_FIELDS, ["inputs"], BESIDE),
        (CHAT_FIELDS, ["parameters"], f"{BESIDE}, here its members stand beside 'messages'"),
    ],
)
def test_a_name_of_another_place_is_sent_there(table: Table, names: list[str], place: str) -> None:
    assert names
    _, problems = read(table, **dict.fromkeys(names, 1))
    assert problems.invalid == [f"'{name}' belongs {place}" for name in names]
    assert read(table, **dict.fromkeys(names)) == ({}, Problems())


def test_every_sampling_parameter_is_known_in_chat() -> None:
    shown = {"details", "return_full_text", "decoder_input_details"}
    assert set(INPUTS_PARAMETERS.rows) - shown <= set(CHAT_FIELDS.rows)


def test_the_page_names_what_is_honoured() -> None:
    page = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    # `min_tokens` and `adapter_id` are vLLM's and TGI's names of what the page names as documented.
    honoured = {name for name in INPUTS_PARAMETERS.rows if name not in NOT_IN_INPUTS}
    assert honoured - named == {"min_tokens", "adapter_id"}


def test_the_tables() -> None:
    check_tables("lmi", inputs=INPUTS_FIELDS, parameters=INPUTS_PARAMETERS, chat=CHAT_FIELDS, bedrock=BEDROCK_FIELDS)
