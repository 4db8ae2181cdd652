"""Leftovers of interrupted downloads and compiles, in the cache and among temporary files."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from djl_trtllm.engines.cache import MANIFEST_FILE, UNFINISHED
from djl_trtllm.model.work_directory import abandoned_temporary_directories, is_abandoned

_OUTGOING = "outgoing"
_HASHES = "hashes"
_DOWNLOADS = "downloads"
_MODELS = "models"


@dataclass(frozen=True)
class Leftover:
    """A file or directory that nobody works on and nobody needs, with its size in bytes."""

    path: Path
    size: int

    @classmethod
    def of(cls, path: Path) -> "Leftover":
        size = 0
        for file in [path, *path.rglob("*")]:
            with suppress(OSError):
                size += file.lstat().st_size if not file.is_dir() else 0
        return cls(path, size)

    def remove(self) -> None:
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)


def find_leftovers(root: Path) -> list[Leftover]:
    """The leftovers in the cache at `root` and among temporary files, ordered by path."""
    found = (_of_cache, _of_models, _of_downloads, _of_outgoing)
    paths = {path for of in found for path in of(root)}
    paths |= {*abandoned_temporary_directories(), *(root / _HASHES).glob(".*")}
    return [Leftover.of(path) for path in sorted(paths)]


def _of_cache(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        return
    for path in root.iterdir():
        name = path.name
        if name.startswith(".") and name.endswith(UNFINISHED):
            if is_abandoned(path):
                yield path
        elif name.startswith(".") and name.endswith(".removed"):
            if _is_free(root / f"{name[1:].removesuffix('.removed')}.lock"):
                yield path
        elif name.endswith(".log"):
            if not (path.with_suffix("") / MANIFEST_FILE).is_file() and _is_free(path.with_suffix(".lock")):
                yield path
        elif _is_incomplete(path) and _is_free(path.with_name(f"{name}.lock")):
            yield path


def _is_incomplete(entry: Path) -> bool:
    """Whether a directory is an entry of the engine cache, which has a lock beside it, without an engine."""
    return entry.is_dir() and entry.with_name(f"{entry.name}.lock").exists() and not (entry / MANIFEST_FILE).is_file()


def _of_models(root: Path) -> Iterator[Path]:
    for path in (root / _MODELS).glob(".*.partial-*"):
        name = path.name.partition(".partial-")[0]
        if _is_free(path.with_name(f"{name}.lock")):
            yield path


def _of_downloads(root: Path) -> Iterator[Path]:
    # The next download of the same address continues with it.
    for path in (root / _DOWNLOADS).glob("*/*/.*.partial"):
        if _is_free(path.with_name(".lock")):
            yield path


def _of_outgoing(root: Path) -> Iterator[Path]:
    """Engines that were compiled and not uploaded: the next run uploads them."""
    for path in (root / _OUTGOING).glob("*"):
        if not path.name.startswith(".") and (is_abandoned(path) or not path.is_dir()):
            yield path


def _is_free(lock: Path) -> bool:
    if not lock.exists():
        return True
    try:
        with FileLock(lock).acquire(timeout=0):
            return True
    except (Timeout, OSError):
        return False
