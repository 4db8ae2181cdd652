"""The local engine cache: one directory per engine, named by everything that changes it."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from djl_trtllm.engines import in_use
from djl_trtllm.engines.manifest import MANIFEST_FILE, Manifest, OptionValue
from djl_trtllm.engines.staging import sweep
from djl_trtllm.errors import EngineError, EngineMismatchError
from djl_trtllm.model.remote.progress import shown

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_TELL_EVERY_SECONDS = 10.0


def cache_key(
    *, backend: str, checkpoint: str, options: Mapping[str, OptionValue], versions: Mapping[str, str], platform: str
) -> str:
    """The name of a cache entry: backend and 128 bits over everything that changes the engine."""
    content = json.dumps([backend, checkpoint, dict(options), dict(versions), platform], sort_keys=True)
    return f"{backend}-{hashlib.sha256(content.encode()).hexdigest()[:32]}"


@dataclass(frozen=True)
class CacheEntry:
    """One engine of the cache: its directory, bytes, and when it was last used (seconds since 1970)."""

    path: Path
    size: int
    last_used: float

    @property
    def key(self) -> str:
        """Its name."""
        return self.path.name

    @classmethod
    def of(cls, path: Path) -> CacheEntry:
        """Look at an entry's files."""
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        used = path.with_name(f"{path.name}.use")
        stamp = used if used.exists() else path
        return cls(path, size, stamp.stat().st_mtime)

    def verify(self) -> list[str]:
        """What is wrong with it, one line per file; every byte is read. Empty when it is whole."""
        try:
            manifest = Manifest.read(self.path)
        except EngineMismatchError as error:
            return [str(error)]
        return ["no manifest"] if manifest is None else manifest.verify(self.path)


class EngineCache:
    """Engines by key under `root`, shared by any number of processes.

    An entry is whole when it has a manifest, every file has the manifest's size, and no file was written after it
    without having the manifest's checksum; anything else is rebuilt. Beside the entry `KEY` lie `KEY.lock` (held by the
    one builder, and freed by the system when that is killed), `KEY.use` (held by those who use the entry, its time is
    that of the last use) and `KEY.log`. With `max_bytes`, a new entry makes room by removing those used longest ago.
    """

    def __init__(self, root: Path, max_bytes: int | None = None) -> None:
        self.root = root
        self._max_bytes = max_bytes

    def lookup(self, key: str) -> Path | None:
        """The whole entry of this key, or None. It is in use from now on until this process ends."""
        entry = self.root / key
        if not entry.is_dir():
            return None
        in_use.hold(self.root / f"{key}.use")
        return entry if not _defects(entry) else None

    def get_or_build(
        self,
        key: str,
        builder: Callable[[Path], None],
        progress: Callable[[str], None] = log.info,
        *,
        wait_seconds: float | None = None,
        cancel: threading.Event | None = None,
    ) -> Path:
        """The entry of this key, made by `builder(entry)` where no process has made it yet.

        `builder` writes the directory it is given and its manifest last; of all processes on this cache one builds at
        a time, the others wait and tell `progress` so. Raises EngineError where the cache cannot be written, where
        `wait_seconds` pass in waiting (default: as long as the builder lives) or `cancel` is set meanwhile, or where
        the builder left no whole engine; what the builder raises is passed on.
        """
        if (entry := self.lookup(key)) is not None:
            return entry
        entry = self.root / key
        lock = self._lock(key, progress, wait_seconds, cancel)
        try:
            defects = _defects(entry)
            if not defects:
                return entry
            self._clear(entry, defects, progress)
            builder(entry)
            if defects := _defects(entry):
                raise EngineError(f"the builder of {entry} left no whole engine: {'; '.join(defects)}")
            in_use.hold(self.root / f"{key}.use")
            if self._max_bytes is not None:
                for removed in self.prune(self._max_bytes):
                    progress(f"removed {removed.key} from the engine cache to stay below {shown(self._max_bytes)}")
            return entry
        finally:
            lock.release()

    def entries(self) -> list[CacheEntry]:
        """What is in the cache, the most recently used first."""
        if not self.root.is_dir():
            return []
        found = [CacheEntry.of(path) for path in self.root.iterdir() if path.is_dir() and _is_entry(path)]
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def prune(self, max_bytes: int = 0) -> list[CacheEntry]:
        """Remove entries, those used longest ago first, until `max_bytes` are left; returns what was removed.

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

    def _remove(self, entry: CacheEntry) -> bool:
        build_lock = FileLock(self.root / f"{entry.key}.lock")
        try:
            with build_lock.acquire(timeout=0), in_use.nobody(self.root / f"{entry.key}.use") as free:
                if not free:
                    return False
                # Out of sight first: killed in between it is no half entry.
                gone = self.root / f".{entry.key}.removed"
                shutil.rmtree(gone, ignore_errors=True)
                entry.path.rename(gone)
                shutil.rmtree(gone)
                (self.root / f"{entry.key}.log").unlink(missing_ok=True)
                return True
        except Timeout:
            return False

    def _lock(
        self,
        key: str,
        progress: Callable[[str], None],
        wait_seconds: float | None,
        cancel: threading.Event | None,
    ) -> FileLock:
        lock = FileLock(self.root / f"{key}.lock")
        started = time.monotonic()
        told = -_TELL_EVERY_SECONDS
        while True:
            try:
                lock.acquire(timeout=_POLL_SECONDS)
                return lock
            except Timeout:
                waited = time.monotonic() - started
                if wait_seconds is not None and waited > wait_seconds:
                    raise EngineError(
                        f"another process has been compiling {self.root / key} for more than {wait_seconds:.0f} s "
                        f"(its log: {self.root / key}.log)"
                    ) from None
                if cancel is not None and cancel.is_set():
                    raise EngineError(f"cancelled while another process was compiling {self.root / key}") from None
                if waited - told >= _TELL_EVERY_SECONDS:
                    progress(f"another process is compiling this engine, waiting for it ({waited:.0f} s)")
                    told = waited
            except OSError as error:
                raise EngineError(
                    f"the engine cache {self.root} cannot be written: {error}; "
                    "set option.engine_cache_dir to a directory that can"
                ) from error

    def _clear(self, entry: Path, defects: list[str], progress: Callable[[str], None]) -> None:
        for left in sweep(entry):
            progress(f"removed what an interrupted compile left: {left.name}")
        if entry.exists():
            progress(f"the cached engine {entry} is not whole ({'; '.join(defects)}), compiling it again")
            shutil.rmtree(entry)


def _is_entry(path: Path) -> bool:
    return (path / MANIFEST_FILE).is_file() and not path.name.startswith(".")


def _defects(entry: Path) -> list[str]:
    try:
        manifest = Manifest.read(entry)
        if manifest is None:
            return ["no manifest"]
        # Files written after the manifest, which is the last, are read; of the others sizes do.
        sealed = (entry / MANIFEST_FILE).stat().st_mtime_ns
        touched = any(path.stat().st_mtime_ns > sealed for path in entry.rglob("*") if path.is_file())
        return manifest.verify(entry, contents=touched)
    except EngineMismatchError as error:
        return [str(error)]
    except OSError as error:
        return [f"cannot be read ({error})"]
