"""Read a model's JSON files; errors name the file and the problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from djl_trtllm.errors import ModelError

_LFS = b"version https://git-lfs"


def read_object(file: Path, error: type[ModelError]) -> dict[str, Any] | None:
    """The JSON object in `file`, or None if there is no such file. Raises `error` for anything else."""
    if not file.is_file():
        return None
    if is_lfs_pointer(file):
        raise error(f"{file}: this is a Git LFS pointer, not the file; fetch the files with `git lfs pull`")
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError, RecursionError) as cause:
        raise error(f"{file} is not valid JSON: {cause}; copy it from the model again") from cause
    if not isinstance(value, dict):
        raise error(f"{file} holds a JSON {type(value).__name__}, expected an object; copy it from the model again")
    return value


def is_lfs_pointer(file: Path) -> bool:
    """Whether `file` is the pointer that Git LFS leaves in place of a file that was not fetched."""
    if file.stat().st_size > 1024:
        return False
    with file.open("rb") as stream:
        return stream.read(len(_LFS)) == _LFS
