"""Whose a request is."""

from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError, InvalidRequestError, TooManyRequestsError
from djl_trtllm.service.clients import Clients, network


def clients(**options: Any) -> Clients:
    return Clients(Options(**options))


def test_an_api_key_is_before_a_header_and_that_before_an_address() -> None:
    some = clients(client_header="X-User-Id")
    headers = {"x-user-id": " ann "}
    assert some.caller("web", headers, "10.0.0.7").client == "key web"
    assert some.caller(None, headers, "10.0.0.7").client == "header ann"
    assert some.caller(None, {"x-user-id": " "}, "10.0.0.7").client == "address 10.0.0.7"
    assert some.caller(None, {}, None).client == ""


def test_a_header_that_the_operator_does_not_name_says_nothing() -> None:
    assert clients().caller(None, {"": "ann", "x-user-id": "ann"}, "10.0.0.7").client == "address 10.0.0.7"


def test_a_key_cannot_be_taken_for_a_header_or_an_address() -> None:
    some = clients(client_header="x-user-id")
    names = {
        some.caller("10.0.0.7", {}, None).client,
        some.caller(None, {"x-user-id": "10.0.0.7"}, None).client,
        some.caller(None, {}, "10.0.0.7").client,
    }
    assert len(names) == 3


def test_a_long_name_takes_no_more_memory_than_a_short_one() -> None:
    some = clients(client_header="x-user-id")
    names = {some.caller(None, {"x-user-id": letter * 10_000}, None).client for letter in "ab\udcff"}
    assert len(names) == 3
    assert max(map(len, names)) < 100
    assert len(some.caller(None, {"x-user-id": "a" * 128}, None).client) == len("header ") + 128


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
        ("x" * 1000, "x" * 128),
    ],
)
def test_an_ipv6_client_is_its_network(address: str, expected: str) -> None:
    assert network(address) == expected


def test_with_first_come_first_served_all_clients_have_one_share() -> None:
    caller = clients(scheduling_policy="fcfs").caller("web", {}, None)
    assert (caller.client, caller.share) == ("key web", "")
    assert clients().caller("web", {}, None).share == "key web"


@pytest.mark.parametrize(
    ("given", "priority"), [("high", 1), ("normal", 0), ("low", -1), (" HIGH ", 1), ("", 0), (None, 0)]
)
def test_the_priority_is_what_the_operators_header_says(given: str | None, priority: int) -> None:
    headers = {} if given is None else {"x-priority": given}
    assert clients(priority_header="X-Priority").caller(None, headers, None).priority == priority
    assert clients().caller(None, headers, None).priority == 0


def test_a_priority_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the header x-priority is 'urgent': expected high, normal, low"):
        clients(priority_header="x-priority").caller(None, {"x-priority": "urgent"}, None)


def test_a_client_has_so_many_requests_at_once_and_others_theirs() -> None:
    some = clients(max_requests_per_client=2)
    one, other = some.caller("a", {}, None), some.caller("b", {}, None)
    one.enter()
    one.enter()
    with pytest.raises(TooManyRequestsError, match="2 requests at once, and max_requests_per_client is 2") as error:
        one.enter()
    assert (error.value.queue_depth, error.value.capacity, error.value.retry_after) == (2, 2, 1)
    other.enter()
    one.leave()
    one.enter()
    one.leave()
    one.leave()
    other.leave()
    assert not some._requests


def test_without_a_limit_nothing_is_counted() -> None:
    some = clients()
    caller = some.caller("a", {}, None)
    caller.enter()
    assert not some._requests
    caller.leave()


@pytest.mark.parametrize(
    ("given", "expected"),
    [(("10.0.0.0/8", "::1"), ["10.0.0.0/8", "::1"]), (("*",), "*"), (("::1", "*"), "*"), ((), [])],
)
def test_proxies_are_addresses_networks_or_any(given: tuple[str, ...], expected: object) -> None:
    assert clients(forwarded_allow_ips=given).proxies == expected


def test_a_proxy_that_is_no_address_is_an_error() -> None:
    with pytest.raises(ConfigError, match="forwarded_allow_ips has 'proxy'"):
        clients(forwarded_allow_ips=("proxy",))
