"""Engine directories: their manifest, the checksums of their files, and the local cache of engines.

A process that uses a file holds its mark, a lock that the system releases when the process ends. Files that interrupted
downloads and compiles leave are found as leftovers.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from djl_trtllm.errors import EngineError, EngineMismatchError
from djl_trtllm.files import MOST_JSON_BYTES, file_sha256, read_file, write_whole
from djl_trtllm.model.work_directory import (
    abandoned_temporary_directories,
    exclusively,
    is_abandoned,
    sweep,
    unfinished,
)
from djl_trtllm.progress import acquire, format_bytes

_OUTGOING = "outgoing"
_HASHES = "hashes"
_DOWNLOADS = "downloads"
_MODELS = "models"
_LONGEST_NAME = 64
"""The most characters of an address in the name of its folder."""


@dataclass(frozen=True)
class Leftover:
    """A file or directory that no process uses or needs, with its size in bytes."""

    path: Path
    size: int

    @classmethod
    def of(cls, path: Path) -> Leftover:
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
    found = (_of_cache, _of_builders, _of_downloads, _of_outgoing)
    paths = {path for of in found for path in of(root)}
    paths |= {*abandoned_temporary_directories(), *(root / _HASHES).glob(".*")}
    return [Leftover.of(path) for path in sorted(paths)]


def _of_builders(root: Path) -> Iterator[Path]:
    # A mark on a directory of a network file system is unknown to other machines, where a lock is known.
    for folder in (root, root / _MODELS, root / _OUTGOING):
        for name, path in unfinished(folder):
            locks = (folder / f"{name}.lock", folder / f".{name}.lock")
            if path.is_dir() and is_abandoned(path) and all(map(_is_free, locks)):
                yield path


def _of_cache(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        return
    for path in root.iterdir():
        name = path.name
        if name.startswith(".") and name.endswith((".removed", ".fetched")):
            if _is_free(root / f"{path.stem[1:]}.lock"):
                yield path
        elif name.endswith(".log"):
            if not (path.with_suffix("") / MANIFEST_FILE).is_file() and _is_free(path.with_suffix(".lock")):
                yield path
        elif _is_incomplete(path) and _is_free(path.with_name(f"{name}.lock")):
            yield path


def _is_incomplete(entry: Path) -> bool:
    """Whether a directory is an entry of the engine cache, which has a lock beside it, without an engine."""
    return entry.is_dir() and entry.with_name(f"{entry.name}.lock").exists() and not (entry / MANIFEST_FILE).is_file()


def _of_downloads(root: Path) -> Iterator[Path]:
    # The next download of the same address continues with it.
    for path in (root / _DOWNLOADS).glob("*/*/.*.partial"):
        if _is_free(path.with_name(".lock")):
            yield path


def _of_outgoing(root: Path) -> Iterator[Path]:
    """Engines that were compiled here and not yet uploaded."""
    for path in (root / _OUTGOING).glob("*"):
        lock = path.with_name(f".{path.name.removesuffix('.log')}.lock")
        if not path.name.startswith(".") and _is_free(lock):
            yield path


def _is_free(lock: Path) -> bool:
    if not lock.exists():
        return True
    try:
        with FileLock(lock).acquire(timeout=0):
            return True
    except (Timeout, OSError):
        return False


log = logging.getLogger(__name__)

_WORTH_REMEMBERING_BYTES = 64 << 20
_SETTLED_SECONDS = 2.0


class FileHashes:
    """Hashes of files. Those of 64 MB and more are cached in the folder `store`, if there is one.

    Hashing reads every byte: 0.3 GB per CPU-second without SHA instructions, measured on a 2.5 GHz Xeon, or a minute
    for 16 GB. A file is unchanged if device, inode, size, modification and change time are unchanged.
    """

    def __init__(self, store: Path | None = None) -> None:
        self.store = store

    def sha256(self, path: Path) -> str:
        """Hex SHA-256 of a file. Raises OSError."""
        state = _state(path)
        if self.store is None or path.stat().st_size < _WORTH_REMEMBERING_BYTES:
            return file_sha256(path)
        note = self.store / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
        try:
            remembered = msgspec.json.decode(note.read_bytes(), type=dict[str, Any])
            if remembered["state"] == state:
                return str(remembered["sha256"])
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError, KeyError) as error:
            log.info("the cached hash %s is not used: %s", note, error)
        sha256 = file_sha256(path)
        # A file touched just now may be written once more with the same times.
        settled = time.time() - path.stat().st_mtime > _SETTLED_SECONDS
        if settled and _state(path) == state:
            try:
                note.parent.mkdir(parents=True, exist_ok=True)
                write_whole(note, msgspec.json.encode({"state": state, "sha256": sha256}))
            except OSError as error:
                log.info("cannot cache the hash of a large file, it is computed at every start: %s", error)
        return sha256


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


MANIFEST_FILE = "manifest.json"
FORMAT = 1

OptionValue = str | int | float | bool | list[Any] | None


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of an engine directory: bytes and hex SHA-256."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The record in an engine directory.

    `checkpoint` is the `checkpoint_identity()` of the compiled checkpoint, `options` are the options that affect the
    engine, `versions` the packages that made it. `platform` is the target: for OpenVINO the machine's architecture
    (`x86_64`), for TensorRT the GPU's (`sm_90`). `created` is UTC in ISO 8601, `files` every other file of the
    directory by its relative path. `limits` are the batch size and lengths that it was compiled for, by option, where
    the engine's own files do not have them.
    """

    format: int
    backend: str
    checkpoint: str
    options: dict[str, OptionValue]
    versions: dict[str, str]
    platform: str
    created: str
    files: dict[str, FileEntry]
    limits: dict[str, int] = {}

    @classmethod
    def of(
        cls,
        directory: Path,
        *,
        backend: str,
        checkpoint: str,
        options: Mapping[str, OptionValue],
        versions: Mapping[str, str],
        platform: str,
        limits: Mapping[str, int] | None = None,
    ) -> Manifest:
        """Describe a newly compiled directory; reads and hashes every file. Raises OSError."""
        files = {
            path.relative_to(directory).as_posix(): FileEntry(path.stat().st_size, file_sha256(path))
            for path in sorted(directory.rglob("*"))
            if path.is_file() and path.name != MANIFEST_FILE
        }
        return cls(
            format=FORMAT,
            backend=backend,
            checkpoint=checkpoint,
            options=dict(options),
            versions=dict(versions),
            platform=platform,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            files=files,
            limits=dict(limits or {}),
        )

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """The directory's manifest, or None if it has none.

        Raises EngineMismatchError if it cannot be read.
        """
        path = directory / MANIFEST_FILE
        remedy = "compile the engine again, or delete the manifest to serve the directory unchecked"
        try:
            content = read_file(path, MOST_JSON_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise EngineMismatchError(f"{path} cannot be read: {error}; {remedy}") from error
        try:
            manifest = msgspec.json.decode(content, type=cls)
        except msgspec.DecodeError as error:
            raise EngineMismatchError(f"{path} is broken ({error}): {remedy}") from error
        if manifest.format != FORMAT:
            raise EngineMismatchError(
                f"{path} has format {manifest.format}, this version of djl-trtllm reads format {FORMAT}: {remedy}"
            )
        return manifest

    def write(self, directory: Path) -> None:
        """Write `manifest.json`. Call it last: its presence says that the directory is complete."""
        write_whole(directory / MANIFEST_FILE, msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    def verify(self, directory: Path, *, contents: bool = True) -> list[str]:
        """List what is missing, truncated or changed, one line per file; empty if the directory is intact.

        With `contents=False` compares sizes only; otherwise reads every byte (see `FileHashes` for the cost).
        """
        problems = []
        for name, entry in self.files.items():
            path = directory / name
            try:
                size = path.stat().st_size
                if size < entry.size:
                    problems.append(f"{name}: truncated, {size} of {entry.size} bytes")
                elif size > entry.size:
                    problems.append(f"{name}: changed, {size} bytes where {entry.size} were written")
                elif contents and file_sha256(path) != entry.sha256:
                    problems.append(f"{name}: changed, same size and a different SHA-256")
            except (FileNotFoundError, NotADirectoryError):
                problems.append(f"{name}: missing")
            except OSError as error:
                problems.append(f"{name}: cannot be read ({error})")
        return problems

    def require_whole(self, directory: Path) -> None:
        raise_damaged(directory, self.verify(directory, contents=False))

    def require_fit(
        self, directory: Path, *, backend: str, options: Mapping[str, OptionValue], versions: Mapping[str, str]
    ) -> None:
        """Raise EngineMismatchError with everything that differs (see `differences`)."""
        raise_unfit(directory, self.differences(backend=backend, options=options, versions=versions))

    def differences(
        self,
        *,
        backend: str | None = None,
        checkpoint: str | None = None,
        options: Mapping[str, OptionValue] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> list[str]:
        """List how this engine differs from the arguments, one line each; an argument that is None is not compared.

        `options` are the requested ones by name. `versions` are the installed runtime's; only a runtime older than the
        one that made the engine is a difference, because newer ones read it.
        """
        lines = []
        if backend is not None and backend != self.backend:
            lines.append(f"option.backend: engine has {self.backend}, asked for {backend}")
        if checkpoint is not None and checkpoint != self.checkpoint:
            lines.append(f"checkpoint: engine was made from {self.checkpoint}, this one is {checkpoint}")
        for name, asked in (options or {}).items():
            if name in self.options and self.options[name] != asked:
                lines.append(f"option.{name}: engine has {_shown(self.options[name])}, asked for {_shown(asked)}")
        for package, installed in (versions or {}).items():
            made_with = self.versions.get(package)
            if made_with is not None and _release(installed) < _release(made_with):
                lines.append(
                    f"{package}: the engine was made with {made_with}, and {installed} is installed, an older one"
                )
        return lines


_MOST_PROBLEMS = 20
"""The most problems that a message lists: a manifest may name 100,000 files."""


def raise_damaged(directory: Path, problems: list[str]) -> None:
    """Raise EngineMismatchError for an engine whose files have problems."""
    _raise(directory, "is damaged", problems, "copy it again, or compile it again")


def raise_unfit(directory: Path, differences: list[str]) -> None:
    """Raise EngineMismatchError for an engine that differs from the machine or the options."""
    _raise(directory, "does not fit", differences, "change the option, or compile the checkpoint again")


def _raise(directory: Path, what: str, problems: list[str], remedy: str) -> None:
    if not problems:
        return
    more = len(problems) - _MOST_PROBLEMS
    lines = [*problems[:_MOST_PROBLEMS], *([f"{more} more"] if more > 0 else [])]
    listed = "".join(f"  - {line}\n" for line in lines)
    raise EngineMismatchError(
        f"the engine {directory} {what}:\n{listed}{remedy} with `djl-trtllm compile CHECKPOINT OUT`"
    )


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    versions = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _release(version: str) -> tuple[int, ...]:
    # Year and feature release: patch releases of OpenVINO read each other's IR.
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _shown(value: OptionValue) -> str:
    return "none" if value is None else str(value)


_held: dict[Path, int] = {}
_lock = threading.Lock()


def hold_mark(mark: Path) -> None:
    """Hold the mark until this process ends, shared with other processes, and set its modification time to now.

    If the file cannot be written, no process can remove what it marks, and nothing is held. Waits while another process
    removes it. Raises OSError.
    """
    with _lock:
        if mark not in _held:
            try:
                descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                    return
                raise
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            _held[mark] = descriptor
        os.utime(_held[mark])


@contextmanager
def unheld(mark: Path) -> Iterator[bool]:
    """Whether no process holds the mark; if so, none can take it while the block runs."""
    with _lock:
        if mark in _held:
            yield False
            return
    with exclusively(mark, os.O_RDWR | os.O_CREAT) as free:
        yield free


def cache_key(
    *, backend: str, checkpoint: str, options: Mapping[str, OptionValue], versions: Mapping[str, str], platform: str
) -> str:
    """The name of a cache entry: the backend and a 128-bit hash of everything that affects the engine."""
    content = json.dumps([backend, checkpoint, dict(options), dict(versions), platform], sort_keys=True)
    return f"{backend}-{hashlib.sha256(content.encode()).hexdigest()[:32]}"


@dataclass(frozen=True)
class CacheEntry:
    """A cached engine: its directory, size in bytes, and time of last use (seconds since 1970)."""

    path: Path
    size: int
    last_used: float

    @property
    def key(self) -> str:
        return self.path.name

    @classmethod
    def of(cls, path: Path) -> CacheEntry:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        used = path.with_name(f"{path.name}.use")
        stamp = used if used.exists() else path
        return cls(path, size, stamp.stat().st_mtime)

    def verify(self) -> list[str]:
        """Read every byte and list what is wrong, one line per file. Empty if the entry is intact."""
        return _defects(self.path, contents=True)


@dataclass(frozen=True)
class EngineCache:
    """Engines by key under `root`, shared by any number of processes.

    An entry is complete if it has a manifest, every file has the size in the manifest, and every file written after the
    manifest also has its checksum. Other entries are rebuilt. Beside the entry `KEY` are `KEY.lock` (held by the one
    builder; the system releases it when the builder dies), `KEY.use` (held by the processes that use the entry; its
    modification time is the last use) and `KEY.log`. With `max_bytes`, a new entry removes the least recently used.
    """

    root: Path
    max_bytes: int | None = None

    def lookup(self, key: str) -> Path | None:
        """The complete entry of this key, or None. The entry is in use from now until this process ends."""
        entry = self.root / key
        if not entry.is_dir():
            return None
        self._hold(key)
        return entry if not _defects(entry) else None

    def get_or_build(self, key: str, builder: Callable[[Path], None], progress: Callable[[str], None]) -> Path:
        """The entry of this key; if no process has built it yet, build it with `builder(entry)`.

        `builder` writes the directory it is given, the manifest last. Of all processes that share this cache one builds
        at a time; the others wait and report that to `progress`. Raises EngineError if the cache cannot be written, or
        if the builder left no complete engine. Exceptions of the builder are passed on.
        """
        if (found := self.lookup(key)) is not None:
            return found
        entry = self.root / key
        with self._lock(key, progress):
            # Another process may have built it meanwhile.
            if (found := self.lookup(key)) is not None:
                return found
            defects = _defects(entry)
            for left in sweep(entry):
                progress(f"removed the files of an interrupted compile: {left.name}")
            if entry.exists():
                progress(f"the cached engine {entry} is incomplete ({'; '.join(defects)}), compiling it again")
                shutil.rmtree(entry)
            builder(entry)
            if defects := _defects(entry):
                raise EngineError(f"the builder of {entry} left no complete engine: {'; '.join(defects)}")
            self._hold(key)
            if self.max_bytes is not None:
                for removed in self.prune(self.max_bytes):
                    progress(
                        f"removed {removed.key} from the engine cache to stay below {format_bytes(self.max_bytes)}"
                    )
            return entry

    @contextmanager
    def outgoing(self, destination: str, progress: Callable[[str], None]) -> Iterator[Path]:
        """The place of an engine that is compiled here and then uploaded, while no other process works on it.

        `destination` is an address, such as `s3://models/story`, which has a place of its own. The engine is removed
        after the block. If the block raises, it stays: the next run uploads it without compiling. Raises EngineError if
        the cache cannot be written.
        """
        destination = destination.rstrip("/")
        readable = re.sub(r"\W", "_", destination.rpartition("/")[2], flags=re.ASCII)[:_LONGEST_NAME]
        # An argument may have bytes that are not UTF-8.
        name = f"{readable}-{hashlib.sha256(os.fsencode(destination)).hexdigest()[:16]}"
        engine = self.root / _OUTGOING / name
        with self._lock(f"{_OUTGOING}/.{name}", progress):
            yield engine
            shutil.rmtree(engine, ignore_errors=True)

    def entries(self) -> list[CacheEntry]:
        """The cached engines, the most recently used first."""
        if not self.root.is_dir():
            return []
        folders = [path for path in self.root.iterdir() if path.is_dir() and not path.name.startswith(".")]
        found = [CacheEntry.of(path) for path in folders if (path / MANIFEST_FILE).is_file()]
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def prune(self, max_bytes: int = 0) -> list[CacheEntry]:
        """Remove the least recently used entries until `max_bytes` are left, and return the removed ones.

        Entries that a process uses or builds stay.
        """
        entries = self.entries()
        total = sum(entry.size for entry in entries)
        removed = []
        for entry in reversed(entries):
            if total <= max_bytes:
                break
            if self._remove(entry):
                removed.append(entry)
                total -= entry.size
        return removed

    def remove(self, key: str) -> bool:
        """Remove the entry of this key; False if there is none, or a process uses or builds it."""
        entry = next((entry for entry in self.entries() if entry.key == key), None)
        return entry is not None and self._remove(entry)

    def _remove(self, entry: CacheEntry) -> bool:
        build_lock = FileLock(self.root / f"{entry.key}.lock")
        try:
            with build_lock.acquire(timeout=0), unheld(self.root / f"{entry.key}.use") as free:
                if not free:
                    return False
                # Rename first: if this process is killed in between, no partial entry is left under the key.
                gone = self.root / f".{entry.key}.removed"
                shutil.rmtree(gone, ignore_errors=True)
                entry.path.rename(gone)
                shutil.rmtree(gone)
                (self.root / f"{entry.key}.log").unlink(missing_ok=True)
                return True
        except Timeout:
            return False

    def _lock(self, key: str, progress: Callable[[str], None]) -> AbstractContextManager[object]:
        def report(waited: float) -> None:
            progress(f"another process is compiling this engine, waiting for it ({waited:.0f} s)")

        with self._writing():
            return acquire(FileLock(self.root / f"{key}.lock"), report)

    def _hold(self, key: str) -> None:
        with self._writing():
            hold_mark(self.root / f"{key}.use")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EngineError(
                f"the engine cache {self.root} cannot be written: {error}; set option.engine_cache_dir to a writable "
                "directory with free space"
            ) from error


def _defects(entry: Path, *, contents: bool = False) -> list[str]:
    try:
        manifest = Manifest.read(entry)
        if manifest is None:
            return ["no manifest"]
        # The manifest is written last. Read files that are newer than it; for the others compare sizes only.
        sealed = (entry / MANIFEST_FILE).stat().st_mtime_ns
        touched = any(path.stat().st_mtime_ns > sealed for path in entry.rglob("*") if path.is_file())
        return manifest.verify(entry, contents=contents or touched)
    except EngineMismatchError as error:
        return [str(error)]
    except OSError as error:
        return [f"cannot be read ({error})"]
