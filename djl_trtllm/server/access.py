"""Who may do what: API keys with roles, and the port of the management API.

Keys are kept and compared as SHA-256 digests, all of them for each request, so that the time says nothing about them.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from djl_trtllm.config import Options
from djl_trtllm.errors import AuthenticationError, ConfigError, ForbiddenError

_LARGEST_FILE = 1 << 20
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MEMBERS = ("name", "key", "sha256", "roles")
_BEARER = "bearer "
_SENDABLE = "expected printable ASCII without blanks at the ends: clients send nothing else in a header"


class WrongPort(Exception):
    """Another port takes such requests."""


class Role(enum.Enum):
    """What a key may do."""

    INFER = "infer"
    MANAGE = "manage"
    METRICS = "metrics"


@dataclass(frozen=True)
class ApiKey:
    """A key; `digest` is its SHA-256."""

    name: str
    digest: bytes
    roles: frozenset[Role]

    @classmethod
    def of(cls, name: str, key: str, roles: frozenset[Role] = frozenset(Role)) -> ApiKey:
        return cls(name, _digest(key), roles)


@dataclass(frozen=True)
class Access:
    """The keys of a server; without any, everybody may do everything. `management_port` 0: there is none."""

    keys: tuple[ApiKey, ...] = ()
    management_port: int = 0

    def check(self, role: Role | None, headers: Mapping[str, str], port: int | None = None) -> ApiKey | None:
        """The key of a request with these headers (lower case) for what needs `role`; None: it needs no key.

        `port` is the one that the request came to, None for gRPC's. Raises AuthenticationError, ForbiddenError and
        WrongPort.
        """
        if port is not None and self.management_port and (role is Role.MANAGE) != (port == self.management_port):
            if role is Role.MANAGE:
                raise WrongPort("the management API is not on this port (management_port)")
            if role is Role.INFER:
                raise WrongPort("this port is for the management API only (management_port)")
        if role is None or not self.keys:
            return None
        key = self._find(headers)
        if role not in key.roles:
            raise ForbiddenError(f"the API key {key.name!r} has no role {role.value!r}")
        return key

    def _find(self, headers: Mapping[str, str]) -> ApiKey:
        authorization = headers.get("authorization", "")
        given = headers.get("x-api-key", "")
        if authorization[: len(_BEARER)].lower() == _BEARER:
            given = authorization[len(_BEARER) :].strip()
        if not given:
            raise AuthenticationError("this server needs an API key: send `Authorization: Bearer KEY`")
        digest, found = _digest(given), None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise AuthenticationError("the API key is not one of this server's")
        return found


EVERYBODY = Access()
"""Everybody may do everything."""


def read_access(options: Options) -> Access:
    """The access that the options describe. Raises ConfigError with all that is wrong in the file of keys."""
    if options.api_key is not None and not _can_be_sent(options.api_key):
        raise ConfigError([f"api_key (SERVING_API_KEY): {_SENDABLE}"])
    keys = [] if options.api_key is None else [ApiKey.of("SERVING_API_KEY", options.api_key)]
    if options.api_keys_file is not None:
        keys += _read_file(options.api_keys_file)
    others = {
        "inference_port": options.port,
        "triton_http_port": options.triton_http_port,
        "triton_grpc_port": options.triton_grpc_port,
        "triton_metrics_port": options.triton_metrics_port,
    }
    for name, port in others.items():
        if options.management_port and options.management_port == port:
            raise ConfigError(
                [
                    f"management_port={port} is {name} too; choose another one, or 0 for a management API on the port "
                    "of the requests"
                ]
            )
    return Access(tuple(keys), options.management_port)


def _can_be_sent(key: str) -> bool:
    return key.isascii() and key.isprintable() and key == key.strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read_file(path: Path) -> list[ApiKey]:
    where = f"api_keys_file={path}"
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
        if len(text) > _LARGEST_FILE:
            raise ConfigError([f"{where}: the file is larger than {_LARGEST_FILE} bytes"])
        rows = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError([f"{where}: cannot be read: {error.strerror}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError):
        # The error would quote the file.
        raise ConfigError([f"{where}: this is not YAML"]) from None
    if not isinstance(rows, list) or not rows:
        raise ConfigError([f"{where}: expected a list of keys, each with name, key (or sha256) and roles"])
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
    digest = bytes.fromhex(given["sha256"]) if "sha256" in given else _digest(given["key"])
    return ApiKey(str(name), digest, frozenset(known[role] for role in roles))
