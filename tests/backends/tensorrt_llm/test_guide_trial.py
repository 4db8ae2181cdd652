"""What takes too long is refused; a tokenizer that cannot be read is not needed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from djl_trtllm.backends.tensorrt_llm.guide_trial import Trial, make_judge, too_large
from djl_trtllm.request import Guide, GuideKind

GUIDE = Guide(GuideKind.REGEX, "a")


@pytest.mark.parametrize(
    ("seconds", "problem"),
    [(5.0, None), (5.6, "it is too large: compiling it would stop all other requests for 6 seconds")],
)
def test_a_guide_that_would_stop_other_requests_is_refused(
    monkeypatch: pytest.MonkeyPatch, seconds: float, problem: str | None
) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 1.0 + seconds)
    assert too_large(1.0) == problem


def needs(text: str | None) -> Trial:
    """A trial whose problem is the tokenizer it was made for."""
    if text == "broken":
        raise ValueError("no tokenizer")
    return lambda _: repr(text)


def test_a_trial_is_made_for_the_models_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_judge(needs, tmp_path)(GUIDE).problem == "None"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert make_judge(needs, tmp_path)(GUIDE).problem == "'{}'"
    assert capsys.readouterr().out == ""


def test_without_a_tokenizer_that_can_be_read_guides_are_parsed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text("broken")
    assert make_judge(needs, tmp_path)(GUIDE).problem == "None"
    assert "tokenizer.json cannot be read for guides" in capsys.readouterr().out
