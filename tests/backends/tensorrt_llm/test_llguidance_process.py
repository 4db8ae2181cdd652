"""The process that tries guides with llguidance, the package itself."""

from __future__ import annotations

import json
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
NOTHING_BEGINS = Guide(GuideKind.GRAMMAR, 'start: "" start')
"""It can be compiled; the error comes with the first token."""


@pytest.fixture
def tokenizer(tiny_stories: Path) -> str:
    return (tiny_stories / "tokenizer.json").read_text()


def test_each_kind_of_guide_is_tried_for_the_models_tokenizer(tokenizer: str) -> None:
    trial = LlguidanceTrial(tokenizer)
    assert [trial(guide) for guide in GOOD] == [None] * len(GOOD)
    assert [trial(guide) for guide, _ in BAD] == [problem for _, problem in BAD]


def test_a_guide_that_no_token_begins_is_refused(tokenizer: str) -> None:
    assert LlguidanceTrial(tokenizer)(NOTHING_BEGINS) == "NoExtensionBias (llguidance has Lark's grammars)"


def test_without_a_tokenizer_guides_are_parsed() -> None:
    trial = LlguidanceTrial(None)
    assert [trial(guide) for guide in (*GOOD, NOTHING_BEGINS)] == [None] * (len(GOOD) + 1)
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
