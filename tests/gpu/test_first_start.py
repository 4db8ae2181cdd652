"""What a GPU, FlashInfer's compiler and CUDA's own errors do to this server; TensorRT-LLM around them is the fake.

`pytest -s` prints what was measured, in lines that begin with `measured`.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.request import FinishReason
from tests.backends.tensorrt_llm.kit import PROMPT, Machine, in_processes
from tests.executor.kit import Probe
from tests.fakes.installation import fake_tensorrt_llm, worker_processes
from tests.gpu.kit import NOISE, figure, memory
from tests.support.server import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("nvidia-smi") is None or find_spec("flashinfer") is None, reason="needs a GPU and FlashInfer"
    ),
]

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
GIB = 1 << 30
SOON = 10.0
"""Seconds in which the memory of an engine process that has ended is free."""


async def memory_is_back(before: int, what: str) -> None:
    began = time.monotonic()
    while memory("used")[0] > before + NOISE:
        assert time.monotonic() - began < SOON, f"{memory('used')[0]} MiB are used after {what}, {before} were before"
        await asyncio.sleep(0.1)
    figure(f"memory is back after {what}", time.monotonic() - began)


@pytest.fixture
def machine(tmp_path: Path, tiny_stories: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, tiny_stories, monkeypatch)


@contextmanager
def served(directory: Path, tiny_stories: Path, **script: Any) -> Iterator[Server]:
    """A server of the bundled model, on the PyTorch backend of the fake, that is ready."""
    model = directory / "model"
    if not model.exists():
        model.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (model / name).symlink_to(tiny_stories / name)
        (model / "serving.properties").write_text("option.backend=pytorch\noption.max_output_len=2048\n")
    environ = fake_tensorrt_llm(directory, script=script)
    began = time.monotonic()
    with Server(model, environ, directory) as server:
        server.wait_for_ping(timeout=600)
        figure("start", time.monotonic() - began)
        yield server
        server.terminate()
        assert server.wait() == 0


# -- first use ---------------------------------------------------------------------------------------------------------


def test_no_request_waits_for_a_kernel(tmp_path: Path, tiny_stories: Path) -> None:
    warm_ups = []
    for start in ("first", "second"):
        with served(tmp_path, tiny_stories, compiles="flashinfer", gpu_bytes=GIB) as server:
            began = time.monotonic()
            answer = server.post("a wolf", max_new_tokens=4, **SAMPLED)
            took = time.monotonic() - began
            assert answer.status_code == 200, answer.text
            (line,) = [line for line in server.log if "warming up: a sampled request" in line and " took " in line]
            warm_ups.append(float(line.partition(" took ")[2].split()[0]))
            figure(f"{start} start: warming up with a sampled request", warm_ups[-1])
            figure(f"{start} start: first request after it is ready", took)
            assert took < 1
            assert not server.says("starting a new engine process")
    kernels = [path for path in (tmp_path / "cache" / "djl-trtllm" / "kernels").rglob("*") if path.is_file()]
    figure("kernels that are kept", sum(path.stat().st_size for path in kernels) / 1e6, "MB")
    assert [path for path in kernels if path.suffix == ".so" and "flashinfer" in path.parts]
    assert warm_ups[1] < warm_ups[0] / 2


@in_processes
async def test_without_a_warm_up_and_patience_the_first_request_ends_the_engine(machine: Machine) -> Probe:
    """What this server did before: the compiler is killed with its engine process, and begins anew in the next."""
    probe = await machine.start(script={"compiles": "flashinfer"}, hang_timeout=20.0, compile_timeout=20.0)
    probe.submit(1, 3, PROMPT, **SAMPLED)
    assert "silent for 20 seconds" in await probe.death(timeout=120)
    return probe


@in_processes
async def test_without_a_warm_up_the_first_request_waits_for_its_kernel(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> Probe:
    caplog.set_level("INFO")
    probe = await machine.start(script={"compiles": "flashinfer"}, hang_timeout=20.0)
    for number in (1, 2):
        began = time.monotonic()
        probe.submit(number, 3, PROMPT, **SAMPLED)
        assert await probe.end_of(number, timeout=300) == [FinishReason.LENGTH]
        figure(f"request {number} without a warm-up", time.monotonic() - began)
    assert len([line for line in caplog.messages if "(option.model_loading_timeout)" in line]) == 1
    return probe


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("gpu_oom", "out of memory"),
        ("gpu_assert", "device-side assert"),
        ("die", "a worker process of TensorRT-LLM is gone"),
    ],
)
@in_processes
async def test_an_engine_that_is_lost_gives_its_memory_back(machine: Machine, action: str, message: str) -> Probe:
    """Two ranks, both on the first GPU where there is one."""
    before = memory("used")[0]
    fault = {"action": action, "at_token": 2, "max_new_tokens": 77}
    script = {"gpu_bytes": 5 * GIB, "steps_per_second": 50, "faults": [fault]}
    probe = await machine.start(script=script, gpus=2, arguments={"tensor_parallel_size": 2})
    held = memory("used")[0] - before
    figure("MiB that two ranks of 5 GiB and the engine process's context hold", held, "MiB")
    assert held > 5 * 1024
    probe.submit(1, 77, PROMPT)
    assert message in await probe.death()
    await memory_is_back(before, action)
    return probe


def test_a_rank_that_is_killed_is_replaced_though_it_had_most_of_the_memory(tmp_path: Path, tiny_stories: Path) -> None:
    size = int(memory("total")[0] * 0.6) << 20
    with served(tmp_path, tiny_stories, gpu_bytes=size, steps_per_second=100) as server:
        figure("MiB that are used", memory("used")[0], "MiB")
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(server.generate, 500)
            time.sleep(2)
            began = time.monotonic()
            worker_processes(server.process.pid)[0].kill()
            assert answer.result().status_code == 200
        server.wait_for_ping()
        figure("killed rank: until the request that it ran has ended elsewhere", time.monotonic() - began)
        assert server.metric("executor_restarts_total") == 1
