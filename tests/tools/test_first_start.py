"""`tools.tensorrt_llm.first_start` on the fake TensorRT-LLM: what it measures and checks, and a start that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.installation import fake_tensorrt_llm
from tools.tensorrt_llm.first_start import BUNDLED, first_start


def found(monkeypatch: pytest.MonkeyPatch, folder: Path, **script: Any) -> dict[str, Any]:
    """What is written of first starts."""
    for name, value in fake_tensorrt_llm(folder / "fake", version="1.2.1", script=script).items():
        monkeypatch.setenv(name, value)
    out = folder / "first-start.json"
    passed = first_start(BUNDLED, "pytorch", out)
    content: dict[str, Any] = json.loads(out.read_text())
    assert content["passed"] is passed
    return content


@pytest.mark.slow
def test_two_starts_have_their_stages_and_every_kind_of_request_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = found(monkeypatch, tmp_path)
    assert content["passed"], content["checks"]
    stages = [(stage["start"], stage["stage"]) for stage in content["stages"]]
    for start in ("first", "second"):
        assert (start, "ready") in stages
        assert any(each == start and name.startswith("warming up: ") for each, name in stages)
        kinds = {check["check"] for check in content["checks"] if check["start"] == start}
        assert kinds >= {"a greedy request", "a sampled request", "a log-probabilities request", "a guided request"}
    assert content["versions"].keys() >= {"python", "transformers"}
    assert "log" not in content


@pytest.mark.slow
def test_a_start_that_fails_has_its_reason_and_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SERVING_RETRY_THRESHOLD", "0")
    content = found(monkeypatch, tmp_path, load_error="no such kernel")
    assert not content["passed"]
    (failed,) = (check for check in content["checks"] if not check["passed"])
    assert (failed["start"], failed["check"]) == ("first", "it becomes ready")
    assert any("no such kernel" in line for line in content["log"])
