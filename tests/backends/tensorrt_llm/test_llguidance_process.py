"""The process that tries guides with llguidance, the package itself."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from djl_trtllm.executor.guide_checker import GuideChecker, key_of
from djl_trtllm.request import Guide, GuideKind

pytest.importorskip("llguidance")
from djl_trtllm.backends.tensorrt_llm.llguidance_process import LlguidanceTrial  # if it is installed

GOOD = [
    Guide(GuideKind.JSON_OBJECT, ""),
    Guide(GuideKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "string"}}}'),
    Guide(GuideKind.REGEX, "(yes|no)"),
    Guide(GuideKind.GRAMMAR, 'start: "a" start | "b"'),
]
BAD = [
    (Guide(GuideKind.JSON_SCHEMA, '{"type": "text"}'), "Invalid type: text"),
    (Guide(GuideKind.JSON_SCHEMA, "5"), "schema must be an object or boolean"),
    (Guide(GuideKind.JSON_SCHEMA, '{"anyOf": []}'), "Unsatisfiable schema: anyOf is empty"),
    (Guide(GuideKind.REGEX, "("), "unclosed group"),
    (Guide(GuideKind.GRAMMAR, 'start: "a" b'), 'at 1(8): unknown name: "b" (llguidance has Lark\'s grammars)'),
    (
        Guide(GuideKind.GRAMMAR, 'root ::= "a"'),
        '1(7): Expected value (at ":" (Colon)) (llguidance has Lark\'s grammars)',
    ),
]
UNMATCHED = "no text matches it, or none from a certain point on"
LATE = [
    (Guide(GuideKind.REGEX, r"[^\s\S]"), UNMATCHED),
    (Guide(GuideKind.JSON_SCHEMA, '{"$ref": "#"}'), UNMATCHED),
    (Guide(GuideKind.GRAMMAR, 'start: "a" x\nx: "" x'), f"{UNMATCHED} (llguidance has Lark's grammars)"),
    (
        Guide(
            GuideKind.JSON_SCHEMA,
            '{"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}',
        ),
        UNMATCHED,
    ),
    (Guide(GuideKind.REGEX, r"(\w{1,1000}){1,1000}"), "lexer error: too many expressions constructed"),
    (
        Guide(
            GuideKind.JSON_SCHEMA,
            json.dumps({"type": "object", "properties": {f"p{n}": {"type": ["string", "null"]} for n in range(1000)}}),
        ),
        "Parser Error: Current row has 4007 items; max is 2000",
    ),
]
"""They are compiled; the error comes with a token."""


@pytest.fixture
def tokenizer(tiny_stories: Path) -> str:
    return (tiny_stories / "tokenizer.json").read_text()


def test_each_kind_of_guide_is_tried_for_the_models_tokenizer(tokenizer: str) -> None:
    trial = LlguidanceTrial(tokenizer)
    assert [trial(guide) for guide in GOOD] == [None] * len(GOOD)
    assert [trial(guide) for guide, _ in BAD] == [problem for _, problem in BAD]


@pytest.mark.parametrize(("guide", "problem"), LATE)
def test_a_guide_that_fails_with_a_token_of_its_output_is_refused(tokenizer: str, guide: Guide, problem: str) -> None:
    assert (LlguidanceTrial(tokenizer)(guide) or "").startswith(problem)


def test_a_grammar_whose_tokens_take_ever_longer_is_refused(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr(time, "process_time", lambda: next(seconds) * 0.3)
    found = LlguidanceTrial(tokenizer)(Guide(GuideKind.GRAMMAR, 'start: start start | "a" |'))
    assert found is not None and found.startswith("it is too slow: the first 7 tokens of an output take more than 2 s")


def test_a_guide_that_takes_long_to_compile_is_refused(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((0.0, 6.0))
    monkeypatch.setattr(time, "process_time", lambda: next(seconds, 6.0))
    found = LlguidanceTrial(tokenizer)(Guide(GuideKind.REGEX, "a+"))
    assert found == "it is too large: compiling it would stop all other requests for 6 seconds"


def test_an_output_that_ends_is_tried_to_its_end(tokenizer: str) -> None:
    trial = LlguidanceTrial(tokenizer)
    assert trial(Guide(GuideKind.GRAMMAR, 'start: "a" "b" "c"')) is None
    assert trial(Guide(GuideKind.REGEX, "")) is None


@pytest.mark.parametrize(
    ("guide", "problem"),
    [
        (Guide(GuideKind.REGEX, "(<state>"), "unclosed group"),
        (Guide(GuideKind.JSON_SCHEMA, '{"type": "<state>"}'), "Invalid type: <state>"),
        (
            Guide(GuideKind.JSON_SCHEMA, '{"type": "array", "maxItems": 70000, "items": {"type": "integer"}}'),
            "it is too large for llguidance (panic: assertion failed",
        ),
    ],
)
def test_a_problem_is_what_is_wrong_with_the_guide(tokenizer: str, guide: Guide, problem: str) -> None:
    assert (LlguidanceTrial(tokenizer)(guide) or "").startswith(problem)


def test_without_a_tokenizer_guides_are_parsed() -> None:
    trial = LlguidanceTrial(None)
    late = [guide for guide, _ in LATE]
    assert [trial(guide) for guide in (*GOOD, *late)] == [None] * (len(GOOD) + len(late))
    assert [trial(guide) for guide, _ in BAD] == [problem for _, problem in BAD]


def test_a_guide_that_is_too_large_is_refused(tokenizer: str) -> None:
    schema = json.dumps({"enum": [str(number) * 50 for number in range(50_000)]})
    problem = LlguidanceTrial(tokenizer)(Guide(GuideKind.JSON_SCHEMA, schema))
    assert problem is not None and "too big" in problem


def test_the_program_tries_guides(tiny_stories: Path) -> None:
    checker = GuideChecker("djl_trtllm.backends.tensorrt_llm.llguidance_process", str(tiny_stories))
    guides = (GOOD[2], BAD[0][0])
    for guide in guides:
        checker.check(key_of(guide), guide)
    while not checker.idle:
        checker.poll(1.0)
    found = [checker.verdict(key_of(guide)) for guide in guides]
    assert [verdict.problem for verdict in found if verdict is not None] == [None, "Invalid type: text"]
    checker.close()
