"""What a measurement has found so far, in a file: an interrupted one goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.finder.outcome import Phase

_FORMAT = 1


class Attempt(msgspec.Struct, frozen=True):
    """A trial and its outcome. `reason` says why memory ran out, in `phase`."""

    tokens: int
    fits: bool
    phase: Phase
    reason: str
    seconds: float


class State(msgspec.Struct):
    """`conditions` are what affects the result, for a reader; the file's name is their hash.

    `memory` is the bound of each engine process in bytes. `complete` once the result is known.
    """

    conditions: dict[str, Any]
    memory: int | None = None
    attempts: list[Attempt] = []
    complete: bool = False
    format: int = _FORMAT


class StateFile:
    """The state of one measurement, in `folder`."""

    def __init__(self, folder: Path, conditions: Mapping[str, Any]) -> None:
        self._conditions = dict(conditions)
        content = json.dumps([_FORMAT, self._conditions], sort_keys=True, default=str)
        self.path = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"

    @property
    def log_path(self) -> Path:
        """The log of the last trial."""
        return self.path.with_suffix(".log")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises DjlTrtllmError if another process measures the same, or if the folder cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path.with_suffix(".lock"))
            lock.acquire(timeout=0)
        except Timeout:
            raise DjlTrtllmError(
                f"another process measures the same model with the same options ({self.path}): wait for it to end"
            ) from None
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            yield
        finally:
            lock.release()

    def read(self) -> State:
        """The state as it was left; an empty one if there is none, or none that this version reads."""
        with suppress(OSError, msgspec.DecodeError):
            state = msgspec.json.decode(self.path.read_bytes(), type=State)
            if state.format == _FORMAT:
                return state
        return State(conditions=self._conditions)

    def write(self, state: State) -> None:
        """Replace the file as a whole: at every moment it is the old state or the new one. Raises DjlTrtllmError."""
        temporary = None
        try:
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.stem}.")
            temporary = Path(name)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(state)))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            raise self._not_writable(error) from error

    def forget(self) -> None:
        """Measure anew."""
        self.path.unlink(missing_ok=True)

    def _not_writable(self, error: OSError) -> DjlTrtllmError:
        return DjlTrtllmError(
            f"the state of the measurement, {self.path}, cannot be written: {error}; set option.engine_cache_dir to a "
            "writable directory"
        )
