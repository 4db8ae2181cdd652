"""The local engine cache: one directory per engine, named by everything that affects its content."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from djl_trtllm.engines import in_use
from djl_trtllm.engines.manifest import MANIFEST_FILE, Manifest, OptionValue
from djl_trtllm.engines.staging import sweep
from djl_trtllm.errors import EngineError, EngineMismatchError
from djl_trtllm.model.remote.progress import acquire, format_bytes


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
        try:
            manifest = Manifest.read(self.path)
        except EngineMismatchError as error:
            return [str(error)]
        return ["no manifest"] if manifest is None else manifest.verify(self.path)


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
        if (entry := self.lookup(key)) is not None:
            return entry
        entry = self.root / key
        with self._lock(key, progress):
            defects = _defects(entry)
            if not defects:
                return entry
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
            with build_lock.acquire(timeout=0), in_use.nobody(self.root / f"{entry.key}.use") as free:
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

        try:
            return acquire(FileLock(self.root / f"{key}.lock"), report)
        except OSError as error:
            raise self._not_writable(error) from error

    def _hold(self, key: str) -> None:
        try:
            in_use.hold(self.root / f"{key}.use")
        except OSError as error:
            raise self._not_writable(error) from error

    def _not_writable(self, error: OSError) -> EngineError:
        return EngineError(
            f"the engine cache {self.root} cannot be written: {error}; set option.engine_cache_dir to a writable "
            "directory with free space"
        )


def _defects(entry: Path) -> list[str]:
    try:
        manifest = Manifest.read(entry)
        if manifest is None:
            return ["no manifest"]
        # The manifest is written last. Read files that are newer than it; for the others compare sizes only.
        sealed = (entry / MANIFEST_FILE).stat().st_mtime_ns
        touched = any(path.stat().st_mtime_ns > sealed for path in entry.rglob("*") if path.is_file())
        return manifest.verify(entry, contents=touched)
    except EngineMismatchError as error:
        return [str(error)]
    except OSError as error:
        return [f"cannot be read ({error})"]
