"""`djl-trtllm config`: status, text and JSON."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from djl_trtllm.cli import app
from tests.engines.helpers import write_checkpoint

runner = CliRunner()
DJL = Path(__file__).parents[2] / "serving" / "djl" / "async" / "serving.properties"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DJL_SERVING_HOME", "HF_MODEL_ID", "OPTION_MODEL_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_status_says_whether_the_model_can_be_served(
    tmp_path: Path, tiny_stories: Path, arguments: list[str]
) -> None:
    assert runner.invoke(app, ["config", str(tiny_stories), *arguments]).exit_code == 0
    assert runner.invoke(app, ["config", *arguments]).exit_code == 0
    (tmp_path / "serving.properties").write_text("option.max_input_len=77\n")
    result = runner.invoke(app, ["config", str(tmp_path), *arguments])
    assert result.exit_code == 1
    assert "option.max_input_len" in result.stdout and "cannot be served: " in result.stdout
    assert runner.invoke(app, ["config", str(tmp_path / "nowhere"), *arguments]).exit_code == 1
    assert runner.invoke(app, ["config", "acme/nowhere", *arguments]).exit_code == 1


def test_another_machine_can_be_planned_for(tiny_stories: Path) -> None:
    result = runner.invoke(app, ["config", str(tiny_stories), "--backend", "tensorrt", "--gpu", "h100:2", "--json"])
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["backend"], told["served"]) == ("tensorrt", True)
    assert told["options"]["backend"]["origin"]["text"] == "command line"
    assert any(line.startswith("TensorRT-LLM runs LLM(") for line in told["summary"])
    assert told["summary"][-1] == "planned for 2 x NVIDIA H100 with TensorRT-LLM 1.2.1, not for this machine"


def test_an_effect_is_reported_once(tiny_stories: Path, tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text(
        f"engine=DeepSpeed\noption.model_id={tiny_stories}\noption.tokens_per_block=64\noption.max_batch_size=64\n"
        "option.max_rolling_batch_size=16\n"
    )
    result = runner.invoke(app, ["config", str(tmp_path)])
    assert "  effect  always 32: OpenVINO's block size" in result.stdout
    note, warning = result.stderr.splitlines()
    assert note.startswith("note: option.max_num_sequences = 64 sequences")
    assert warning.startswith("warning: engine=DeepSpeed ")


@pytest.mark.parametrize(("flag", "value"), [("--backend", "tensort"), ("--gpu", "g100")])
def test_a_flag_with_a_wrong_value_is_an_error(tiny_stories: Path, flag: str, value: str) -> None:
    result = runner.invoke(app, ["config", str(tiny_stories), flag, value])
    assert result.exit_code == 1
    assert value in result.stderr and "expected" in result.stderr


def test_for_djl_serving_its_own_options_have_their_effect(tiny_stories: Path, tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text(DJL.read_text() + f"option.model_id={tiny_stories}\n")
    result = runner.invoke(app, ["config", str(tmp_path)])
    assert result.exit_code == 0, result.stdout
    assert "no effect" not in result.stdout
    assert (
        "option.async_mode = true\n  from    serving.properties:6\n  effect  DJL Serving's async mode" in result.stdout
    )
    (tmp_path / "serving.properties").write_text(f"option.async_mode=true\noption.model_id={tiny_stories}\n")
    assert (
        "no effect: under DJL Serving it selects the async handler"
        in runner.invoke(app, ["config", str(tmp_path)]).stdout
    )


def test_a_pipe_gets_a_line_per_value(tiny_stories: Path) -> None:
    lines = runner.invoke(app, ["config", str(tiny_stories), "--all"], env={"COLUMNS": "40"}).stdout.splitlines()
    assert not set("".join(lines)) & set("│┃━─┏")
    assert all(
        line.startswith(("option.", "  from    ", "  effect  ")) or " = " in line for line in lines[1:-3] if line
    )
    assert max(map(len, lines)) > 100


def test_a_terminal_of_80_columns_gets_no_longer_line(tmp_path: Path, tiny_stories: Path) -> None:
    (tmp_path / "serving.properties").write_text(
        f"option.model_id={tiny_stories}\noption.max_inptu_len=4\noption.kv_cache_free_gpu_mem_fraction=0.5\n"
        "option.trtllm_checkpoint_path=/tmp/a\n"
    )
    status, output = in_a_terminal(["config", ".", "--all"], tmp_path, 80)
    assert status == 0
    lines = output.splitlines()
    assert any("did you mean option.max_input_len" in " ".join(pair) for pair in pairwise(lines))
    assert not set(output) & set("│┃━─┏")
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 2] == []
    assert in_a_terminal(["config", "nowhere"], tmp_path, 80)[0] == 1


def in_a_terminal(arguments: list[str], folder: Path, columns: int) -> tuple[int, str]:
    """Exit status and output of the command under a terminal of this width, without styles."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "djl_trtllm.cli", *arguments]
    process = subprocess.Popen(
        command, stdin=there, stdout=there, stderr=there, cwd=folder, env={**environ, "TERM": "dumb", "NO_COLOR": "1"}
    )
    os.close(there)
    output = b""
    while True:
        try:
            part = os.read(here, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        output += part
    os.close(here)
    return process.wait(60), output.decode().replace("\r\n", "\n")


def test_where_max_num_tokens_comes_from_is_shown(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "model"))
    result = runner.invoke(app, ["config", model, "--gpu", "h100", "--backend", "tensorrt"])
    assert "option.max_num_tokens = 8192 tokens" in result.stdout
    assert "derived from 32 sequences of 256 tokens; half of the estimate of" in result.stdout
    assert "for NVIDIA H100, tp 1" in result.stdout
