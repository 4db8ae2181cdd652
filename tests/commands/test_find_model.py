from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.commands import find_model as module
from djl_trtllm.commands.find_model import find_model


def test_a_model_is_found_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_MODEL_ID", "OPTION_MODEL_ID"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "model"
    monkeypatch.setattr(module, "SAGEMAKER_MODEL_DIR", folder)
    assert find_model(None) is None
    monkeypatch.setenv("OPTION_MODEL_ID", "owner/b")
    assert find_model(None) == "owner/b"
    monkeypatch.setenv("HF_MODEL_ID", "owner/a")
    assert find_model(None) == "owner/a"
    folder.mkdir()
    assert find_model(None) == "owner/a"
    (folder / "config.json").write_text("{}")
    assert find_model(None) == str(folder)
    assert find_model("named") == "named"
