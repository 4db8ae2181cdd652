"""From a checkpoint to an endpoint with TensorRT-LLM, through the ordinary command line; TensorRT-LLM is the fake."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.engines.cache import Manifest
from tests.engines.helpers import CONTEXT, write_checkpoint
from tests.fakes.installation import fake_tensorrt_llm, worker_processes
from tests.support.processes import wait_until
from tests.support.server import run_cli, serving
from tests.support.tables import table

pytestmark = pytest.mark.slow

RUNNING: dict[str, Any] = table(__file__, "RUNNING")
BUILDING = {
    "build_config": {
        "class": "BuildConfig",
        "max_batch_size": 32,
        "max_input_len": CONTEXT,
        "max_num_tokens": 8192,
        "max_seq_len": CONTEXT,
        "plugin_config": {"class": "PluginConfig", "tokens_per_block": 64},
    },
    "enable_build_cache": False,
    # Of the engine that is loaded when it has been compiled.
    "kv_cache_config": {"class": "KvCacheConfig", "enable_block_reuse": False},
}


class Machine:
    """A machine with GPUs and a TensorRT-LLM, and what TensorRT-LLM was asked on it."""

    def __init__(self, directory: Path, version: str = "1.2.1", gpus: int = 1, **script: Any) -> None:
        directory.mkdir(exist_ok=True)
        self.log = directory / "calls.jsonl"
        self.environ = {
            **fake_tensorrt_llm(directory, version=version, gpus=gpus, script=script, log=self.log),
            "OPTION_ENGINE_CACHE_DIR": str(directory / "cache"),
        }

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `djl-trtllm` to its end."""
        return run_cli(*arguments, environ={**os.environ, **self.environ, **variables})

    def calls(self, *, without: tuple[str, ...] = ("model", "tokenizer", "workspace")) -> list[dict[str, Any]]:
        """The arguments of every LLM that was made, in order; those of directories are left out."""
        lines = map(json.loads, self.log.read_text().splitlines() if self.log.exists() else [])
        made = [line["arguments"] for line in lines if line["call"].startswith("LLM")]
        return [{name: value for name, value in call.items() if name not in without} for call in made]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


def served_text(model: Path, machine: Machine, log: list[str], **variables: str) -> str:
    """What the server at `model` answers; its log lines go to `log`."""
    with serving(model, **machine.environ, **variables) as server:
        answer = server.generate(4)
        log += server.log
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["generated_text"]
    return text


def phases(lines: list[str]) -> list[str]:
    told = [line.split("compiling: ")[1].split()[0] for line in lines if "compiling: " in line]
    return [phase for phase in told if phase != "still"]


def left_behind(directory: Path) -> list[str]:
    """Files of an unfinished compile."""
    return [path.name for path in directory.iterdir() if "partial" in path.name or path.name.startswith("djl-trtllm")]


def test_a_checkpoint_is_compiled_at_the_first_start_and_found_at_the_second(checkpoint: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    first: list[str] = []
    second: list[str] = []
    text = served_text(checkpoint, machine, first)
    assert text
    assert phases(first) == ["convert", "build", "save"]
    assert served_text(checkpoint, machine, second) == text
    assert phases(second) == []
    (told,) = [line for line in second if "using the cached engine" in line]
    (engine,) = (path for path in (tmp_path / "machine" / "cache").glob("tensorrt-*") if path.is_dir())
    assert told.endswith(str(engine))
    assert machine.calls() == [BUILDING, RUNNING, RUNNING]
    assert left_behind(engine.parent) == []


def test_an_engine_compiled_ahead_of_time_is_served_without_compiling(checkpoint: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", gpus=2)
    out = tmp_path / "out"
    options = {"OPTION_TENSOR_PARALLEL_DEGREE": "max", "OPTION_QUANTIZE": "awq", "OPTION_MAX_ROLLING_BATCH_SIZE": "8"}
    compiled = machine.run("compile", str(checkpoint), str(out), OPTION_WORKSPACE=str(tmp_path), **options)
    assert compiled.returncode == 0, compiled.stderr
    assert phases(compiled.stderr.splitlines()) == ["convert", "quantize", "build", "save"]
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "manifest.json",
        "rank0.engine",
        "rank1.engine",
        "serving.properties",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (out / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert left_behind(tmp_path) == []
    manifest = Manifest.read(out)
    assert manifest is not None and manifest.verify(out) == []
    assert manifest.platform == "sm_90" and manifest.options["quant_config.quant_algo"] == "W4A16_AWQ"
    (built,) = machine.calls()
    assert built["tensor_parallel_size"] == 2
    again = machine.run("compile", str(checkpoint), str(out), **options)
    assert f"{out} is up to date" in again.stderr.replace("\n", "")
    shutil.rmtree(checkpoint)
    log: list[str] = []
    assert served_text(out, machine, log)
    _, run = machine.calls()
    assert run == RUNNING | {"max_batch_size": 8, "max_num_tokens": 8 * CONTEXT, "tensor_parallel_size": 2}


def test_without_the_engine_backend_the_checkpoint_is_served_by_pytorch(checkpoint: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", version="1.3.0")
    log: list[str] = []
    assert served_text(checkpoint, machine, log)
    assert any("backend pytorch: TensorRT-LLM 1.3.0 is installed, which has no engine backend" in line for line in log)
    (run,) = machine.calls()
    assert run["enable_iter_perf_stats"] is True and run["max_seq_len"] == CONTEXT and "build_config" not in run
    compiled = machine.run("compile", str(checkpoint), str(tmp_path / "out"))
    assert compiled.returncode == 1
    assert "as it is: there is nothing to compile, serve it" in compiled.stderr


FAILURES = [
    ({"build_error": "oom"}, "convert", "out of GPU memory: torch.OutOfMemoryError: CUDA out", "lower option.max_num"),
    ({"build_error": "option"}, "build", "bad option: ValueError: max_seq_len (0)", "an option became an argument"),
    ({"build_error": "die"}, "convert", "", "give the machine or the container more memory"),
]


@pytest.mark.parametrize(
    ("script", "phase", "cause", "advice"), FAILURES, ids=[str(case[0]["build_error"]) for case in FAILURES]
)
def test_a_failure_says_what_it_was_and_what_to_do_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, script: Mapping[str, Any], phase: str, cause: str, advice: str
) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    machine = Machine(tmp_path / "machine", **script)
    failed = machine.run("compile", str(checkpoint), str(tmp_path / "out"), OPTION_WORKSPACE=str(workspace))
    assert failed.returncode == 1
    error = failed.stderr[failed.stderr.index("error: ") :].splitlines()
    assert error[0].startswith("error: the compiler ended with ") and f" in phase {phase}" in error[0]
    assert cause in error[0]
    assert advice in error[1]
    assert error[-1] == f"whole log: {tmp_path / 'out.log'}"
    assert left_behind(tmp_path) == []
    assert list(workspace.iterdir()) == []
    assert not (tmp_path / "out").exists()


def test_an_engine_process_that_replaces_another_finds_the_kernels_that_it_compiled(
    checkpoint: Path, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "machine", compiles=4, steps_per_second=50)
    with serving(checkpoint, **machine.environ, OPTION_BACKEND="pytorch") as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(server.generate, 150, do_sample=True, temperature=0.8)
        wait_until(lambda: server.metric("running") == 1, what="a running request")
        (rank,) = worker_processes(server.process.pid)
        rank.kill()
        assert answer.result().status_code == 200
        told = [line.partition(" took ")[2] for line in server.log if "warming up: a sampled request" in line]
    first, second = (float(rest.split()[0]) for rest in told if rest)
    assert second < first
    assert (tmp_path / "machine" / "cache" / "kernels").is_dir()
