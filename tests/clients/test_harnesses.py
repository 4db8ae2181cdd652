"""Agent frameworks, each with a tool loop to its end: the model calls a tool, gets its result, and answers.

`harnesses/` has a user's program for each, which `scripts/test-clients` gives an environment with that framework; the
frameworks are as published. The programs force the first call, because the bundled model makes none by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL
from tests.support.server import Server

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "harnesses"
AGENTS = ("openai_agents", "langgraph_agent", "pydantic_ai_agent", "instructor_answer")


def loops(*command: str | Path, folder: Path) -> list[dict[str, Any]]:
    """Run a program to its end: what it prints of each loop."""
    environ = {**os.environ, "HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found: list[dict[str, Any]], *, called: int = 2) -> None:
    """The first `called` loops had one call each, and every loop an answer."""
    assert [len(loop["calls"]) for loop in found] == [1] * called + [0] * (len(found) - called)
    assert all(isinstance(loop["answer"], str) and loop["answer"] for loop in found)


@pytest.mark.parametrize("program", AGENTS)
def test_a_tool_loop_ends_with_an_answer(server: Server, tmp_path: Path, program: str) -> None:
    python = ROOT / ".venv-agents" / "bin" / "python"
    found = loops(python, PROGRAMS / f"{program}.py", server.url, MODEL, folder=tmp_path)
    assert len(found) >= 2
    check(found)


def test_a_tool_loop_of_llama_index_ends_with_an_answer(server: Server, tmp_path: Path) -> None:
    python = ROOT / ".venv-llama-index" / "bin" / "python"
    whole, streamed = loops(python, PROGRAMS / "llama_index_agent.py", server.url, MODEL, folder=tmp_path)
    check([whole, streamed])
    assert whole == streamed


def test_a_tool_loop_of_vercels_ai_ends_with_an_answer(server: Server, tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("needs node and npm")
    shutil.copy(PROGRAMS / "ai_sdk.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(ROOT / ".venv-ai" / "node_modules")
    whole, streamed = loops("node", "ai_sdk.mjs", server.url, MODEL, folder=tmp_path)
    check([whole, streamed])
    assert whole == streamed
