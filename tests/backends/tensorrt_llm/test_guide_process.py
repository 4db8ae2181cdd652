"""The process that tries guides with xgrammar, which is the fake."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from djl_trtllm.executor.guide_process import Judge
from djl_trtllm.request import Guide, GuideKind


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    import sys

    from tests.fakes import xgrammar

    monkeypatch.setitem(sys.modules, "xgrammar", xgrammar)
    monkeypatch.delitem(sys.modules, "djl_trtllm.backends.tensorrt_llm.guide_process", raising=False)
    from djl_trtllm.backends.tensorrt_llm import guide_process

    yield guide_process
    sys.modules.pop("djl_trtllm.backends.tensorrt_llm.guide_process", None)


GUIDES = [
    (GuideKind.JSON_OBJECT, "", None),
    (GuideKind.JSON_SCHEMA, '{"type": "string"}', None),
    (GuideKind.REGEX, "(yes|no)", None),
    (GuideKind.GRAMMAR, 'root ::= "a" root | "b"', None),
    (GuideKind.JSON_SCHEMA, '{"type": "text"}', 'Unsupported type "text"'),
    (GuideKind.JSON_SCHEMA, "5", "Schema should be an object, but got 5"),
    (GuideKind.REGEX, "(", "Regex parsing error at position"),
    (GuideKind.GRAMMAR, "x ::= y", 'EBNF parser error at line 1, column 1: The root rule with name "root" is not '),
]


def check(judge: Judge) -> None:
    for kind, value, problem in GUIDES:
        found = judge(Guide(kind, value)).problem
        assert (found is None) is (problem is None)
        assert problem is None or (found or "").startswith(problem)


def test_each_kind_of_guide_is_judged_for_the_models_tokenizer(module: ModuleType, tiny_stories: Path) -> None:
    check(module._make_judge(tiny_stories))


def test_without_a_tokenizer_that_can_be_read_guides_are_parsed(
    module: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(module._make_judge(tmp_path))
    assert capsys.readouterr().out == ""
    (tmp_path / "tokenizer.json").write_text("{}")
    check(module._make_judge(tmp_path))
    assert "tokenizer.json cannot be read for guides" in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "problem"), [(5.0, None), (5.1, "it is too large: compiling it would stop all")])
def test_a_guide_that_would_stop_other_requests_is_refused(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, seconds: float, problem: str | None
) -> None:
    times = iter([0.0, seconds])
    monkeypatch.setattr(time, "process_time", lambda: next(times))
    found = module.XgrammarJudge(None)(Guide(GuideKind.REGEX, "a")).problem
    assert (found is None) if problem is None else found.startswith(problem)


@pytest.mark.parametrize("vocabulary", [{"a": 0, "c": 2}, [["a", -1.0], ["b", -2.0], ["c", -3.0]]])
def test_the_vocabulary_is_in_the_order_of_ids(module: ModuleType, vocabulary: object) -> None:
    added = [{"id": 4, "content": "<end>"}]
    tokens = module._vocabulary({"model": {"vocab": vocabulary}, "added_tokens": added})
    assert tokens == ["a", "" if isinstance(vocabulary, dict) else "b", "c", "", "<end>"]
    assert module._vocabulary(json.loads('{"model": {"vocab": {"a": 0}}}')) == ["a"]
