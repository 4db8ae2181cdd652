from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djl_trtllm.config.registry import OPTIONS

from .fuzz import KEYS, MODEL_TYPES, VARIABLES, WORDS, generated, resolved
from .helpers import from_text

_values = st.sampled_from(WORDS) | st.text(max_size=12) | st.integers(-10, 10**9).map(str) | st.floats().map(str)
_names = st.sampled_from(KEYS) | st.text(max_size=12)
_files = st.lists(st.tuples(_names, _values), max_size=6).map(lambda pairs: "\n".join("=".join(p) for p in pairs))
_variables = st.dictionaries(st.sampled_from(VARIABLES) | st.text(min_size=1, max_size=12), _values, max_size=6)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=_files, environ=_variables, arguments=st.lists(st.text(max_size=20), max_size=2), kind=st.data())
def test_any_file_and_environment_resolve_or_are_refused(
    text: str, environ: dict[str, str], arguments: list[str], kind: st.DataObject
) -> None:
    resolved(text, environ, arguments, kind.draw(st.sampled_from(MODEL_TYPES) | st.text(max_size=8)))


def test_the_generator_of_the_fuzzer_makes_cases_of_both_kinds() -> None:
    choose = random.Random(1)
    outcomes = {resolved(*generated(choose), "llama") is None for _ in range(300)}
    assert outcomes == {True, False}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_every_word_of_a_closed_set_is_taken_in_either_case(name: str) -> None:
    declared = OPTIONS[name]
    if declared.option.scope.value == "operator":
        return
    for choice in declared.type.choices:
        for text in (choice.lower(), choice.upper()):
            value = getattr(from_text(f"{declared.key}={text}").options, name)
            assert value is None or value.value.lower() == choice.lower()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,2", (1, 2)), ("[1, 2]", (1, 2)), ("7", (7,)), ("7,", (7,)), ("1 , 2 # both", (1, 2)), ("none", None)],
)
def test_lists_of_numbers(text: str, value: tuple[int, ...] | None) -> None:
    assert from_text(f"option.max_attention_window={text}").options.max_attention_window == value


@pytest.mark.parametrize("text", ["1,x", "0", "[", "[]", "{}", "[[1]]", "[true]", ",", "1;2", "[1.5]", "1,,2"])
def test_what_is_no_list_of_numbers(text: str) -> None:
    from .helpers import problems_of

    (problem,) = problems_of(f"option.max_attention_window={text}")
    assert "whole numbers (tokens) with commas between them, each at least 1" in problem


def test_lists_of_names() -> None:
    assert from_text('option.exclude_modules=["lm_head", "a.b"]').options.exclude_modules == ("lm_head", "a.b")
    assert from_text("option.lora_target_modules=attn_q,attn_v").options.lora_target_modules == ("attn_q", "attn_v")
    assert from_text("option.clamp_val=[-1200.0,1200]").options.clamp_val == (-1200.0, 1200.0)
