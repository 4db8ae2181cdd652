"""What a start imports, which is most of its time. Counted, not timed: the machine's speed does not matter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Each of them takes from a tenth of a second to many seconds, and is imported where it is used.
HEAVY = {
    "awscrt",
    "boto3",
    "botocore",
    "huggingface_hub",
    "nncf",
    "numpy",
    "openvino",
    "openvino_genai",
    "optimum",
    "pynvml",
    "ray",
    "scipy",
    "sentencepiece",
    "tensorrt_llm",
    "torch",
    "transformers",
}
HELP = "import sys; sys.argv = ['djl-trtllm', '--help']; from djl_trtllm.cli import app; app(standalone_mode=False)"


def imported(program: str, folder: Path) -> set[str]:
    """The modules that a program imports, beside those that Python itself starts with."""
    report = f"import json, sys; before = set(sys.modules)\n{program}\n"
    report += "print(); print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", report], cwd=folder, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("program", "most"),
    [
        ("import djl_trtllm", 20),
        ("import djl_trtllm.executor.process", 200),
        ("import djl_trtllm.deployment", 300),
        (HELP, 350),
        ("import djl_trtllm.offline", 800),
        ("import djl_trtllm.server.app", 900),
    ],
    ids=["package", "engine process", "deployment", "help", "offline", "server"],
)
def test_a_start_imports_little_and_nothing_heavy(program: str, most: int, tmp_path: Path) -> None:
    modules = imported(program, tmp_path)
    assert "djl_trtllm" in modules
    assert sorted({module.partition(".")[0] for module in modules} & HEAVY) == []
    assert len(modules) <= most


def test_help_imports_no_command_and_nothing_that_commands_need(tmp_path: Path) -> None:
    modules = imported(HELP, tmp_path)
    assert [name for name in modules if name.startswith("djl_trtllm.commands.")] == ["djl_trtllm.commands.console"]
    assert not {"djl_trtllm.config", "djl_trtllm.logs", "asyncio", "msgspec", "pydantic", "yaml"} & modules
