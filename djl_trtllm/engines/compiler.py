"""Compilers, and the messages between this process and a compiler's."""

import os
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from djl_trtllm.engines.cache import installed_versions
from djl_trtllm.errors import CompilerMissingError
from djl_trtllm.files import read_table

PHASE_MARK = "@@phase "

_Spec = TypeVar("_Spec", bound="CompileSpec")


class CompileSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One compile: a checkpoint, its tokenizer, and the output directory.

    `workspace` is a folder for intermediate files; it is removed when the compiler ends, even after a failure.
    """

    checkpoint: str
    tokenizer_dir: str
    out: str
    workspace: str | None = None

    @classmethod
    def load(cls: type[_Spec], path: Path) -> _Spec:
        """Read a spec file. Raises OSError and msgspec.DecodeError."""
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def save(self, path: Path) -> None:
        """Write a spec file. Raises OSError."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)))


def report_phase(name: str) -> None:
    """Report on standard output that a phase starts; called in the compiler's process."""
    print(f"{PHASE_MARK}{name}", flush=True)


def die_with_parent() -> None:
    """Kill this process and its children when the parent ends, even if the parent was killed.

    Standard input is a pipe that only the parent holds, so it reaches end of file when the parent ends.
    """

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@dataclass(frozen=True)
class Cause:
    """A class of failures: its name, the log lines that show it, and what to do about it."""

    name: str
    pattern: re.Pattern[str]
    advice: str


def read_causes(package: str) -> tuple[Cause, ...]:
    """Return the causes in `causes.toml` beside the modules of `package`."""
    rows = read_table("causes.toml", package)["causes"]
    return tuple(Cause(row["name"], re.compile(row["pattern"]), row["advice"]) for row in rows)


@dataclass(frozen=True)
class Compiler:
    """A compiler module, run as `python -m MODULE SPEC.json`.

    `packages` must be installed; `install` says how. `phases` are in order: a line that starts with `spec.PHASE_MARK`
    names the next phase, and so does a line that matches one of `phase_lines`. `causes` are searched for in the log of
    a failure; the first match wins. `environment` is added to the process's environment.
    """

    module: str
    packages: tuple[str, ...]
    install: str
    phases: tuple[str, ...]
    causes: tuple[Cause, ...]
    phase_lines: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def require(self, checkpoint: Path) -> None:
        installed = installed_versions(self.packages)
        missing = [package for package in self.packages if package not in installed]
        if missing:
            raise CompilerMissingError(
                f"{checkpoint} is a checkpoint and must be compiled before it can be served here, and the compiler is "
                f"not installed (missing: {', '.join(missing)}). Either install it:\n"
                f"    {self.install}\n"
                "or compile on a machine that has it and serve the directory it writes, which needs no compiler:\n"
                f"    djl-trtllm compile {checkpoint} OUT"
            )

    def phase_after(self, phase: str, line: str) -> str | None:
        """The later phase that this line of the compiler's log starts, if any."""
        later = self.phases[self.phases.index(phase) + 1 :] if phase in self.phases else self.phases
        return next((name for name in later if name in self.phase_lines and self.phase_lines[name].search(line)), None)

    def cause_of(self, lines: Sequence[str]) -> tuple[Cause, str] | None:
        """The class of a failure with the first log line that shows it: later lines are consequences."""
        for cause in self.causes:
            for line in lines:
                if cause.pattern.search(line):
                    return cause, line
        return None


GPU_MEMORY, HOST_MEMORY, DISK = read_causes("djl_trtllm.engines")
