"""What a trial shows: the number fits, memory ran out, or something else failed."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from djl_trtllm.engines.compiler import GPU_MEMORY, HOST_MEMORY

Phase = Literal["build", "load", "requests"]

_MEMORY = (
    GPU_MEMORY.pattern,
    # PyTorch, CUDA's libraries and TensorRT-LLM; the last three: nothing is left for the KV cache (kv_cache_manager.py
    # and resource_manager.py, TensorRT-LLM #542).
    re.compile(
        r"out of memory|OutOfMemory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
        r"|Impossible to fit in any sequence in kvCache|Impossible to fit any sequence in kvCache"
        r"|maxTokensInPagedKvCache must be large enough",
        re.IGNORECASE,
    ),
    # The host's: C++, Python, glibc, PyTorch and OpenVINO; the last is this package's, when it plans.
    re.compile(
        r"bad_alloc|bad allocation|MemoryError|Cannot allocate memory|DefaultCPUAllocator"
        r"|Failed to allocate \d+ bytes|can't alloc\b|of memory are available",
        re.IGNORECASE,
    ),
)
# A thread whose stack does not fit is refused with EAGAIN, as is one above the user's limit of processes.
_NO_THREAD = re.compile(r"Resource temporarily unavailable|can't start new thread")
_CRASHED = re.compile(r"\bSIG(?:SEGV|ABRT|BUS)\b|status -(?:6|7|11)\b")
_KILLED = re.compile(r"\bSIGKILL\b|signal 9\b")


class Outcome(msgspec.Struct, frozen=True):
    """`phase` is the one that failed, or the last; `reason` is empty if the number fits."""

    kind: Literal["fits", "memory", "failed"]
    phase: Phase
    reason: str = ""


class Failure(msgspec.Struct, frozen=True):
    """What is known of a trial that failed.

    `cause` is the class of a failed build (`BuildError.cause`), `status` the exit status of the trial's own process if
    it ended without a report. `oom_kills` is how many processes the kernel killed for memory meanwhile. `bounded`:
    the engine process had a memory bound.
    """

    phase: Phase
    message: str
    cause: str | None = None
    status: int | None = None
    oom_kills: int = 0
    bounded: bool = False


def classify(failure: Failure) -> Outcome:
    """Whether memory ran out. A SIGKILL is a lack of memory only if the kernel's OOM killer sent it."""
    kind: Literal["memory", "failed"] = "memory" if _is_memory(failure) else "failed"
    return Outcome(kind, failure.phase, _reason(failure, kind))


def _is_memory(failure: Failure) -> bool:
    if failure.oom_kills:
        return True
    if failure.cause is not None:
        # A build that was killed has this cause, also if a person killed it.
        killed = failure.cause == HOST_MEMORY.name and _KILLED.search(failure.message) is not None
        return failure.cause == GPU_MEMORY.name or (failure.cause == HOST_MEMORY.name and not killed)
    if any(pattern.search(failure.message) for pattern in _MEMORY):
        return True
    return failure.bounded and _NO_THREAD.search(failure.message) is not None


def _reason(failure: Failure, kind: str) -> str:
    if failure.oom_kills:
        return f"the kernel's OOM killer ended a process while {doing(failure.phase)}"
    lines = [line.strip() for line in failure.message.splitlines() if line.strip()]
    if kind == "memory":
        return next((line for line in lines if any(pattern.search(line) for pattern in _MEMORY)), failure.message)
    if failure.status is not None:
        return f"the trial's process ended with status {failure.status} while {doing(failure.phase)}"
    if _KILLED.search(failure.message):
        return f"{failure.message}\nThe kernel's OOM killer did not end it: it was killed by somebody else"
    return failure.message


def is_crash(outcome: Outcome) -> bool:
    """Whether a process crashed: libraries do where they do not check an allocation, and for other reasons."""
    return outcome.kind == "failed" and _CRASHED.search(outcome.reason) is not None


def doing(phase: Phase) -> str:
    """What a trial does in a phase."""
    return {"build": "building the engine", "load": "loading the engine", "requests": "answering requests"}[phase]
