"""The process that tries guides with xgrammar, which is the fake."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from djl_trtllm.executor.guides import Trial
from djl_trtllm.request import Guide, GuideKind


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    import sys

    from tests.fakes import xgrammar

    monkeypatch.setitem(sys.modules, "xgrammar", xgrammar)
    monkeypatch.delitem(sys.modules, "djl_trtllm.backends.xgrammar_process", raising=False)
    from djl_trtllm.backends import xgrammar_process

    yield xgrammar_process
    sys.modules.pop("djl_trtllm.backends.xgrammar_process", None)


GUIDES = [
    (GuideKind.JSON_OBJECT, "", None),
    (GuideKind.JSON_SCHEMA, '{"type": "string"}', None),
    (GuideKind.REGEX, "(yes|no)", None),
    (GuideKind.GRAMMAR, 'root ::= "a" root | "b"', None),
    (GuideKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "any_text"}}', None),
    (GuideKind.STRUCTURAL_TAG, "{}", "Invalid structural tag error: Structural tag must have a format field"),
    (GuideKind.JSON_SCHEMA, '{"type": "text"}', '#/type is "text"'),
    (GuideKind.JSON_SCHEMA, "5", "# is 5"),
    (GuideKind.REGEX, "(", "Regex parsing error at position"),
    (GuideKind.GRAMMAR, "x ::= y", 'EBNF parser error at line 1, column 1: The root rule with name "root" is not '),
]


def check(trial: Trial) -> None:
    for kind, value, problem in GUIDES:
        found = trial(Guide(kind, value)).problem
        assert bool(found) is (problem is not None) and found.startswith(problem or "")
    schema = '{"type": "number", "multipleOf": 5}'
    assert "'multipleOf' at #" in trial(Guide(GuideKind.JSON_SCHEMA, schema)).note
    assert "'multipleOf' at #" in trial(Guide(GuideKind.JSON_SCHEMA, schema, strict=True)).problem


def test_each_kind_of_guide_is_tried_for_the_models_tokenizer(module: ModuleType, tiny_stories: Path) -> None:
    check(module.XgrammarTrial((tiny_stories / "tokenizer.json").read_text()))


def test_without_a_tokenizer_guides_are_parsed(module: ModuleType) -> None:
    check(module.XgrammarTrial(None))


def test_a_guide_that_takes_long_to_compile_is_refused(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((0.0, 6.0))
    monkeypatch.setattr(time, "process_time", lambda: next(seconds))
    assert module.XgrammarTrial(None)(Guide(GuideKind.REGEX, "a")).problem.startswith("it is too large: compiling it")


@pytest.mark.parametrize("vocabulary", [{"a": 0, "c": 2}, [["a", -1.0], ["b", -2.0], ["c", -3.0]]])
def test_the_vocabulary_is_in_the_order_of_ids(module: ModuleType, vocabulary: object) -> None:
    added = [{"id": 4, "content": "<end>"}]
    tokens = module._vocabulary({"model": {"vocab": vocabulary}, "added_tokens": added})
    assert tokens == ["a", "" if isinstance(vocabulary, dict) else "b", "c", "", "<end>"]
    assert module._vocabulary(json.loads('{"model": {"vocab": {"a": 0}}}')) == ["a"]
