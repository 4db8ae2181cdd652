"""What the compiler subprocess is told, and how it tells where it is."""

from __future__ import annotations

from pathlib import Path

import msgspec

PHASE_MARK = "@@phase "
PHASES = ("load", "convert", "compress", "tokenizer", "save")


class CompileSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One compile: a checkpoint, the tokenizer that belongs to it, and what its weights become.

    `dtype` is fp32, fp16 or bf16, the type of weights that are not quantized; `quantize` is none, int8, int4 or awq.
    """

    checkpoint: str
    tokenizer_dir: str
    out: str
    dtype: str
    quantize: str
    trust_remote_code: bool

    @classmethod
    def load(cls, path: Path) -> CompileSpec:
        """Read a spec file. Raises OSError and msgspec.DecodeError."""
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def save(self, path: Path) -> None:
        """Write a spec file. Raises OSError."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))
