"""What a router says to HAProxy and to the other routers; Ray's part is played."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from djl_trtllm.cluster.ray_names import CHOSEN, REFUSED
from tests.support.processes import PATIENCE

pytest.importorskip("ray", reason="Ray is not installed: it is in the extra `ray`", exc_type=ImportError)

from djl_trtllm.cluster import router as router_module
from djl_trtllm.cluster.router import Router
from djl_trtllm.routing.fleet import Fleet, Load, Question

PROMPT = "once upon a time " * 20


class Head:
    """Ray's controller and head: with them a handle is made, which takes until they answer."""

    def __init__(self) -> None:
        self.handles = 0
        self.told: list[tuple[str, Any]] = []
        self.gone = False
        self.refused_for = 0.0

    def get_replica_context(self) -> Any:
        return SimpleNamespace(deployment="d", app_name="a", replica_id=SimpleNamespace(unique_id="this router"))

    def get_deployment_handle(self, name: str, app: str) -> Any:
        self.handles += 1
        return SimpleNamespace(broadcast=self._broadcast)

    def _broadcast(self, method: str, *arguments: Any) -> Any:
        async def results_async(**options: Any) -> list[Any]:
            if self.gone:
                raise RuntimeError("no controller")
            self.told.append((method, arguments))
            return [None, ValueError("a router that has died")]

        return SimpleNamespace(results_async=results_async)

    @asynccontextmanager
    async def choose_replica(self, question: Question, fleet: Fleet, **_: Any) -> Any:
        fleet.route(question, {"one": Load(), "two": Load()})
        question.refused_for = self.refused_for
        yield


@pytest.mark.parametrize("gone", [False, True])
def test_routing_and_news_need_neither_the_controller_nor_the_head(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head()
    monkeypatch.setattr(router_module, "serve", head)

    async def told(count: int) -> None:
        while len(head.told) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def story() -> None:
        app = await Router(head).__serve_build_asgi_app__()
        head.gone = gone
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            for number in range(3):
                given = {"prompt": f"{number} {PROMPT}"}
                answer = (await client.post("/internal/route", json=given)).json()
                assert answer["replica_id"] == answer["request_headers"][CHOSEN] != ""
                await asyncio.wait_for(told(0 if gone else number + 1), PATIENCE)  # or news would come together

    asyncio.run(story())
    assert head.handles == 1
    assert {method for method, _ in head.told} == (set() if gone else {"heard"})


def test_haproxy_is_told_for_how_long_a_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head()
    monkeypatch.setattr(router_module, "serve", head)

    async def said(seconds: float) -> dict[str, str]:
        head.refused_for = seconds
        app = await Router(head).__serve_build_asgi_app__()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            headers: dict[str, str] = (await client.post("/internal/route", json={})).json()["request_headers"]
            return headers

    assert asyncio.run(said(7.4))[REFUSED] == "7"
    assert REFUSED not in asyncio.run(said(0.0))
