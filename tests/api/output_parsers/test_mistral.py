from __future__ import annotations

import pytest
from hypothesis import given

from djl_trtllm.api.output_parsers.mistral import MARKERS, MistralParser
from tests.api.output_parsers.answers import Answer, check_cuts, cut_texts, parse

CALL = '{"name": "f", "arguments": {"a": "b"}}'
F = ("f", '{"a": "b"}')


@given(cut_texts())
def test_how_a_text_is_cut_changes_nothing(pieces: list[str]) -> None:
    check_cuts(MistralParser, pieces)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The [wolf] ran.", Answer("The [wolf] ran.")),
        (f"[TOOL_CALLS] [{CALL}]", Answer("", (F,))),
        (f"I look. [TOOL_CALLS][{CALL}, {CALL}]", Answer("I look.", (F, F))),
        (f"[TOOL_CALLS]{CALL}", Answer("", (F,))),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": "b"}, "id": "123456789"}]', Answer("", (F,))),
        ('[TOOL_CALLS]f[ARGS]{"a": "b"}', Answer("", (F,))),
        ('[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": "b"}[TOOL_CALLS]f{"a": "b"}', Answer("", (F, F))),
        (f"[TOOL_CALLS][{CALL}] Done.", Answer("Done.", (F,))),
        (f"[TOOL_CALLS][{CALL}, wolf]", Answer(", wolf]", (F,))),
        (f"[TOOL_CALLS] [ {CALL} , {CALL} ] [TOOL_CALLS] [{CALL}]", Answer("", (F, F, F))),
        ("[TOOL_CALLS]" + "f" * 256 + " " * 256 + '{"a": "b"}', Answer("", (("f" * 256, '{"a": "b"}'),))),
    ],
)
def test_calls_are_found_in_the_text(text: str, answer: Answer) -> None:
    assert parse(MistralParser(), text) == parse(MistralParser(), *text) == answer


@pytest.mark.parametrize(
    "text",
    [
        *("[TOOL_CALLS]", "[TOOL_CALLS] [", "[TOOL_CALLS]the wolf ran {", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS][1]"),
        "[TOOL_CALLS]" + "x" * 600,
        "[TOOL_CALLS]" + "x" * 600 + "{}",
        "[TOOL_CALLS]" + "f" * 256 + " " * 257 + '{"a": "b"}',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse(MistralParser(), text) == parse(MistralParser(), *text) == Answer(text)


def test_the_markers_are_tokens_that_the_model_must_be_seen_to_write() -> None:
    assert MARKERS == ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
