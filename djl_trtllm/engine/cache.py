"""The local engine cache: one directory per engine, named by everything that changes it."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from djl_trtllm.engine.manifest import Manifest, OptionValue
from djl_trtllm.engine.staging import sweep
from djl_trtllm.errors import EngineError, EngineMismatchError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_TELL_EVERY_SECONDS = 10.0


def cache_key(
    *, backend: str, checkpoint: str, options: Mapping[str, OptionValue], versions: Mapping[str, str], platform: str
) -> str:
    """The name of a cache entry: backend and 128 bits over everything that changes the engine."""
    content = json.dumps([backend, checkpoint, dict(options), dict(versions), platform], sort_keys=True)
    return f"{backend}-{hashlib.sha256(content.encode()).hexdigest()[:32]}"


class EngineCache:
    """Engines by key under `root`, shared by any number of processes.

    An entry is whole when it has a manifest and every file has the manifest's size; anything else is rebuilt. Beside
    the entry `KEY` lie `KEY.lock` (held by the one builder, and freed by the system when that is killed) and `KEY.log`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def lookup(self, key: str) -> Path | None:
        """The whole entry of this key, or None."""
        entry = self.root / key
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
            return entry
        finally:
            lock.release()

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
                self.root.mkdir(parents=True, exist_ok=True)
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


def _defects(entry: Path) -> list[str]:
    try:
        manifest = Manifest.read(entry)
    except EngineMismatchError as error:
        return [str(error)]
    return ["no manifest"] if manifest is None else manifest.verify(entry, contents=False)
