from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
import yaml
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from djl_trtllm.cluster import ray_names
from djl_trtllm.cluster.application import (
    AutoscaledReplica,
    Replica,
    ReplicaApplication,
    open_application,
    require_direct,
)
from djl_trtllm.cluster.ray_names import DIRECT, NODES, SEPARATE_THREAD
from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError, InvalidRequestError, ModelError
from djl_trtllm.executor.protocol import Stats
from djl_trtllm.server.metrics import ModelFigures
from djl_trtllm.service.adapters import Adapters
from djl_trtllm.service.lifecycle import State
from tests.support.asgi import Connection, lifespan
from tests.support.in_process import Hosts
from tests.support.models import scripted_model
from tests.support.processes import PATIENCE
from tests.support.tables import by_table

ROOT = Path(__file__).parents[2]


def of_models(*models: Any) -> Replica:
    made = Replica()
    made.app = SimpleNamespace(  # type: ignore[assignment]
        registry=SimpleNamespace(models={model.name: model for model in models}), received=7
    )
    return made


def a_model(state: State, *, at_startup: bool = True) -> Any:
    return SimpleNamespace(name="m", at_startup=at_startup, state=state, failure=ModelError("no memory"))


def test_a_replica_is_unhealthy_only_when_a_model_of_its_start_has_failed() -> None:
    for state in set(State) - {State.FAILED}:
        of_models(a_model(state)).check_health()
    of_models(a_model(State.FAILED, at_startup=False)).check_health()
    with pytest.raises(ModelError, match="model m has failed: no memory"):
        of_models(a_model(State.READY, at_startup=False), a_model(State.FAILED)).check_health()


def test_figures_are_those_of_all_models_and_the_fullest_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelFigures, "of", lambda model: model)
    one = SimpleNamespace(name="one", waiting=1, running=2, max_running=64, stats=Stats(kv_usage=0.5))
    two = SimpleNamespace(name="two", waiting=10, running=20, max_running=None, stats=Stats())
    expected = {"waiting": 11, "running": 22, "places": 64, "kv_usage": 0.5}
    assert of_models(one, two).record_routing_stats() == {"requests": 33, "received": 7, "places": 64}
    autoscaled = AutoscaledReplica()
    autoscaled.app = of_models(one, two).app
    assert asyncio.run(autoscaled.record_autoscaling_stats()) == expected
    assert not hasattr(Replica, "record_autoscaling_stats")


@pytest.fixture
def lora(tmp_path: Path) -> Any:
    """A model with three folders of adapters."""
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    adapters = Adapters(tmp_path)
    for name in ("one", "two", "three"):
        adapters.unregister(name)
    return SimpleNamespace(name="lora", serves_adapters=True, adapters=adapters)


def reconfigure(replica: Replica, user_config: Mapping[str, Any]) -> None:
    asyncio.run(replica.reconfigure(user_config))


def test_adapters_are_those_of_the_last_user_config(lora: Any) -> None:
    made = of_models(lora)
    reconfigure(made, {"adapters": {"a": "one", "b": "two"}})
    kept, replaced = lora.adapters.find("a"), lora.adapters.find("b")
    reconfigure(made, {"adapters": {"a": "one", "b": "three", "c": "two"}})
    assert [adapter.name for adapter in lora.adapters] == ["a", "b", "c"]
    assert lora.adapters.find("a") is kept
    assert lora.adapters.find("b").id != replaced.id
    reconfigure(made, {})
    assert list(lora.adapters) == []


def test_a_replica_goes_on_while_it_registers_adapters(lora: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gone_on = threading.Event(), threading.Event()

    def register(name: str, source: str) -> None:
        begun.set()
        assert gone_on.wait(PATIENCE), "the event loop waits for it"

    monkeypatch.setattr(lora.adapters, "register", register)

    async def story() -> None:
        changed = asyncio.create_task(of_models(lora).reconfigure({"adapters": {"a": "one"}}))
        while not begun.is_set():  # noqa: ASYNC110  # it says so in another thread
            await asyncio.sleep(0)
        gone_on.set()
        await changed

    asyncio.run(story())


def test_what_is_wrong_with_a_user_config_is_reported(lora: Any) -> None:
    with pytest.raises(ConfigError, match=r"user_config: .*`adaptors`; expected adapters, as"):
        reconfigure(of_models(lora), {"adaptors": {}})
    with pytest.raises(InvalidRequestError, match="holds no adapter"):
        reconfigure(of_models(lora), {"adapters": {"a": "four"}})
    plain = SimpleNamespace(name="plain", serves_adapters=False)
    reconfigure(of_models(plain), {"adapters": {}})
    with pytest.raises(ConfigError, match=r"set option\.enable_lora=true"):
        reconfigure(of_models(plain), {"adapters": {"a": "one"}})


def behind_rays_middleware(app: ASGIApp) -> ASGIApp:
    """What `RequestIdMiddleware` of ray.serve._private.http_util does."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"X-Request-ID", b"ray"))
            await send(message)

        await app({**scope, "headers": [*scope["headers"], (b"x-request-id", b"ray")]}, receive, with_id)

    return called


def test_a_response_has_one_request_id() -> None:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(behind_rays_middleware(ReplicaApplication(Options(), [])))
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            return await client.get("/ping")

    assert asyncio.run(asked()).headers.get_list("x-request-id") == ["ray"]


@pytest.mark.parametrize("asked", [False, True])
def test_what_stands_behind_rays_proxy_warns_or_is_refused(
    asked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in DIRECT.items():
        monkeypatch.setenv(name, value)
    require_direct(asked=asked)
    assert not caplog.records
    for name in DIRECT:
        monkeypatch.delenv(name)
    if asked:
        with pytest.raises(ConfigError, match=r"Set RAY_SERVE_ENABLE_HA_PROXY=1 and .* on all nodes"):
            require_direct(asked=asked)
        return
    with caplog.at_level(logging.WARNING):
        require_direct(asked=asked)
    assert "Ray Serve's own proxy is between this replica and its clients" in caplog.text


async def test_the_application_of_a_replica_has_loaded_its_model_when_it_has_started(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("djl_trtllm.service.engine.settle_garbage_collector", lambda: None)
    hosts.load_seconds = 10
    app = open_application(str(scripted_model(tmp_path / "story")), {}, shared=False)
    async with lifespan(app):
        assert {name: model.state for name, model in app.registry.models.items()} == {"scripted": State.READY}


@by_table("requests", "refused")
def test_what_would_change_one_of_several_replicas_is_refused(requests: str, refused: bool, tiny_stories: Path) -> None:
    apps = {shared: open_application(str(tiny_stories), {}, shared=shared) for shared in (True, False)}

    async def told(method: str, path: str, *, shared: bool = True, root: str = "") -> bool:
        made = Connection(method, root + path)
        made.scope["root_path"] = root
        ended = await made.begin(apps[shared]).end()
        if b"one of several replicas" not in ended.body:
            return False
        return ended.status == 400 and "user_config of the deployment" in ended.json["message"]

    for method, path in (request.split() for request in requests.split(", ")):
        assert [asyncio.run(told(method, path, root=root)) for root in ("", "/route")] == [refused] * 2
        assert not asyncio.run(told(method, path, shared=False))


class Handle:
    """The handle of a router, which notes calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.moved = self

    async def remote(self, digest: str, replica: str) -> None:
        self.calls.append((digest, replica))
        raise RuntimeError("the router is being replaced")


def routed(headers: Mapping[str, str], router: Handle | None) -> httpx.Response:
    """Return the response of a replica named `b` to a request with these headers."""
    app = ReplicaApplication(Options(), [])
    app.name, app.router = "b", router

    async def asked() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as client:
            return await client.get("/ping", headers=dict(headers))

    answer = asyncio.run(asked())
    assert answer.headers["x-replica"] == "b" and app.received == 1
    return answer


def test_a_request_that_the_router_refuses_is_answered_with_the_reason() -> None:
    refused = routed({ray_names.REFUSED: "590", ray_names.CHOSEN: "b"}, Handle())
    assert refused.status_code == 400 and "ended 2 replicas" in refused.json()["message"] and "590" in refused.text
    assert routed({ray_names.REFUSED: "590"}, None).status_code != 400, "without a router, a client has written it"


def test_a_request_that_was_another_replicas_is_reported_before_it_is_served() -> None:
    router = Handle()
    own = {ray_names.CHOSEN: "b", ray_names.DIGEST: "d"}
    status = routed(own, router).status_code
    assert router.calls == []
    assert routed({**own, ray_names.CHOSEN: "a"}, router).status_code == status, "whatever the router does"
    assert router.calls == [("d", "b")]


def test_parts_of_a_body_go_to_uvicorn_past_the_wrappers_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    proxies = pytest.importorskip("ray.serve._private.direct_ingress_http_util", exc_type=ImportError)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        proxy = proxies.ASGIDIReceiveProxy(scope, receive, asyncio.get_running_loop())
        monkeypatch.delenv(SEPARATE_THREAD, raising=False)
        assert ray_names.write_part(proxy) is None, "uvicorn may be in another thread"
        monkeypatch.setenv(SEPARATE_THREAD, "0")
        assert ray_names.write_part(receive) is None
        write = ray_names.write_part(proxy)
        assert write is not None
        assert not write(b"before the head"), "whether it is chunked is not known"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert write(b"one ") and write(b"two ")
        await send({"type": "http.response.body", "body": b"three"})
        assert not write(b"after the end")

    async def asked() -> httpx.Response:
        server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None))
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  # nothing says when it is
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(trust_env=False) as client:
            response = await client.get(f"http://127.0.0.1:{port}/")
        server.should_exit = True
        await serving
        return response

    response = asyncio.run(asked())
    assert (response.status_code, response.text) == (200, "one two three")


def test_the_document_has_the_environment_of_the_nodes() -> None:
    exports = re.findall(r'^export (\w+)="?(.*?)"? *(?:#.*)?$', (ROOT / "docs" / "ray.md").read_text(), re.MULTILINE)
    assert dict(exports) == NODES


def test_the_rayservice_has_the_environment_of_the_nodes() -> None:
    cluster = yaml.safe_load((ROOT / "serving/kubernetes/ray/ray-service.yaml").read_text())["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        given = {variable["name"]: variable["value"] for variable in container["env"]}
        assert given.items() >= NODES.items()
