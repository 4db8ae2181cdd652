"""The client of each request and its priority, and how many requests a client has at once."""

import hashlib
import ipaddress
import json
import logging
import math
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from djl_trtllm.api.front_end import with_attributes
from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError, InvalidRequestError, OverloadedError, SessionError, TooManyRequestsError
from djl_trtllm.request import RequestOrigin

_LONGEST_NAME = 128
_DIGITS = 12
_MOST_LABELS = 4096

_PRIORITIES = {"high": 1, "normal": 0, "low": -1}


@lru_cache(_MOST_LABELS)
def label(client: str) -> str:
    """The name of a client in logs, traces and pages: the name of its key, or a hash of its header or address.

    An operator who suspects an address can compute the label: `printf %s ADDRESS | sha256sum`.
    """
    kind, _, name = client.partition(" ")
    return name if kind == "key" or not client else f"{kind}:{_digest(name)[:_DIGITS]}"


class Caller(msgspec.Struct, frozen=True):
    """The client of a request. `share` names the client whose share of the batch the request uses, `priority` its rank
    in it.

    `salt` is the group whose prompts it may reuse.
    """

    clients: "Clients"
    client: str
    share: str
    priority: int
    label: str
    salt: str

    def origin(self, request_id: str, dialect: str) -> RequestOrigin:
        """The origin of a request of this caller."""
        return RequestOrigin(request_id, dialect, self.share, self.priority, self.label, self.salt)

    def enter(self) -> None:
        """Count a request of this client, until `leave`. Raises TooManyRequestsError."""
        self.clients.enter(self.client)

    def leave(self) -> None:
        self.clients.leave(self.client)


class Clients:
    """The clients of a server, over all its models. `proxies` are the addresses whose X-Forwarded-For counts.

    Raises ConfigError.
    """

    def __init__(self, options: Options) -> None:
        self.proxies = _proxies(options.forwarded_allow_ips)
        self._client_header = (options.client_header or "").lower()
        self._priority_header = (options.priority_header or "").lower()
        self._attributes = options.client_from_custom_attributes
        self._fair = options.scheduling_policy == "fair"
        self._most = options.max_requests_per_client
        self._several_keys = options.api_keys_file is not None
        self._requests: Counter[str] = Counter()
        self._known = lru_cache(_MOST_LABELS)(self._caller)

    def caller(self, key: str | None, headers: Mapping[str, str], address: str | None) -> Caller:
        """The caller with an API key of this name, these headers (lower case) and this address, each if there is one.

        Raises InvalidRequestError for an unknown priority.
        """
        given = self._counting(headers).get(self._priority_header, "").strip() if self._priority_header else ""
        return self._known(key is not None, self.client(key, headers, address), given[:_LONGEST_NAME])

    def _caller(self, keyed: bool, client: str, given: str) -> Caller:
        salt = client if keyed and self._several_keys else ""
        return Caller(self, client, client if self._fair else "", self._priority(given), label(client), salt)

    def enter(self, client: str) -> None:
        if not self._most:
            return
        requests = self._requests[client]
        if requests >= self._most:
            raise TooManyRequestsError(
                f"this client has {requests} requests at once, and max_requests_per_client is {self._most}: send the "
                "next one when one has ended",
                queue_depth=requests,
                capacity=self._most,
                retry_after=1,
            )
        self._requests[client] += 1

    def leave(self, client: str) -> None:
        if not self._most:
            return
        self._requests[client] -= 1
        if not self._requests[client]:
            del self._requests[client]

    def client(self, key: str | None, headers: Mapping[str, str], address: str | None) -> str:
        """The client with an API key of this name, these headers (lower case) and this address."""
        if key is not None:
            return f"key {key}"
        if self._client_header and (named := self._counting(headers).get(self._client_header, "").strip()):
            if len(named) > _LONGEST_NAME:
                named = _digest(named)
            return f"header {named}"
        return "" if address is None else f"address {address[:_LONGEST_NAME]}"

    def _counting(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """The headers with custom attributes, if these count as headers."""
        return with_attributes(headers) if self._attributes else headers

    def _priority(self, given: str) -> int:
        if not given:
            return 0
        if given.lower() not in _PRIORITIES:
            raise InvalidRequestError(
                f"the header {self._priority_header} is {given[:80]!r}: expected {', '.join(_PRIORITIES)}"
            )
        return _PRIORITIES[given.lower()]


class Places:
    """Places, such as those of open sessions: a client may have as many as are still free after it, and one at least.

    So a client by itself has half of them, and another one finds a place beside it (`BodyMemory` has the same rule).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._held: Counter[str] = Counter()

    def take(self, client: str) -> bool:
        """Take a place; False if there is none for this client."""
        if self.used >= self.limit or self._held[client] + 1 > max(1, self.limit - self.used - 1):
            return False
        self.hold(client)
        return True

    def hold(self, client: str) -> None:
        """Take a place, even if none is left."""
        self.used += 1
        self._held[client] += 1

    def leave(self, client: str) -> None:
        self.used -= 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]

    def __str__(self) -> str:
        return f"{self.used} of {self.limit} are open, and a client may have as many as are still free"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def _proxies(given: tuple[str, ...]) -> list[str] | str:
    """Return the proxies as uvicorn's `forwarded_allow_ips` takes them. Raises ConfigError."""
    if "*" in given:
        return "*"
    for each in given:
        try:
            ipaddress.ip_network(each)
        except ValueError:
            raise ConfigError(
                f"forwarded_allow_ips has {each!r}: expected addresses (10.0.0.7), networks (10.0.0.0/8) or *"
            ) from None
    return list(given)


# -- SageMaker's stateful sessions -------------------------------------------------------------------------------------

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
    client: str = ""
    """The client that opened the session; unknown after a restart."""

    @property
    def header(self) -> str:
        """The value of `X-Amzn-SageMaker-New-Session-Id`."""
        return f"{self.id}; Expires={time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(self.expires))}"


class Sessions:
    """The open sessions, at most `limit`. `create` and `close` work on files: call them in a thread."""

    def __init__(self, path: Path, expiration: float, limit: int, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._expiration = expiration
        self._places = Places(limit)
        self._now = now
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in sorted(path.iterdir()):
            session = _read(folder)
            if session is not None:
                self._places.hold(session.client)
                self._sessions[session.id] = session

    def create(self, client: str = "") -> Session:
        """Open a session. Raises OverloadedError if there are too many."""
        with self._lock:
            self._remove_expired()
            if not self._places.take(client):
                wait = min(session.expires for session in self._sessions.values()) - self._now()
                raise OverloadedError(
                    f"too many sessions (option.max_sessions): {self._places}; close one",
                    queue_depth=self._places.used,
                    capacity=self._places.limit,
                    retry_after=max(1, math.ceil(wait)),
                )
            identifier = str(uuid.uuid4())
            expires = self._now() + self._expiration
            session = Session(identifier, expires, self._path / identifier, client=client)
            session.path.mkdir(mode=0o700)
            (session.path / _END).write_text(json.dumps(session.expires))
            self._sessions[identifier] = session
            logger.info("a session is opened: there are %d", self._places.used)
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
        self._places.leave(session.client)
        shutil.rmtree(session.path, ignore_errors=True)
        logger.info("a session is closed: there are %d", self._places.used)


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
        raise ConfigError(f"option.sessions_path={path}: {error.strerror}, expected a folder to write in") from None
    if not writable:
        raise ConfigError(f"option.sessions_path={path}: not writable, expected a folder to write in")
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
