"""`djl-trtllm config`: status, text and JSON."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import tarfile
import termios
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from djl_trtllm.cli import app
from djl_trtllm.commands import console
from tests.engines.helpers import write_checkpoint

runner = CliRunner()
OLD = Path(__file__).parents[1] / "config" / "old"
TRITON = OLD / "triton_llama_workflow" / "model"
TRUSS = OLD / "truss_trt_llm_build" / "model"
DJL = Path(__file__).parents[2] / "serving" / "djl" / "async" / "serving.properties"


def model(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "serving.properties").write_text(text)
    return path


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(console, "SAGEMAKER_MODEL_DIR", tmp_path / "opt-ml-model")
    for name in ("DJL_SERVING_HOME", "HF_MODEL_ID", "OPTION_MODEL_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def options_of(*words: str, **environ: str) -> Any:
    result = runner.invoke(app, ["config", "--json", *words], env=environ)
    assert not result.stderr, result.output
    return json.loads(result.stdout)["options"]


def test_without_a_model_the_environment_is_shown() -> None:
    options = options_of(OPTION_MAX_NUM_TOKENS="4096")
    names = ("max_num_tokens", "max_input_len", "max_output_len", "max_rolling_batch_size")
    assert [options[name]["value"] for name in names] == [4096, 4096, 4096, 256]
    assert all("OPTION_MAX_NUM_TOKENS" in options[name]["origin"]["text"] for name in names)


def test_a_model_is_a_directory_an_archive_or_named_by_a_variable_alone(tmp_path: Path, tiny_stories: Path) -> None:
    directory = model(tmp_path / "model", "option.max_input_len=77\n")
    shutil.copy(tiny_stories / "tokenizer.json", directory)
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
        archive.add(directory, "model")
    packed = options_of(str(tmp_path / "model.tar.gz"), OPTION_ENGINE_CACHE_DIR=str(tmp_path / "cache"))
    named = options_of(HF_MODEL_ID=str(directory))
    assert packed["max_input_len"]["value"] == named["max_input_len"]["value"] == 77
    for variable in ("HF_MODEL_ID", "OPTION_MODEL_ID"):
        result = runner.invoke(app, ["config", "--json"], env={variable: str(tiny_stories)})
        assert "backend openvino" in "".join(json.loads(result.stdout)["summary"])


def test_what_is_set_is_shown_and_on_request_all(tmp_path: Path) -> None:
    path = str(model(tmp_path / "model", "option.max_input_len=77\n"))
    few, every = (runner.invoke(app, ["config", path, *more]).stdout for more in ([], ["--all"]))
    assert "option.max_input_len" in few and "option.max_output_len" not in few
    assert "option.max_output_len" in every
    assert "--all shows them" in few and "--all" not in every
    flags = ("--offline", "--option", "max_input_len=78", "-o", "option.dtype=fp16")
    assert options_of(path, *flags)["max_input_len"]["value"] == 78


@pytest.mark.parametrize("source", [TRITON, TRITON / "tensorrt_llm" / "config.pbtxt", TRUSS, TRUSS / "config.yaml"])
def test_configurations_of_triton_and_truss_are_shown(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJL_CACHE_DIR", "/nonexistent")
    result = runner.invoke(app, ["config", str(source), "--json"])
    told = json.loads(result.stdout)
    assert (result.exit_code, told["served"]) == (1, False)  # the models that they name are not here
    assert told["options"]["max_rolling_batch_size"]["value"] == 256


def test_differences_are_a_list_or_json(tmp_path: Path) -> None:
    one = str(model(tmp_path / "a", "option.max_input_len=8\n"))
    other = str(model(tmp_path / "b", "option.max_input_len=9\n"))
    shown = runner.invoke(app, ["config", "--diff", one, other])
    assert shown.exit_code == 0, shown.output
    assert all(text in shown.output for text in ("option.max_input_len", "8 tokens", "9 tokens"))
    data = json.loads(runner.invoke(app, ["config", "--json", "--diff", one, other]).output)
    assert data["sources"] == [one, other]
    assert [side["value"] for side in data["differences"]["max_input_len"]["sides"]] == [8, 9]
    broken = str(model(tmp_path / "c", "option.max_input_len=x\n"))
    refused = runner.invoke(app, ["config", "--diff", one, broken])
    assert (refused.exit_code, "Traceback" in refused.output) == (1, False)


def test_a_comparison_refuses_what_has_no_effect_on_it(tmp_path: Path) -> None:
    one = str(model(tmp_path / "a", "option.max_input_len=8\n"))
    for words in ([one], ["--all"], ["--backend", "openvino"], ["--gpu", "h100"], ["--offline"], ["--option", "a=b"]):
        result = runner.invoke(app, ["config", "--diff", one, one, *words])
        assert result.exit_code == 1
        assert f"leave out {words[0] if words[0] != one else 'MODEL'}" in result.stderr


@pytest.mark.parametrize("command", ["config", "serve", "compile", "size", "generate", "package"])
def test_a_name_that_no_file_system_takes_is_an_error_in_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}')
    more = {"compile": [str(tmp_path / "out")], "generate": ["--prompts", str(tmp_path / "prompts.jsonl")]}
    result = runner.invoke(app, [command, "a" * 300, *more.get(command, [])])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "a" * 300 in result.stdout + result.stderr


def test_a_configuration_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    result = runner.invoke(app, ["config", "story/serving.properties"])
    assert result.exit_code == 1
    assert "no model at story/serving.properties" in result.stderr and "hub" not in result.stderr


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_status_says_whether_the_model_can_be_served(tmp_path: Path, tiny_stories: Path, words: list[str]) -> None:
    assert runner.invoke(app, ["config", str(tiny_stories), *words]).exit_code == 0
    assert runner.invoke(app, ["config", *words]).exit_code == 0
    result = runner.invoke(app, ["config", str(model(tmp_path / "none", "option.max_input_len=77\n")), *words])
    assert result.exit_code == 1
    for text in ("option.max_input_len", "cannot be served: ", "expected one of"):
        assert text in result.stdout
    assert runner.invoke(app, ["config", str(tmp_path / "nowhere"), *words]).exit_code == 1
    assert runner.invoke(app, ["config", "acme/nowhere", *words]).exit_code == 1


@pytest.mark.parametrize("name", ["acme/nowhere", "s3://nowhere/model/", "s3://nowhere/model.tar.gz"])
def test_offline_a_configuration_is_in_order_whose_model_is_elsewhere(
    tmp_path: Path, tiny_stories: Path, name: str
) -> None:
    local = str(model(tmp_path / "named", f"option.model_id={name}\noption.max_input_len=77\n"))
    for words in ([name], [local]):
        result = runner.invoke(app, ["config", "--offline", *words])
        assert result.exit_code == 3 and name in result.stdout and "is in order" in result.stdout
        assert json.loads(runner.invoke(app, ["config", "--offline", "--json", *words]).stdout)["served"] is None
    (tmp_path / "named" / "serving.properties").write_text(f"option.model_id={name}\noption.max_input_len=x\n")
    assert runner.invoke(app, ["config", "--offline", local]).exit_code == 1
    assert runner.invoke(app, ["config", "--offline", str(tiny_stories)]).exit_code == 0
    assert runner.invoke(app, ["config", "--offline"]).exit_code == 0


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


def test_an_argument_of_the_engine_is_shown_with_its_line(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    (checkpoint / "extra.yaml").write_text("max_num_tokens: 512\nkv_cache_config:\n  cross_kv_cache_fraction: 0.5\n")
    (checkpoint / "serving.properties").write_text("option.extra_llm_api_options=extra.yaml\n")
    options = options_of(str(checkpoint), "--backend", "pytorch")
    assert options["max_num_tokens"]["value"] == 512
    assert options["max_num_tokens"]["origin"]["text"].endswith("extra.yaml line 1")
    effect = options["extra_llm_api_options"]["effect"]
    assert "KvCacheConfig.cross_kv_cache_fraction=0.5 (" in effect and "extra.yaml line 3)" in effect


def test_where_max_num_tokens_comes_from_is_shown(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "model"))
    result = runner.invoke(app, ["config", model, "--gpu", "h100", "--backend", "tensorrt"])
    assert "option.max_num_tokens = 8192 tokens" in result.stdout
    assert "derived from 32 sequences of 256 tokens; half of the estimate of" in result.stdout
    assert "for NVIDIA H100, tp 1" in result.stdout


@pytest.mark.parametrize("name", ["s3:/bucket/model", "hf:/acme/model"])
def test_offline_an_address_with_one_slash_is_refused_as_it_is_when_it_is_served(tmp_path: Path, name: str) -> None:
    local = str(model(tmp_path / "named", f"option.model_id={name}\n"))
    for words in ([name], [local]):
        result = runner.invoke(app, ["config", "--offline", *words])
        assert result.exit_code == 1 and "cannot be served" in result.stdout and name in result.stdout
