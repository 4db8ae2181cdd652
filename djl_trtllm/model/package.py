"""Pack a model directory into `model.tar.gz`; the same files give the same bytes."""

from __future__ import annotations

import gzip
import io
import os
import secrets
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from djl_trtllm.errors import ModelError
from djl_trtllm.model.remote.progress import ProgressMeter

_SKIPPED = frozenset({"__pycache__", "__MACOSX", "lost+found"})
_COMPRESSION = 1
"""A low gzip level: weights do not compress, and the other files are small."""


def package(directory: Path, out: Path, progress: Callable[[str], None] = lambda line: None) -> list[str]:
    """Pack a directory's files at the top of the archive `out`, and return their names.

    Hidden files and caches are left out. Links are followed, but not out of the directory. Times, owners and the order
    of files do not affect the bytes. `out` appears complete or not at all. Raises ModelError.
    """
    files = dict(sorted(_files(directory, out)))
    if not files:
        raise ModelError(f"{directory} has no files to pack")
    size = sum(path.stat().st_size for path in files.values())
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        with (
            partial.open("wb") as raw,
            gzip.GzipFile("", "wb", _COMPRESSION, raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
            ProgressMeter(f"packing {out}", size, progress) as meter,
        ):
            for name, path in files.items():
                with path.open("rb") as content:
                    archive.addfile(_header(name, path), _Counted(content, meter))
        partial.replace(out)
    except OSError as error:
        raise ModelError(f"cannot write {out}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return list(files)


class _Counted(io.RawIOBase):
    """A file whose bytes are counted as they are read."""

    def __init__(self, file: BinaryIO, meter: ProgressMeter) -> None:
        self._file = file
        self._meter = meter

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._meter.add(len(data))
        return data


def _files(directory: Path, out: Path) -> Iterator[tuple[str, Path]]:
    root = directory.resolve()
    for folder, folders, names in os.walk(directory, followlinks=True):
        folders[:] = sorted(name for name in folders if not _is_skipped(name))
        for name in names:
            path = Path(folder, name)
            if _is_skipped(name) or path.resolve() == out.resolve():
                continue
            if not path.resolve().is_relative_to(root):
                raise ModelError(f"{path} is a link out of {directory}: replace it by what it points to")
            yield path.relative_to(directory).as_posix(), path


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED


def _header(name: str, path: Path) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    status = path.stat()
    header.size = status.st_size
    header.mode = 0o755 if status.st_mode & 0o100 else 0o644
    return header
