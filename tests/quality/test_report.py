"""A comparison from the prompts to its report: the verdict, its picture, and what ends it before minutes are spent."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest

from djl_trtllm.bench.apis import Prompt, read_prompts
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.quality import report
from djl_trtllm.quality.figures import Continuation, Position, Thresholds
from djl_trtllm.quality.report import Report, picture_of, run
from djl_trtllm.quality.sides import Asked
from djl_trtllm.version import __version__

FAILED = Continuation(error="too long")


class Says:
    """A side whose answers are the words of texts, each with a probability of a half."""

    def __init__(self, name: str, *texts: str | Continuation) -> None:
        self.name = name
        self.notes = [f"{name} is a test"]
        self.asked: Asked | None = None
        self._texts = texts

    def answer(self, asked: Asked) -> list[Continuation]:
        self.asked = asked
        half = math.log(0.5)
        return [
            text
            if isinstance(text, Continuation)
            else Continuation([Position(word, {word: half}) for word in text.split()], [Position("p", {"p": half})])
            for text in self._texts
        ]


def prompts(path: Path, *lines: dict[str, object]) -> Path:
    file = path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def compared(path: Path, a: Says, b: Says, count: int = 2) -> tuple[Report, list[str]]:
    said: list[str] = []
    lines: list[dict[str, object]] = [{"prompt": f"prompt {number}"} for number in range(count)]
    file = prompts(path, *lines)
    return run(a, b, file, 8, Thresholds(), said.append), said


def test_both_sides_are_asked_the_same(tmp_path: Path) -> None:
    a, b = Says("A", "x y", "z"), Says("B", "x y", "z")
    _, said = compared(tmp_path, a, b)
    assert a.asked == b.asked == Asked([Prompt(8, "prompt 0"), Prompt(8, "prompt 1")], 8)
    assert said[0] == "A: 2 prompts, up to 8 tokens each"
    assert "note: B: B is a test" in said


def test_sides_that_agree_have_no_difference_to_show(tmp_path: Path) -> None:
    found, _ = compared(tmp_path, Says("A", "x y", "z"), Says("B", "x y", "z"))
    assert not found.differs
    assert list(found.conclusion()) == ["agrees"]
    rows = dict(found.table())
    assert (rows["first difference"], rows["prompts with equal answers"]) == ("none", "2 of 2")
    assert rows["perplexity of the prompts"] == "2 and 2"


def test_the_earliest_differences_are_shown_with_the_verdict(tmp_path: Path) -> None:
    a = Says("A", "x y", "z", "a b c", "same", "a b c d")
    b = Says("B", f"x {'w' * 61}", "", "a b x", "same", "a b c x")
    found, _ = compared(tmp_path, a, b, 5)
    assert found.differs
    *lines, verdict = found.conclusion()
    assert lines == [
        "prompt 2, token 1: 'z' and the end, or a part of a character",
        f"prompt 1, token 2: 'y' and '{'w' * 60}'",
        "prompt 3, token 3: 'c' and 'x'",
    ]
    assert verdict.startswith("differs: agreement 0.6364: expected at least 0.98")
    assert dict(found.table())["first difference"] == "token 2.5 (median), 1 (least)"


def test_the_json_has_the_figures_and_each_difference(tmp_path: Path) -> None:
    a = [Position("x", {"x": -0.5}), Position("y", {"y": -0.5, "w": -1.5})]
    found, _ = compared(tmp_path, Says("A", Continuation(a), "z", FAILED), Says("B", "x w", "z", FAILED), 3)
    shown = json.loads(json.dumps(found.as_json()))
    bounds = shown.pop("kl_lower_bound_nats")
    assert (bounds["positions"], bounds["max"] > bounds["mean"] > 0) == (4, True)
    assert [reason.split()[0] for reason in shown.pop("reasons")] == ["agreement", "KL"]
    assert shown == {
        "version": __version__,
        "a": {"name": "A", "notes": ["A is a test"]},
        "b": {"name": "B", "notes": ["B is a test"]},
        "output_tokens": 8,
        "verdict": "differs",
        "thresholds": {"agreement": 0.98, "divergence": 0.01, "perplexity": 1.02},
        "prompts": {"compared": 2, "equal": 1, "failed_on_one_side": 0, "failed_on_both_sides": 1},
        "agreement": {"share": pytest.approx(2 / 3), "compared_tokens": 3},
        "before_first_difference": {"share": pytest.approx(2 / 3), "tokens": 3},
        "first_difference": {"least": 2, "median": 2},
        "gap_nats": {"median": 1.0, "max": 1.0, "known": 1},
        "perplexity": {"a": pytest.approx(2), "b": pytest.approx(2)},
        "differing": [{"prompt": 1, "token": 2, "a": "y", "b": "w"}],
        "warnings": [f"{side}: 1 prompts failed, the first one: too long" for side in "AB"],
    }
    same, _ = compared(tmp_path, Says("A", "", ""), Says("B", "", ""))
    shown = same.as_json()
    assert [shown[name] for name in ("verdict", "first_difference", "gap_nats")] == ["agrees", None, None]


def test_prompts_that_fail_are_warnings(tmp_path: Path) -> None:
    found, _ = compared(tmp_path, Says("A", "x", FAILED), Says("B", "x", FAILED))
    assert (found.differs, found.warnings[0]) == (False, "A: 1 prompts failed, the first one: too long")
    found, _ = compared(tmp_path, Says("A", "x", FAILED), Says("B", "x", "y"))
    assert found.differs


def test_sides_that_answer_no_prompt_together_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="A answers no prompt: too long"):
        compared(tmp_path, Says("A", FAILED, FAILED), Says("B", "x", "y"))
    with pytest.raises(BenchmarkError, match="no prompt was answered by both sides"):
        compared(tmp_path, Says("A", FAILED, "x"), Says("B", "x", FAILED))


def test_prompts_of_lengths_alone_are_refused_before_anything_runs(tmp_path: Path) -> None:
    a = Says("A")
    with pytest.raises(BenchmarkError, match="SERVING_RECORD_PROMPTS=ids or text"):
        run(a, a, prompts(tmp_path, {"prompt_tokens": 9}), 8, Thresholds(), print)
    assert a.asked is None


def test_the_number_of_prompts_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_PROMPTS", 1)
    with pytest.raises(BenchmarkError, match="2 prompts; expected at most 1"):
        compared(tmp_path, Says("A"), Says("B"))


def test_there_are_prompts_without_a_file() -> None:
    found = read_prompts(report.DEFAULT_PROMPTS, 1, "--prompts")
    assert len({prompt.text for prompt in found}) == len(found) == 32


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="charts need matplotlib")
def test_the_picture_has_the_agreement_and_the_divergence(tmp_path: Path) -> None:
    found, _ = compared(tmp_path, Says("A", "x y", "z"), Says("B", "x w", "z"))
    drawn = picture_of(found)
    assert drawn.startswith("<svg") and drawn == picture_of(found)
    assert "Prompts whose answers agree" in drawn and "KL divergence" in drawn
    unknown = Continuation([Position("x", {})])
    assert "KL divergence" not in picture_of(compared(tmp_path, Says("A", unknown), Says("B", unknown), 1)[0])
