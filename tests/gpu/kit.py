"""What the tests on GPUs measure, and the lines in which `pytest -s` prints it; greedy streams under which one ends."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from benchmarks.speculation import WORDS
from tests.support.client import Answer, exchange, lmi
from tests.support.processes import wait_until
from tests.support.server import Server

NOISE = 200
"""MiB by which a GPU's used memory changes by itself."""
SAID = 60.0
"""Seconds in which a load that fails says why."""
START_SECONDS = 300
_NOTICED = 5.0
"""Seconds in which the end of a process of an engine is noticed."""
_TOKENS = 600
_SAMPLE_SECONDS = 0.05


def figure(what: str, value: float, unit: str = "s") -> None:
    print(f"\nmeasured: {what}: {value:.2f} {unit}", flush=True)


def memory(which: str) -> list[int]:
    """MiB of each GPU: "used" or "total"."""
    asked = ["nvidia-smi", f"--query-gpu=memory.{which}", "--format=csv,noheader,nounits"]
    return list(map(int, subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()))


def users_of_gpus() -> list[list[int]]:
    """The processes that hold memory of each GPU."""
    import pynvml

    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return [[each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)] for handle in handles]


def used_bytes() -> list[int]:
    """Used bytes of each GPU, with those that the driver reserves."""
    import pynvml

    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


class FreedMemory:
    """When the memory of all GPUs was what it had been before, though another engine takes it again soon after.

    Nothing else may use the GPUs meanwhile.
    """

    def __init__(self, before: list[int]) -> None:
        self._most = [used + (NOISE << 20) for used in before]
        self.at: float | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while self.at is None and not over.wait(_SAMPLE_SECONDS):
                if all(used <= most for used, most in zip(used_bytes(), self._most, strict=True)):
                    self.at = time.monotonic()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


# -- an engine that ends under greedy streams --------------------------------------------------------------------------


def copying(number: int) -> dict[str, Any]:
    """A greedy stream with a text of its own to copy."""
    words = random.Random(number).choices(WORDS.split(), k=120)
    text = f"{' '.join(words)}. {' '.join(words[:8])}"
    return lmi(text, stream=True, max_new_tokens=_TOKENS, details=True, ignore_eos=True)


def check_the_end_of(
    process_of: Callable[[Server], psutil.Process], server: Server, streams: int, before: list[int]
) -> None:
    """Kill a process of the engine under greedy streams: none fails, all have the tokens of undisturbed ones."""
    requests = [copying(number) for number in range(streams)]
    figure("each GPU holds at least", (min(used_bytes()) - max(before)) / (1 << 20), "MiB")
    quiet = server.together(requests, at_once=streams)
    assert all(len(answer.token_ids) == _TOKENS for answer in quiet)
    freed = FreedMemory(before)
    with freed.watched():
        answers, killed, noticed, ready = asyncio.run(_kill_under(server, requests, process_of))
    equal = sum(one.token_ids == two.token_ids for one, two in zip(answers, quiet, strict=True))
    figure("equal streams", equal, f"of {streams}")
    figure("its end is noticed", noticed - killed)
    figure("another engine is ready", ready - killed)
    assert freed.at is not None
    figure("the memory of the GPUs is back", freed.at - killed)
    assert noticed - killed <= _NOTICED
    assert all(answer.complete and answer.status == 200 for answer in answers)
    assert server.finished("error") == 0 and server.metric("executor_restarts_total") == 1
    assert equal == streams


async def _kill_under(
    server: Server, requests: list[dict[str, Any]], process_of: Callable[[Server], psutil.Process]
) -> tuple[list[Answer], float, float, float]:
    """The answers, and when the process was killed, that was noticed, and another engine was ready."""
    begun = server.metric("generated_tokens_total")
    answers = asyncio.gather(*(exchange(server.port, request) for request in requests))

    def kill() -> tuple[float, float, float]:
        wait_until(
            lambda: server.metric("generated_tokens_total") >= begun + len(requests) * _TOKENS / 8, what="tokens"
        )
        process = process_of(server)
        killed = time.monotonic()
        process.kill()
        wait_until(lambda: server.ping() == 503, what="503")
        noticed = time.monotonic()
        wait_until(lambda: server.ping() == 200, START_SECONDS, what="another engine")
        return killed, noticed, time.monotonic()

    killed, noticed, ready = await asyncio.to_thread(kill)
    return await answers, killed, noticed, ready


# -- memory that is taken ----------------------------------------------------------------------------------------------


_HOLD = """
import sys, torch
gpu, share = int(sys.argv[1]), float(sys.argv[2])
held = torch.empty(int(torch.cuda.mem_get_info(gpu)[0] * share), dtype=torch.uint8, device=f"cuda:{gpu}")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def taken(gpu: int, share: float = 0.97) -> Iterator[None]:
    """Another process has this share of a GPU's free memory."""
    command = [sys.executable, "-c", _HOLD, str(gpu), str(share)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield
        finally:
            process.stdin.close()


def check_that_it_says(server: Server, *said: str) -> None:
    """Wait until the server's log has all of the texts, a minute at most."""
    began = time.monotonic()
    wait_until(lambda: all(map(server.says, said)), SAID, f"{said}")
    figure("a load that fails says why", time.monotonic() - began)
    for line in server.log:
        if any(each in line for each in said):
            print(line)
