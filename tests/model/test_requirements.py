from __future__ import annotations

import importlib.util
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import ModelError
from djl_trtllm.model import handle_requirements, requirements


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "requirements.txt").write_text("some-package==1.0\n")
    return tmp_path


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The installers' command lines, none of which is run."""
    seen: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def installers(monkeypatch: pytest.MonkeyPatch, *, pip: bool, uv: str | None) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if pip else None)
    monkeypatch.setattr(shutil, "which", lambda _: uv)


def test_nothing_is_installed_unless_allowed_and_the_switch_is_named_once(
    model: Path, commands: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        handle_requirements(model, allowed=False)
    assert commands == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "SERVING_INSTALL_REQUIREMENTS=true" in caplog.text and str(model) in caplog.text


def test_without_the_file_there_is_nothing_to_do(
    tmp_path: Path, commands: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    handle_requirements(tmp_path, allowed=False)
    handle_requirements(tmp_path, allowed=True)
    assert commands == [] and caplog.text == ""


def test_allowed_it_is_installed_into_this_python(
    model: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    installers(monkeypatch, pip=True, uv=None)
    handle_requirements(model, allowed=True)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "install"]
    assert commands[0][-2:] == ["-r", str(model / "requirements.txt")]


def test_uv_is_used_where_pip_is_missing(
    model: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    installers(monkeypatch, pip=False, uv="/bin/uv")
    handle_requirements(model, allowed=True)
    assert commands[0][:5] == ["/bin/uv", "pip", "install", "--python", sys.executable]


def test_without_an_installer_the_error_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installers(monkeypatch, pip=False, uv=None)
    with pytest.raises(ModelError, match="has no pip, and there is no uv"):
        handle_requirements(model, allowed=True)


def test_a_failure_shows_the_installers_last_lines(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('\\n'.join(f'line {n}' for n in range(40))); sys.exit(3)"
    monkeypatch.setattr(requirements, "_installer", lambda _: [sys.executable, "-c", program])
    with pytest.raises(ModelError, match=r"exit status 3") as caught:
        handle_requirements(model, allowed=True)
    assert "line 39" in str(caught.value) and "line 10\n" not in str(caught.value)
