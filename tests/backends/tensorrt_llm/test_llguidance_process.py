"""The process that tries guides with llguidance, the package itself."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from djl_trtllm.backends.json_grammar import with_options
from djl_trtllm.executor.guides import GuideGate
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.request import Guide, GuideKind, Sampling

pytest.importorskip("llguidance")
from llguidance import LLMatcher, LLTokenizer  # if it is installed

from djl_trtllm.backends.llguidance_process import LlguidanceTrial
from tests.support.tables import by_rows, table

GUIDES = table(__file__, "guides_for_llguidance")
GOOD = [Guide(GuideKind(kind), value) for kind, value in GUIDES["good"]]
BAD = [(Guide(GuideKind(kind), value), problem) for kind, value, problem in GUIDES["bad"]]
KEYWORDS = json.loads((Path(__file__).parents[1] / "json_grammar.json").read_text())["not_followed"]
LATE = [(Guide(GuideKind(kind), value), problem) for kind, value, problem in GUIDES["late"]]
"""They are compiled; the error comes with a token."""


@pytest.fixture
def tokenizer(tiny_stories: Path) -> str:
    return (tiny_stories / "tokenizer.json").read_text()


def test_each_kind_of_guide_is_tried_for_the_models_tokenizer(tokenizer: str) -> None:
    trial = LlguidanceTrial(tokenizer)
    assert [trial(guide).problem for guide in GOOD] == [""] * len(GOOD)
    assert [trial(guide).problem for guide, _ in BAD] == [problem for _, problem in BAD]


@by_rows(("guide", "problem"), LATE)
def test_a_guide_that_fails_with_a_token_of_its_output_is_refused(tokenizer: str, guide: Guide, problem: str) -> None:
    assert LlguidanceTrial(tokenizer)(guide).problem.startswith(problem)


def test_a_grammar_whose_tokens_take_ever_longer_is_refused(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr(time, "process_time", lambda: next(seconds) * 0.3)
    found = LlguidanceTrial(tokenizer)(Guide(GuideKind.GRAMMAR, 'start: start start | "a" |')).problem
    assert found.startswith("it is too slow: the first 7 tokens of an output take more than 2 s")


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
    assert LlguidanceTrial(tokenizer)(guide).problem.startswith(problem)


@by_rows(("schema", "_", "value"), KEYWORDS)
def test_a_keyword_is_followed_or_noted_or_refused(
    tokenizer: str, schema: object, _: object, value: str | None
) -> None:
    """`value` is one that the schema does not allow."""
    trial, text = LlguidanceTrial(tokenizer), json.dumps(schema)
    loose, strict = (trial(Guide(GuideKind.JSON_SCHEMA, text, strict=strict)) for strict in (False, True))
    assert bool(strict.problem) == bool(loose.problem or loose.note)
    if value is not None and not strict.problem:
        matcher = LLMatcher(
            LLTokenizer(tokenizer),
            LLMatcher.grammar_from_json_schema(with_options(Guide(GuideKind.JSON_SCHEMA, text)).value),
        )
        tokens = LLTokenizer(tokenizer).tokenize_str(value)
        assert matcher.try_consume_tokens(tokens) < len(tokens) or not matcher.is_accepting()


def test_white_space_is_limited(tokenizer: str) -> None:
    tokens = LLTokenizer(tokenizer).tokenize_str
    for guide in (Guide(GuideKind.JSON_OBJECT), Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}')):
        matcher = LLMatcher(LLTokenizer(tokenizer), LLMatcher.grammar_from_json_schema(with_options(guide).value))
        assert matcher.validate_tokens(tokens('{"a": [1, 2]}')) == len(tokens('{"a": [1, 2]}'))
        assert matcher.validate_tokens(tokens("{" + 20 * "\n")) < 20


def test_without_a_tokenizer_guides_are_parsed() -> None:
    trial = LlguidanceTrial(None)
    late = [guide for guide, _ in LATE]
    assert [trial(guide).problem for guide in (*GOOD, *late)] == [""] * (len(GOOD) + len(late))
    assert [trial(guide).problem for guide, _ in BAD] == [problem for _, problem in BAD]


def test_the_program_tries_guides(tiny_stories: Path) -> None:
    usable: list[int] = []
    problems: list[str] = []
    gate = GuideGate(
        "djl_trtllm.backends.llguidance_process",
        str(tiny_stories),
        lambda request: usable.append(request.request_id),
        lambda request, refusal: problems.append(refusal.message.partition(": ")[2]),
    )
    for number, guide in enumerate((GOOD[2], BAD[0][0])):
        gate.hold(Submit(number, [5], Sampling(9), guide=guide))
    while gate:
        gate.advance(1.0)
    gate.close()
    assert (usable, problems) == ([0], ["Invalid type: text"])
