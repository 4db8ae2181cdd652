"""Access to the server: API keys with roles, the port of the management API, and the web pages that may use the server.

Keys are kept and compared as SHA-256 digests, all of them for each request, so that the time says nothing about them.
"""

import enum
import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import yaml

from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.config import Options
from djl_trtllm.config.sources import MASK
from djl_trtllm.errors import AuthenticationError, ConfigError, ForbiddenError

Address: TypeAlias = tuple[str, int | None]
"""The address and the port that a request came to, as ASGI has them."""

_LARGEST_FILE = 1 << 20
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MEMBERS = ("name", "key", "sha256", "roles")
_BEARER = "bearer "
_ORIGIN = re.compile(r"https?://[^/\s,*]+")
_LONGEST_SEARCHED = 1024
"""The most characters of a text in which keys are looked for; the log shows fewer."""
_WORD = re.compile(r"[A-Za-z0-9]+=*")
"""A piece of a key, such as both of `sk-4f7a`; base64 ends with `=`."""
_MOST_WORDS = 64
_MOST_WORDS_OF_A_KEY = 8
_SENDABLE = "expected printable ASCII without blanks at the ends: clients send nothing else in a header"


class WrongPort(Exception):
    """The request came to a port that does not take requests of its kind."""


class Role(enum.Enum):
    """The actions that a key allows."""

    INFER = "infer"
    MANAGE = "manage"
    METRICS = "metrics"


@dataclass(frozen=True)
class ApiKey:
    """A key; `digest` is its SHA-256, and `length` its characters, None where only the digest is known."""

    name: str
    digest: bytes
    roles: frozenset[Role]
    length: int | None = None

    @classmethod
    def of(cls, name: str, key: str, roles: frozenset[Role] = frozenset(Role)) -> "ApiKey":
        return cls(name, _digest(key), roles, len(key))


@dataclass(frozen=True)
class Access:
    """The keys of a server; without keys everybody may do everything. A `management_port` of 0 is no port.

    `origins` are those of web pages that may use the server, `*` for all.
    """

    keys: tuple[ApiKey, ...] = ()
    management_port: int = 0
    origins: tuple[str, ...] = ()

    def check(self, role: Role | None, headers: Mapping[str, str], server: Address | None = None) -> ApiKey | None:
        """Return the key in a request's headers (lower case), which must have `role`; None where no key is needed.

        `server` is the address that the request came to, None for gRPC, which browsers cannot speak. Raises
        AuthenticationError, ForbiddenError and WrongPort.
        """
        port = None if server is None else server[1]
        if port is not None and self.management_port and (role is Role.MANAGE) != (port == self.management_port):
            if role is Role.MANAGE:
                raise WrongPort("the management API is not on this port (management_port)")
            if role is Role.INFER:
                raise WrongPort("this port is for the management API only (management_port)")
        if role is None:
            return None
        if not self.keys:
            if server is not None and _is_loopback(server[0]):
                self._check_page(headers)
            return None
        key = self._find(headers)
        if role not in key.roles:
            raise ForbiddenError(f"the API key {key.name!r} has no role {role.value!r}")
        return key

    @cached_property
    def _known(self) -> tuple[frozenset[bytes], frozenset[int | None]]:
        """The digests and the lengths of the keys."""
        return frozenset(key.digest for key in self.keys), frozenset(key.length for key in self.keys)

    def without_keys(self, text: str) -> str:
        """The beginning of a text for the log, with `********` for each of these keys that a client has put into it.

        Keys are known by their digests only. A key is found where it is the whole text, and where it consists of at
        most 8 words in a row and no letter or digit is beside it, as in `/v1/models/sk-4f7a`.
        """
        return _without_keys(text[:_LONGEST_SEARCHED], *self._known) if self.keys else text

    def _check_page(self, headers: Mapping[str, str]) -> None:
        """Raise ForbiddenError if a web page from elsewhere may have sent a request to this machine's own address.

        Its browser names it in `Origin`, unless it only reads and its own name leads to 127.0.0.1 (DNS rebinding): then
        `Host` is that name. Neither can be forged by the page.
        """
        host, origin = headers.get("host", "").lower(), headers.get("origin", "")
        if "*" in self.origins:
            return
        if host and not _names_this_machine(host) and host not in map(_host_of, self.origins):
            raise ForbiddenError(
                f"the header Host is {host[:80]!r}: without API keys, requests to a loopback address have to name "
                "localhost or 127.0.0.1; SERVING_CORS_ALLOWED_ORIGIN=http://NAME allows another name, or set "
                "SERVING_API_KEY"
            )
        if origin and _host_of(origin.lower()) != host and origin.lower() not in self.origins:
            raise ForbiddenError(
                f"web pages of {origin[:80]!r} may not use this server; SERVING_CORS_ALLOWED_ORIGIN={origin[:80]} "
                "allows them"
            )

    def _find(self, headers: Mapping[str, str]) -> ApiKey:
        given = given_key(headers)
        if not given:
            raise AuthenticationError("this server needs an API key: send `Authorization: Bearer KEY`")
        digest, found = _digest(given), None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise AuthenticationError("the API key is not one of this server's")
        return found


def given_key(headers: Mapping[str, str]) -> str:
    """The key that a request brings; empty if it brings none."""
    authorization = headers.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return headers.get("x-api-key", "")


EVERYBODY = Access()
"""Everybody may do everything."""


def read_access(options: Options) -> Access:
    """The access that the options describe. Raises ConfigError with all that is wrong in the file of keys."""
    if options.api_key is not None and not _can_be_sent(options.api_key):
        raise ConfigError(f"api_key (SERVING_API_KEY): {_SENDABLE}")
    keys = [] if options.api_key is None else [ApiKey.of("SERVING_API_KEY", options.api_key)]
    if options.api_keys_file is not None:
        keys += _read_file(options.api_keys_file)
    of_dialects = (name for dialect in DIALECTS for name in (*dialect.ports, dialect.rpc_port) if name)
    others = {"inference_port": options.port, **{name: getattr(options, name) for name in of_dialects}}
    for name, port in others.items():
        if options.management_port and options.management_port == port:
            raise ConfigError(
                f"management_port={port} is {name} too; choose another one, or 0 for a management API on the port "
                "of the requests"
            )
    return Access(tuple(keys), options.management_port, _read_origins(options.cors_allowed_origin or ()))


def _read_origins(given: tuple[str, ...]) -> tuple[str, ...]:
    origins = tuple(origin.lower() for origin in given)
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors_allowed_origin={origin}: expected the scheme and the host of a page, without a path, such "
                "as https://chat.example.com or http://localhost:3000, or * for all pages"
            )
    return origins


def _host_of(origin: str) -> str:
    return origin.partition("://")[2]


@lru_cache(maxsize=64)
def _names_this_machine(host: str) -> bool:
    """Whether a `Host` (lower case) is a loopback address, 0.0.0.0, or this machine's own name."""
    try:
        named = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if named == "localhost" or named.endswith(".localhost") or named == socket.gethostname().lower():
        return True
    try:
        return _is_loopback(named) or ipaddress.ip_address(named).is_unspecified
    except ValueError:
        return False


@lru_cache(maxsize=64)
def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _can_be_sent(key: str) -> bool:
    return key.isascii() and key.isprintable() and key == key.strip()


@lru_cache(maxsize=1024)
def _without_keys(text: str, digests: frozenset[bytes], lengths: frozenset[int | None]) -> str:
    shown, any_length = text, None in lengths
    words = [found.span() for found in islice(_WORD.finditer(text), _MOST_WORDS)]
    spans = [(0, len(text))]
    for first, (begin, _) in enumerate(words):
        spans += [(begin, end) for _, end in words[first : first + _MOST_WORDS_OF_A_KEY]]
    for begin, end in spans:
        if any_length or end - begin in lengths:
            part = text[begin:end]
            if part.isascii() and _digest(part) in digests:
                shown = shown.replace(part, MASK)
    return shown


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read_file(path: Path) -> list[ApiKey]:
    where = f"api_keys_file={path}"
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
        if len(text) > _LARGEST_FILE:
            raise ConfigError(f"{where}: the file is larger than {_LARGEST_FILE} bytes")
        rows = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError):
        # The error would quote the file.
        raise ConfigError(f"{where}: this is not YAML") from None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{where}: expected a list of keys, each with name, key (or sha256) and roles")
    problems: list[str] = []
    keys = [key for number, row in enumerate(rows, 1) if (key := _read_row(row, f"{where}: key {number}", problems))]
    if twice := {key.name for key in keys if [other.name for other in keys].count(key.name) > 1}:
        problems.append(f"{where}: {', '.join(sorted(twice))}: names are there twice")
    if problems:
        raise ConfigError(problems)
    return keys


def _read_row(row: Any, where: str, problems: list[str]) -> ApiKey | None:
    found = len(problems)
    if not isinstance(row, dict):
        problems.append(f"{where}: expected name, key (or sha256) and roles")
        return None
    problems += [f"{where}: unknown member {str(name)[:80]!r}" for name in row if name not in _MEMBERS]
    name, roles = row.get("name"), row.get("roles", [])
    if not isinstance(name, str) or not name or not name.isprintable():
        problems.append(f"{where}: name: expected a text in one line")
    known = {role.value: role for role in Role}
    if not isinstance(roles, list) or not roles or not all(isinstance(role, str) and role in known for role in roles):
        problems.append(f"{where}: roles: expected a list of {', '.join(known)}")
    given = {member: row[member] for member in ("key", "sha256") if member in row}
    if len(given) != 1 or not all(isinstance(value, str) and value for value in given.values()):
        problems.append(f"{where}: expected either key or sha256, a text in quotation marks")
    elif "key" in given and not _can_be_sent(given["key"]):
        problems.append(f"{where}: key: {_SENDABLE}")
    elif "sha256" in given and not _DIGEST.fullmatch(given["sha256"]):
        problems.append(f"{where}: sha256: expected 64 hexadecimal digits")
    if len(problems) > found:
        return None
    allowed = frozenset(known[role] for role in roles)
    if "sha256" in given:
        return ApiKey(str(name), bytes.fromhex(given["sha256"]), allowed)
    return ApiKey.of(str(name), given["key"], allowed)
