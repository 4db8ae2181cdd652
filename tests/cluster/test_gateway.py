from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from djl_trtllm.config import Options
from tests.cluster.deployments import Deployment, replica
from tests.support.asgi import Client, Connection, lifespan

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)", exc_type=ImportError)

import grpc
from ray.exceptions import ActorDiedError

from djl_trtllm.cluster.gateway import Gateway

PROMPT = json.dumps({"inputs": "a" * 300}).encode()


Serve = Callable[..., Any]


async def begun(stream: Connection) -> None:
    """Until the first part of the response has come."""
    for _ in range(100):
        await asyncio.sleep(0)
    assert stream.parts


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Awaitable[None]]], dict[str, Deployment]]:
    """Runs a scenario with a client of a gateway; returns the deployments of the models."""

    def run(
        scenario: Callable[..., Awaitable[None]], *names: str, prefixes: bool = True, **options: Any
    ) -> dict[str, Deployment]:
        found = {name: Deployment(replica(name)) for name in names or ("a",)}
        monkeypatch.setattr("ray.serve.get_deployment_handle", lambda name: found[name])

        @asynccontextmanager
        async def opened() -> AsyncIterator[Client]:
            gateway = Gateway(Options(**options), {name: name for name in found}, prefixes=prefixes)
            async with lifespan(gateway):
                yield Client(gateway)

        async def played() -> None:
            async with opened() as client:
                await scenario(client, *found.values())

        asyncio.run(played())
        return found

    return run


def test_request_and_response_pass_as_they_are(deployed: Serve) -> None:
    async def scenario(client: Client, a: Deployment) -> None:
        whole = await client.post("/invocations", PROMPT, {"x-any": "1"}, "q=1")
        assert (whole.status, whole.headers["x-of"], whole.json["size"]) == (200, "a", len(PROMPT))
        stream = await client.post("/invocations/stream", PROMPT)
        assert stream.complete
        assert stream.parts[0] == b"first"
        assert (await client.get("/nowhere", method="HEAD")).json["path"] == "/nowhere"
        assert (await client.get("/v1/models")).headers["x-of"] == "a"
        scope = a.requests[0].scope
        assert (scope["query_string"], scope["headers"]) == (b"q=1", [(b"x-any", b"1")])
        assert a.requests[0].body == PROMPT

    deployed(scenario)


def test_requests_have_the_keys_of_their_prompts_or_their_session(deployed: Serve) -> None:
    async def scenario(client: Client, a: Deployment) -> None:
        await client.post("/invocations", PROMPT)
        await client.post("/invocations", PROMPT, {"x-session-id": "mine"})
        await client.post("/invocations", PROMPT, {"X-Amzn-SageMaker-Session-Id": "mine"})
        large = json.dumps({"inputs": "a" * 300_000}).encode()
        await client.post("/invocations", large)
        assert [(len(request.keys), request.session) for request in a.requests[:3]] == [
            (2, ""),
            (0, "mine"),
            (0, "mine"),
        ]
        assert a.requests[3].keys[:2] == a.requests[0].keys

    deployed(scenario)

    async def without(client: Client, a: Deployment) -> None:
        await client.post("/invocations", PROMPT)
        assert a.requests[0].keys == ()

    deployed(without, prefixes=False)


def test_a_request_whose_replica_dies_before_it_answers_is_sent_to_another_one(deployed: Serve) -> None:
    closed = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, None, None)

    async def scenario(client: Client, a: Deployment) -> None:
        a.failures = [(0, ActorDiedError()), (0, closed)]
        assert (await client.post("/invocations", PROMPT)).status == 200
        assert len(a.requests) == 3
        a.failures = [(0, ActorDiedError())] * 3
        refused = await client.post("/v1/completions", PROMPT)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "3 replicas died before they answered" in refused.json["error"]["message"]

    deployed(scenario)


def test_without_a_replica_a_request_is_refused_and_those_of_other_models_are_not(
    deployed: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("djl_trtllm.cluster.replica_call._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("djl_trtllm.cluster.replica_call._NO_REPLICA_SECONDS", 0.05)

    async def scenario(client: Client, silent: Deployment, b: Deployment) -> None:
        silent.has_replica = False
        refused = await client.post("/models/silent/invoke", PROMPT)
        assert (refused.status, refused.headers["retry-after"], silent.cancelled) == (503, "10", 1)
        assert "model silent has no replica: " in refused.json["message"]
        assert (await client.post("/models/b/invoke", PROMPT)).status == 200
        health = await client.get("/ping")
        assert (health.status, "model silent has no replica: " in health.json["message"]) == (503, True)

    deployed(scenario, "silent", "b")


def test_a_response_without_a_head_is_an_error(deployed: Serve) -> None:
    async def scenario(client: Client, a: Deployment) -> None:
        a.failures = [(0, StopAsyncIteration())]
        assert (await client.post("/invocations", PROMPT)).status == 500

    deployed(scenario)


def test_pages_of_models_in_several_parts_are_put_together(deployed: Serve) -> None:
    async def scenario(client: Client, *_: Deployment) -> None:
        assert (await client.get("/ping")).json.keys() >= {"parts", "b"}

    deployed(scenario, "parts", "b")


def test_a_page_of_all_models_is_made_although_a_replica_dies(deployed: Serve) -> None:
    async def scenario(client: Client, a: Deployment, b: Deployment) -> None:
        a.failures = [(0, ActorDiedError()), (0, ActorDiedError())]
        assert (await client.get("/ping")).json.keys() >= {"a", "b"}
        a.failures = [(0, ActorDiedError())] * 3
        lost = await client.get("/ping")
        assert (lost.status, lost.headers["retry-after"]) == (503, "1")
        assert "3 replicas died before they answered" in lost.json["message"]
        a.failures = [(0, KeyError("secret"))]
        failed = await client.get("/ping")
        assert (failed.status, b"secret" in failed.body) == (500, False)

    deployed(scenario, "a", "b")


@pytest.mark.parametrize("error", [ActorDiedError(), RuntimeError("of the replica")])
def test_a_response_that_breaks_off_has_no_end(deployed: Serve, error: Exception) -> None:
    async def scenario(client: Client, a: Deployment) -> None:
        a.failures = [(1, error)]
        broken = await client.post("/invocations/stream", PROMPT)
        assert broken.parts == [b"first"]
        assert not broken.complete
        assert len(a.requests) == 1

    deployed(scenario)


def test_an_error_of_the_call_is_no_other_replicas_and_tells_nothing(deployed: Serve) -> None:
    exhausted = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, None, None, "secret")

    async def scenario(client: Client, a: Deployment) -> None:
        for error in (KeyError("secret"), exhausted, asyncio.TimeoutError("secret")):
            a.failures = [(0, error)]
            failed = await client.post("/invocations", PROMPT)
            assert failed.status >= 400
            assert b"secret" not in failed.body
        assert len(a.requests) == 3

    deployed(scenario)


def test_a_client_that_leaves_cancels_the_call(deployed: Serve) -> None:
    async def scenario(client: Client, endless: Deployment) -> None:
        stream = client.begin("POST", "/invocations/stream", PROMPT)
        await begun(stream)
        stream.leave()
        await stream.end()
        assert endless.cancelled > 0
        assert not stream.complete

    deployed(scenario, "endless")


def test_a_client_that_does_not_read_is_dropped(deployed: Serve) -> None:
    async def scenario(client: Client, a: Deployment) -> None:
        stream = client.begin("POST", "/invocations/stream", None)
        stream.stop_reading()
        stream.upload(PROMPT)
        await stream.end()
        assert stream.aborted
        assert not stream.complete
        assert a.cancelled

    deployed(scenario, stream_write_timeout=0.01)


def test_a_body_that_is_too_large_is_refused_in_the_format_of_its_path(deployed: Serve) -> None:
    async def scenario(client: Client, a: Deployment) -> None:
        lmi = await client.post("/invocations", b"x" * 1001)
        assert (lmi.status, lmi.json["type"]) == (413, "RequestEntityTooLargeException")
        assert "larger than max_request_size=1000 bytes" in lmi.json["message"]
        assert (await client.post("/v1/completions", b"x" * 1001)).json["error"]["code"] is not None
        assert not a.requests
        assert (await client.post("/invocations", b"x" * 1000)).status == 200

    deployed(scenario, max_request_size=1000)


@pytest.mark.parametrize(
    ("path", "body", "headers", "query"),
    [
        ("/v1/chat/completions", b'{"model": "b"}', {}, ""),
        ("/invocations", b"{}", {"X-Amzn-SageMaker-Target-Model": "b.tar.gz"}, ""),
        ("/invocations", b"{}", {}, "model_name=b"),
        ("/predictions/b", b"{}", {}, ""),
        ("/models/b/invoke", b"{}", {}, ""),
        ("/v2/models/b/generate", b"{}", {}, ""),
        ("/models/b/adapters", b"", {}, ""),
        ("/models/b", b"", {}, ""),
        ("/v1/models/b", b"", {}, ""),
    ],
)
def test_a_request_is_for_the_model_that_path_header_query_or_body_names(
    deployed: Serve, path: str, body: bytes, headers: dict[str, str], query: str
) -> None:
    async def scenario(client: Client, a: Deployment, b: Deployment) -> None:
        method = "POST" if body else "GET"
        assert (await client.begin(method, path, body, headers, query).end()).json["name"] == "b"

    deployed(scenario, "a", "b")


def test_a_request_for_no_model_or_an_unknown_one_is_refused_with_those_there_are(deployed: Serve) -> None:
    async def scenario(client: Client, a: Deployment, b: Deployment) -> None:
        unknown = await client.post("/v1/completions", b'{"model": "c", "prompt": "x"}')
        assert unknown.status == 404
        assert unknown.json["error"]["message"].endswith("there is no model named 'c' here; there are a, b")
        missing = await client.post("/invocations", b'{"inputs": "x"}')
        assert missing.status == 400
        assert "the request names no model: this cluster has a, b" in missing.body.decode()
        assert (await client.post("/v1/completions", b'{"model": 7}')).status == 400
        assert not a.requests + b.requests

    deployed(scenario, "a", "b")


def test_pages_about_all_models_are_joined(deployed: Serve) -> None:
    async def scenario(client: Client, a: Deployment, b: Deployment) -> None:
        joined = await client.get("/v1/models")
        assert (joined.json["data"], joined.json["a"], joined.json["b"]) == (["a", "b"], 1, 1)
        ping = await client.get("/ping")
        assert {"a", "b"} <= ping.json.keys()
        assert ping.headers["content-type"] == "application/json"
        for method in ("GET", "HEAD"):
            assert (await client.get("/health", method=method)).status == 503
        assert (await client.get("/version")).json["name"] == "a"

    deployed(scenario, "a", "b")


def test_a_health_check_below_a_route_prefix_is_joined_with_nothing(deployed: Serve) -> None:
    async def scenario(client: Client, a: Deployment, b: Deployment) -> None:
        check = Connection("GET", "/fleet/v2/health/ready")
        check.scope["root_path"] = "/fleet"
        await check.begin(client._app).end()
        assert check.json.keys() in ({"name", "path", "size", name, "data"} for name in "ab")

    deployed(scenario, "a", "b")


def test_the_page_of_metrics_has_all_replicas(deployed: Serve) -> None:
    async def scenario(client: Client, *models: Deployment) -> None:
        for path in ("/metrics", "/prometheus/metrics"):
            page = await client.get(path)
            assert page.status == 200
            for name in ("a", "b")[: len(models)]:
                assert b'djl_trtllm_replica_scraped{deployment="%b",replica="r"} 1.0' % name.encode() in page.body
        assert {request.scope["path"] for model in models for request in model.requests} == {path, "/metrics"}
        # What it answers is the replica's business.
        assert (await client.post("/metrics", b"{}", {}, "model_name=a")).json["path"] == "/metrics"

    deployed(scenario)
    deployed(scenario, "a", "b")


@pytest.mark.parametrize("path", ["/monitor", "/monitor/events", "/monitor/monitor.css"])
def test_there_is_no_live_page(deployed: Serve, path: str) -> None:
    async def scenario(client: Client, a: Deployment) -> None:
        refused = await client.get(path)
        assert refused.status == 404
        assert "/metrics has the figures of all replicas" in refused.json["message"]
        assert not a.requests

    deployed(scenario)


def test_the_messages_of_a_websocket_are_requests(deployed: Serve) -> None:
    async def scenario(client: Client, a: Deployment) -> None:
        received: asyncio.Queue[Any] = asyncio.Queue()
        sent: asyncio.Queue[Any] = asyncio.Queue()
        for message in ({"type": "websocket.connect"}, {"type": "websocket.receive", "bytes": PROMPT}):
            received.put_nowait(message)
        path = "/route/invocations-bidirectional-stream"
        scope = {"type": "websocket", "path": path, "root_path": "/route", "headers": [], "query_string": b""}
        socket = asyncio.ensure_future(client._app(scope, received.get, sent.put))
        assert (await sent.get())["type"] == "websocket.accept"
        said = json.loads((await sent.get())["bytes"])
        assert (said["path"], said["size"]) == ("/invocations", len(PROMPT))
        received.put_nowait({"type": "websocket.disconnect"})
        await socket
        assert len(a.requests[0].keys) == 2

    deployed(scenario)


def test_ray_may_add_handlers_of_its_errors() -> None:
    Gateway(Options(), {}, prefixes=True).add_exception_handler(RuntimeError, print)
