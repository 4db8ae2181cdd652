"""SageMaker's stateful sessions: an id, an end, and a folder for the model's own code.

The contract is that of SageMaker's model-hosting-container-standards. A session ends a fixed time after it was created;
the folders of sessions that have ended are removed when the next one is created.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError, OverloadedError, SessionError

logger = logging.getLogger(__name__)

_FOLDER = "sagemaker_sessions"
_MEMORY = Path("/dev/shm")  # noqa: S108  a folder of ours in it, which only we can read
_END = ".expiration_ts"


@dataclass(eq=False)
class Session:
    """`expires` is in seconds since the epoch. `worker` ran its last request and has its prompts in its cache."""

    id: str
    expires: float
    path: Path
    worker: object = None

    @property
    def header(self) -> str:
        """The value of `X-Amzn-SageMaker-New-Session-Id`."""
        return f"{self.id}; Expires={time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(self.expires))}"


class Sessions:
    """The open sessions, at most `limit`. `create` and `close` work on files: call them in a thread."""

    def __init__(self, path: Path, expiration: float, limit: int, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._expiration = expiration
        self._limit = limit
        self._now = now
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in sorted(path.iterdir()):
            session = _read(folder)
            if session is not None:
                self._sessions[session.id] = session

    def create(self) -> Session:
        """Open a session. Raises OverloadedError if there are too many."""
        with self._lock:
            self._remove_expired()
            if len(self._sessions) >= self._limit:
                wait = min(session.expires for session in self._sessions.values()) - self._now()
                raise OverloadedError(
                    f"{len(self._sessions)} sessions are open, the limit (option.max_sessions): close one",
                    queue_depth=len(self._sessions),
                    capacity=self._limit,
                    retry_after=max(1, math.ceil(wait)),
                )
            identifier = str(uuid.uuid4())
            session = Session(identifier, self._now() + self._expiration, self._path / identifier)
            session.path.mkdir(mode=0o700)
            (session.path / _END).write_text(json.dumps(session.expires))
            self._sessions[identifier] = session
            logger.info("session %s is open", identifier)
            return session

    def find(self, identifier: str) -> Session:
        """The open session. Raises SessionError."""
        session = self._sessions.get(identifier)
        if session is None:
            raise SessionError(f"session not found: {identifier[:80]!r}")
        if session.expires <= self._now():
            raise SessionError(f"session {identifier} has expired: open a new one")
        return session

    def close(self, identifier: str) -> None:
        """Close a session and remove its folder. Raises SessionError."""
        with self._lock:
            self._remove(self.find(identifier))

    def _remove_expired(self) -> None:
        for session in list(self._sessions.values()):
            if session.expires <= self._now():
                self._remove(session)

    def _remove(self, session: Session) -> None:
        del self._sessions[session.id]
        shutil.rmtree(session.path, ignore_errors=True)
        logger.info("session %s is closed", session.id)


def open_sessions(options: Options) -> Sessions | None:
    """The sessions that the options ask for. Raises ConfigError if their folder cannot be written."""
    if not options.enable_stateful_sessions:
        return None
    usable = _MEMORY.is_dir() and os.access(_MEMORY, os.R_OK | os.W_OK)
    path = options.sessions_path or (_MEMORY if usable else Path(tempfile.gettempdir())) / _FOLDER
    try:
        sessions = Sessions(path, options.sessions_expiration, options.max_sessions)
        writable = os.access(path, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError([f"option.sessions_path={path}: {error.strerror}, expected a folder to write in"]) from None
    if not writable:
        raise ConfigError([f"option.sessions_path={path}: not writable, expected a folder to write in"])
    return sessions


def _read(folder: Path) -> Session | None:
    """The session of a folder that an earlier process made."""
    try:
        identifier = str(uuid.UUID(folder.name))
        expires = json.loads((folder / _END).read_text())
    except (ValueError, OSError):
        return None
    if identifier != folder.name or type(expires) not in (int, float):
        return None
    return Session(identifier, float(expires), folder)
