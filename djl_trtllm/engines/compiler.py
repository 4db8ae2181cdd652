"""What is known of a compiler before it runs: how it is started, and how its log is read."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from djl_trtllm.errors import CompilerMissingError


@dataclass(frozen=True)
class Cause:
    """One class of failures: its name, the lines of a log that show it, and what to do about it."""

    name: str
    pattern: re.Pattern[str]
    advice: str


@dataclass(frozen=True)
class Compiler:
    """A module that is run as `python -m MODULE SPEC.json`.

    `packages` must be installed, and `install` says how they are. `phases` are told in this order: a line that
    `spec.PHASE_MARK` begins says which one comes, and so does a line that one of `phase_lines` matches. `causes` are
    searched in the log of a failure, the first that is found counts. `environment` is added to the process's own.
    """

    module: str
    packages: tuple[str, ...]
    install: str
    phases: tuple[str, ...]
    causes: tuple[Cause, ...]
    phase_lines: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def require(self, checkpoint: Path) -> None:
        """Raise CompilerMissingError naming the packages that compiling needs and that are not installed."""
        missing = [package for package in self.packages if not _is_installed(package)]
        if missing:
            raise CompilerMissingError(
                f"{checkpoint} is a checkpoint and must be compiled before it can be served here, and the compiler is "
                f"not installed (missing: {', '.join(missing)}). Either install it:\n"
                f"    {self.install}\n"
                "or compile on a machine that has it and serve the directory it writes, which needs no compiler:\n"
                f"    djl-trtllm compile {checkpoint} OUT"
            )

    def phase_after(self, phase: str, line: str) -> str | None:
        """The later phase that a line of the compiler's own log begins, if it begins one."""
        later = self.phases[self.phases.index(phase) + 1 :] if phase in self.phases else self.phases
        return next((name for name in later if name in self.phase_lines and self.phase_lines[name].search(line)), None)

    def cause_of(self, lines: Sequence[str]) -> tuple[Cause, str] | None:
        """The class of a failure with the first line that shows it: what follows is what came of it."""
        for cause in self.causes:
            for line in lines:
                if cause.pattern.search(line):
                    return cause, line
        return None


GPU_MEMORY = Cause(
    "out of GPU memory",
    re.compile(
        r"CUDA out of memory|OutOfMemoryError|insufficient GPU memory|Requested amount of GPU memory"
        r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|Cuda Runtime \(out of memory\)"
    ),
    "lower option.max_num_tokens, option.max_rolling_batch_size or the lengths, quantise the weights "
    "(option.quantize), or spread the model over more GPUs (option.tensor_parallel_degree)",
)
HOST_MEMORY = Cause(
    "out of host memory",
    re.compile(r"^MemoryError|std::bad_alloc|Cannot allocate memory|DefaultCPUAllocator|signal 9 \(Killed\)"),
    "give the machine or the container more memory: a checkpoint is loaded into host memory before it is compiled, "
    "once per GPU",
)
DISK = Cause(
    "no space on the disk",
    re.compile(r"No space left on device|Disk quota exceeded"),
    "make room, or name a larger disk with option.engine_cache_dir: while an engine is compiled it takes three times "
    "the room of its weights",
)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
