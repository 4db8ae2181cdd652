"""What a compiler subprocess is told, and how it tells where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

PHASE_MARK = "@@phase "

_Spec = TypeVar("_Spec", bound="CompileSpec")


class CompileSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One compile: a checkpoint, the tokenizer that belongs to it, and the directory that the engine is written to.

    `workspace` is a folder for whatever comes between; it is removed when the compiler has ended, however it did.
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


class OpenVinoSpec(CompileSpec, frozen=True, kw_only=True):
    """`dtype` is fp32, fp16 or bf16, the type of weights that are not quantized; `quantize` none, int8, int4 or awq."""

    dtype: str
    quantize: str
    trust_remote_code: bool


class TensorRtLlmSpec(CompileSpec, frozen=True, kw_only=True):
    """`arguments` are those of LLM, as plain data (see `tensorrt_llm_objects.build_arguments`).

    `converter_alias`: what TensorRT-LLM has to read in the checkpoint's path (see `telling_names`).
    """

    arguments: dict[str, Any]
    converter_alias: str | None = None


def tell_phase(name: str) -> None:
    """Say on standard output that a phase begins; called in the compiler's process."""
    print(f"{PHASE_MARK}{name}", flush=True)
