"""The input of a compiler subprocess, and its phase reports."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

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
