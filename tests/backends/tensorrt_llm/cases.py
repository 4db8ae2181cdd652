"""What every option with an effect on TensorRT-LLM 1.2.1 becomes: the table `tensorrt_llm_cases.json`.

Arguments are named `OWNER.FIELD`, those of LLM itself `LLM.NAME`; members of enums are `ENUM.MEMBER`. A case holds what
differs from a configuration in which nothing is set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

ABSENT = "absent"
"""Of an argument that is passed by default and not with this value."""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`option=value`: what changes in building an engine, in running it, and in running a checkpoint with PyTorch."""

    option: str
    value: str
    building: dict[str, Any] = {}
    running: dict[str, Any] = {}
    pytorch: dict[str, Any] = {}


CASES = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=tuple[Case, ...])
assert len(CASES) > 140
