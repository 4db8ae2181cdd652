"""Pack a model directory into `model.tar.gz`; the same files give the same bytes."""

from __future__ import annotations

import gzip
import os
import secrets
import tarfile
from collections.abc import Iterator
from pathlib import Path

from djl_trtllm.errors import ModelError

_SKIPPED = frozenset({"__pycache__", "__MACOSX", "lost+found"})
_COMPRESSION = 1
"""A low gzip level: weights do not compress, and the other files are small."""


def package(directory: Path, out: Path) -> list[str]:
    """Pack a directory's files at the top of the archive `out`, and return their names.

    Hidden files and caches are left out. Links are followed, but not out of the directory. Times, owners and the order
    of files do not affect the bytes. `out` appears complete or not at all. Raises ModelError.
    """
    files = dict(sorted(_files(directory, out)))
    if not files:
        raise ModelError(f"{directory} has no files to pack")
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        with (
            partial.open("wb") as raw,
            gzip.GzipFile("", "wb", _COMPRESSION, raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name, path in files.items():
                with path.open("rb") as content:
                    archive.addfile(_header(name, path), content)
        partial.replace(out)
    except OSError as error:
        raise ModelError(f"cannot write {out}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return list(files)


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
