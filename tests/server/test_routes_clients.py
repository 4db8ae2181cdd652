"""Whose share of the batch a request over HTTP has, and how many requests a client may have."""

from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.config import Options
from djl_trtllm.model import Tokenizer
from djl_trtllm.server.access import Access, ApiKey
from djl_trtllm.service.clients import Clients
from tests.server.application import application, body
from tests.support.asgi import JSON
from tests.support.in_process import Hosts
from tests.support.virtual_time import in_virtual_time, until

KEYS = Access((ApiKey.of("web-app", "secret"), ApiKey.of("batch", "other")))


def clients(**options: Any) -> Clients:
    return Clients(Options(**options))


@in_virtual_time
async def test_a_request_over_its_clients_limit_is_answered_with_429_until_one_ends(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    limited = clients(max_requests_per_client=1, client_header="x-user-id")
    async with application(tokenizer, clients=limited) as served:
        ann, bob = ({**JSON, "x-user-id": name} for name in ("ann", "bob"))
        first = served.client.begin("POST", "/invocations", body(4), ann)
        await until(lambda: bool(hosts.last.submitted))
        for path, kind in (("/invocations", "TooManyRequestsException"), ("/predictions/story", None)):
            refused = await served.client.post(path, body(4), ann)
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            assert kind is None or refused.json["type"] == kind
        other = served.client.begin("POST", "/invocations", body(4), bob)
        await until(lambda: len(hosts.last.submitted) == 2)
        hosts.last.step(4)
        assert [(await each.end()).status for each in (first, other)] == [200, 200]
        again = served.client.begin("POST", "/invocations", body(4), ann)
        await until(lambda: len(hosts.last.submitted) == 3)
        again.leave()
        await again.end()
        assert not limited._requests


@in_virtual_time
async def test_a_request_that_is_refused_or_invalid_does_not_count_any_more(hosts: Hosts, tokenizer: Tokenizer) -> None:
    limited = clients(max_requests_per_client=1)
    async with application(tokenizer, clients=limited) as served:
        for _ in range(2):
            assert (await served.client.post("/invocations", b"{}", JSON)).status == 424
        assert not limited._requests


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Authorization": "Bearer secret"}, ("key web-app", 0)),
        ({"x-api-key": "other", "x-user-id": "ann", "x-priority": "high"}, ("key batch", 1)),
    ],
)
@in_virtual_time
async def test_a_key_has_its_share_and_its_priority(
    hosts: Hosts, tokenizer: Tokenizer, headers: dict[str, str], expected: tuple[str, int]
) -> None:
    some = clients(client_header="x-user-id", priority_header="x-priority")
    async with application(tokenizer, clients=some, access=KEYS) as served:
        request = served.client.begin("POST", "/invocations", body(4), {**JSON, **headers})
        await until(lambda: bool(hosts.last.submitted))
        batch = served.registry.models["story"].workers[0].batch
        assert batch is not None
        (slot,) = batch._running.values()
        assert (slot.client.key, slot.priority) == expected
        hosts.last.step(4)
        assert (await request.end()).status == 200
