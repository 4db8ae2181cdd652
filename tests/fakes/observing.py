"""Runs scenarios with a fake TensorRT-LLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .installation import fake_tensorrt_llm

_ROOT = Path(__file__).parents[2]
PROMPT = [5, 6, 7, 8, 9]
"""What scenarios ask for by default."""

Call = tuple[str, dict[str, Any]]


def call(scenario: str, **arguments: Any) -> Call:
    """A scenario of `programs/scenarios.py` and what it is asked."""
    return scenario, arguments


def start(directory: Path, *calls: Call, **installation: Any) -> subprocess.Popen[str]:
    """A process that goes through `calls`, with a fake TensorRT-LLM."""
    environ = fake_tensorrt_llm(directory, **installation)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.programs.scenarios", json.dumps(calls, default=str)],
        cwd=_ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Observer:
    """Runs scenarios. Keyword arguments are those of `fake_tensorrt_llm`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.printed = ""

    def __call__(self, *calls: Call, **installation: Any) -> Any:
        """What the scenario saw; a list where there are several. `printed` is what the process printed."""
        process = start(self._directory, *calls, **installation)
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()
        self.printed = output + errors
        assert process.returncode == 0, self.printed
        seen = json.loads(output.rstrip().rsplit("\n", 1)[-1])
        return seen if len(calls) > 1 else seen[0]
