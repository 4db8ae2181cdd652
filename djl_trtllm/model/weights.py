"""Find weight files, check that they are complete, and read their sizes from the headers."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

from djl_trtllm.errors import LayoutError
from djl_trtllm.model.json_file import is_lfs_pointer, read_object

MOST_HEADER_BYTES = 100 * 1024 * 1024
"""In bytes; the safetensors library refuses longer headers too."""

_SHARD = re.compile(r"(?P<start>.+)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})(?P<end>\..+)")

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

# An adapter, or a second copy of the weights in another library's format.
_OTHERS = ("adapter_model", "consolidated")


def find_weights(path: Path) -> tuple[Path, ...]:
    """The weight files of a Hugging Face checkpoint: safetensors if there are any, else PyTorch's; may be empty.

    Raises `LayoutError` if an index names missing files, and for Git LFS pointers and truncated files.
    """
    for index, pattern in zip(INDEXES, ("*.safetensors", "pytorch_model*.bin"), strict=True):
        if (path / index).is_file():
            files = _indexed(path / index)
        else:
            files = tuple(sorted(file for file in path.glob(pattern) if not file.name.startswith(_OTHERS)))
            _check_shards(path, files)
        if files:
            check_whole(files)
            return files
    return ()


def check_whole(files: tuple[Path, ...]) -> None:
    """Raise `LayoutError` for files that are empty, truncated, or Git LFS pointers."""
    pointers = [file.name for file in files if is_lfs_pointer(file)]
    if pointers:
        raise LayoutError(
            f"{files[0].parent}: {bounded(pointers)}: these are Git LFS pointers, not the files; fetch the files "
            "with `git lfs pull`, or download the model with `hf download`"
        )
    for file in files:
        if file.suffix == ".safetensors":
            read_header(file)
        elif file.stat().st_size == 0:
            raise LayoutError(f"{file} is empty; download or copy it again")
        elif file.suffix == ".bin" and _is_cut_zip(file):
            raise LayoutError(
                f"{file} is truncated: {file.stat().st_size:,} bytes of a PyTorch file without its end; download or "
                "copy it again"
            )


def read_header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name to dtype, shape and data offsets.

    Raises `LayoutError` if the file is truncated or not a safetensors file. Format:
    https://github.com/huggingface/safetensors#format
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > MOST_HEADER_BYTES:
            raise LayoutError(f"{file} is not a safetensors file ({size:,} bytes); download or copy it again")
        if 8 + length > size:
            raise LayoutError(
                f"{file} is truncated: {size:,} bytes, the header alone has {8 + length:,}; download or copy it again"
            )
        try:
            header = json.loads(stream.read(length))
            end = max((_extent(entry)[1] for entry in _tensors(header)), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LayoutError(f"{file} has a damaged header ({error}); download or copy it again") from error
    if 8 + length + end > size:
        raise LayoutError(
            f"{file} is truncated: {size:,} bytes, the tensors end at {8 + length + end:,}; download or copy it again"
        )
    return dict(header)


def _is_cut_zip(file: Path) -> bool:
    # PyTorch's files are zip archives, with the directory at the end; older ones are pickles, which have no mark.
    with file.open("rb") as stream:
        starts = stream.read(4) == b"PK\x03\x04"
    return starts and not zipfile.is_zipfile(file)


def parameter_bytes(files: tuple[Path, ...]) -> int | None:
    """Bytes of all tensors in `files`; for formats other than safetensors the file sizes. None without files."""
    if not files:
        return None
    total = 0
    for file in files:
        if file.suffix == ".safetensors":
            total += sum(end - start for start, end in map(_extent, _tensors(read_header(file))))
        else:
            total += file.stat().st_size
    return total


def bounded(names: list[str], limit: int = 20) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _tensors(header: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for name, entry in header.items() if name != "__metadata__"]


def _extent(entry: dict[str, Any]) -> tuple[int, int]:
    start, end = entry["data_offsets"]
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end):
        raise ValueError(f"a tensor at {start!r} to {end!r}")
    return start, end


def _indexed(index: Path) -> tuple[Path, ...]:
    weight_map = (read_object(index, LayoutError) or {}).get("weight_map")
    if not isinstance(weight_map, dict):
        raise LayoutError(
            f"{index} has no `weight_map` object, which names the weight files; copy it from the model again"
        )
    shards = sorted({str(name) for name in weight_map.values()})
    if any(Path(shard).name != shard for shard in shards):
        raise LayoutError(f"{index} names weight files outside its own directory; expected plain file names")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise LayoutError(
            f"{index.parent}: {len(missing)} of {len(shards)} weight files named in {index.name} are missing: "
            f"{bounded(missing)}; download or copy them"
        )
    return tuple(index.parent / shard for shard in shards)


def _check_shards(path: Path, files: tuple[Path, ...]) -> None:
    """Without an index, the file names give the number of shards: `model-00001-of-00003.safetensors`."""
    present = {file.name for file in files}
    wanted: set[str] = set()
    for name in present:
        if match := _SHARD.fullmatch(name):
            start, count, end = match["start"], match["count"], match["end"]
            width = len(match["number"])
            wanted.update(f"{start}-{number:0{width}d}-of-{count}{end}" for number in range(1, int(count) + 1))
    missing = sorted(wanted - present)
    if missing:
        raise LayoutError(
            f"{path}: {len(missing)} of {len(wanted)} weight files are missing: {bounded(missing)}; copy them"
        )
