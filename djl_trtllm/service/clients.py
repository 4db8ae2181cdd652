"""Whose a request is: its client and its priority, and how many requests a client has at once."""

from __future__ import annotations

import hashlib
import ipaddress
from collections import Counter
from collections.abc import Mapping

from djl_trtllm.config import Options
from djl_trtllm.config.options.choices import SchedulingPolicy
from djl_trtllm.errors import ConfigError, InvalidRequestError, TooManyRequestsError

_LONGEST_NAME = 128
_PREFIX = 64
"""Bits of an IPv6 address that belong to a network; one host has all addresses below."""

_PRIORITIES = {"high": 1, "normal": 0, "low": -1}


class Caller:
    """The client of a request. `share` names whose share of the batch the request has, `priority` is in it."""

    __slots__ = ("_clients", "client", "priority", "share")

    def __init__(self, clients: Clients, client: str, share: str, priority: int) -> None:
        self.client = client
        self.share = share
        self.priority = priority
        self._clients = clients

    def enter(self) -> None:
        """A request of it begins, and `leave` ends it. Raises TooManyRequestsError."""
        self._clients.enter(self.client)

    def leave(self) -> None:
        self._clients.leave(self.client)


class Clients:
    """The clients of a server, over all its models. `proxies` are those whose word on addresses counts.

    Raises ConfigError.
    """

    def __init__(self, options: Options) -> None:
        self.proxies = _proxies(options.forwarded_allow_ips)
        self._client_header = (options.client_header or "").lower()
        self._priority_header = (options.priority_header or "").lower()
        self._fair = options.scheduling_policy is SchedulingPolicy.FAIR
        self._most = options.max_requests_per_client
        self._requests: Counter[str] = Counter()

    def caller(self, key: str | None, headers: Mapping[str, str], address: str | None) -> Caller:
        """The caller with an API key of this name, these headers (lower case) and this address, each if there is one.

        Raises InvalidRequestError for a priority that there is not.
        """
        client = self._client(key, headers, address)
        return Caller(self, client, client if self._fair else "", self._priority(headers))

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

    def _client(self, key: str | None, headers: Mapping[str, str], address: str | None) -> str:
        if key is not None:
            return f"key {key}"
        if self._client_header and (named := headers.get(self._client_header, "").strip()):
            if len(named) > _LONGEST_NAME:
                named = hashlib.sha256(named.encode("utf-8", "surrogatepass")).hexdigest()
            return f"header {named}"
        return "" if address is None else f"address {network(address)}"

    def _priority(self, headers: Mapping[str, str]) -> int:
        given = headers.get(self._priority_header, "").strip()
        if not self._priority_header or not given:
            return 0
        if given.lower() not in _PRIORITIES:
            raise InvalidRequestError(
                f"the header {self._priority_header} is {given[:80]!r}: expected {', '.join(_PRIORITIES)}"
            )
        return _PRIORITIES[given.lower()]


def network(address: str) -> str:
    """The address of a client as one network has it: IPv4 as it is, of IPv6 the first 64 bits."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:_LONGEST_NAME]
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _PREFIX), strict=False))


def _proxies(given: tuple[str, ...]) -> list[str] | str:
    """What uvicorn calls `forwarded_allow_ips`. Raises ConfigError."""
    if "*" in given:
        return "*"
    for each in given:
        try:
            ipaddress.ip_network(each)
        except ValueError:
            raise ConfigError(
                [f"forwarded_allow_ips has {each!r}: expected addresses (10.0.0.7), networks (10.0.0.0/8) or *"]
            ) from None
    return list(given)
