"""What the commands work on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.commands.size_report import SizeReport
from djl_trtllm.commands.size_request import SizeRequest, read_request
from djl_trtllm.sizing.machines import Machine
from tests.finder.conftest import trials
from tests.sizing.configs import llama

__all__ = ["model", "trials"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "story").mkdir()
    (tmp_path / "story" / "serving.properties").write_text("option.model_id=acme/story\n")
    return tmp_path / "story"


# -- checkpoints of which only the config.json is there, for djl-trtllm size ------------------------------------------


BIG = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}


def described(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(llama(**changes)))
    return path


def request(path: Path, **settings: object) -> SizeRequest:
    return read_request(str(path), {name: str(value) for name, value in settings.items()}, "0.28")


def report(path: Path, machine: Machine, degree: int = 1, **settings: object) -> SizeReport:
    asked = request(path, **settings)
    return SizeReport(asked, machine, asked.on(machine, degree))
