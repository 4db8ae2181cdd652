"""TensorRT-LLM's executor in real host processes; TensorRT-LLM is the fake, its workers are processes too."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.executor.probe import Probe, run_checked
from tests.fakes.installation import fake_tensorrt_llm, worker_processes
from tests.support import executors

BACKENDS = ["tensorrt", "pytorch"]
PROMPT = (5, 6, 7, 8)
LONG = 100_000


class Machine:
    """A machine with the fake, and hosts on it. `script` is the fake's."""

    def __init__(self, directory: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._model = str(model)
        self._monkeypatch = monkeypatch
        self._log = directory / "calls.jsonl"

    async def start(
        self,
        backend: str = "pytorch",
        script: dict[str, Any] | None = None,
        *,
        version: str = "1.2.1",
        arguments: dict[str, Any] | None = None,
        build: dict[str, Any] | None = None,
        timeout: float = 60.0,
        **options: Any,
    ) -> Probe:
        """A host that is ready."""
        environ = fake_tensorrt_llm(self._directory, version=version, script=script, log=self._log)
        for name, value in environ.items():
            self._monkeypatch.setenv(name, value)
        limits: dict[str, Any] = {"max_batch_size": 64, "max_seq_len": 2 * LONG}
        if backend == "tensorrt":
            limits = {"build_config": {"class": "BuildConfig", **limits, **(build or {})}}
        elif options.get("iteration_stats", True):
            limits["enable_iter_perf_stats"] = True
        options = {"max_sequences": 64, "max_seq_len": 2 * LONG, "iteration_stats": True, **options}
        probe = Probe(300.0)  # so that the host alone is on the watch
        probe.busy = True
        await probe.start(
            executors.TENSORRT_LLM,
            timeout,
            backend=backend,
            model=self._model,
            tokenizer=self._model,
            arguments={**limits, **(arguments or {})},
            **options,
        )
        return probe

    def calls(self, name: str) -> list[dict[str, Any]]:
        """The arguments of the fake's calls of that name."""
        lines = map(json.loads, self._log.read_text().splitlines())
        return [line["arguments"] for line in lines if line["call"] == name]


def run(body: Callable[[], Awaitable[Probe]]) -> None:
    """Run a test; afterwards nothing of its host may be left, its workers included."""

    async def closed() -> None:
        probe = await body()
        await probe.client.close()
        left = probe.client._environment
        assert left.clear() == []
        assert not left.temporary.exists()

    run_checked(closed)


def rank(probe: Probe) -> psutil.Process:
    """The host's worker."""
    (found,) = worker_processes(probe.client.pid)
    return found
