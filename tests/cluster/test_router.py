"""What a router says to HAProxy and to the other routers; Ray's part is played."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from djl_trtllm.cluster.ray_names import CHOSEN, DIGEST, REFUSED
from djl_trtllm.routing.fleet import Fleet, Question, Sent
from tests.support.virtual_time import in_real_time, until

pytest.importorskip("ray", reason="Ray is not installed: it is in the extra `ray`", exc_type=ImportError)

from djl_trtllm.cluster import router as router_module
from djl_trtllm.cluster.router import PrefixRouter, Router

PROMPT = "once upon a time " * 20


def replica(name: str, requests: int = 0, port: int | None = None) -> Any:
    """A replica as Ray shows it to a router."""
    return SimpleNamespace(
        replica_id=SimpleNamespace(to_full_id_str=lambda: name),
        routing_stats={"requests": requests, "received": requests, "places": 8},
        backend_http_endpoint=None if port is None else ("127.0.0.1", port),
    )


class Head:
    """Ray's controller and head: with them a handle is made, which takes until they answer."""

    def __init__(self, *replicas: Any) -> None:
        self.replicas = list(replicas) or [replica("one"), replica("two")]
        self.handles = 0
        self.told: list[tuple[str, Any]] = []
        self.gone = False

    def get_replica_context(self) -> Any:
        return SimpleNamespace(deployment="d", app_name="a", replica_id=SimpleNamespace(unique_id="this router"))

    def get_deployment_handle(self, name: str, app: str) -> Any:
        assert (name, app) == ("d", "a")
        self.handles += 1
        return SimpleNamespace(broadcast=self._broadcast)

    def _broadcast(self, method: str, *arguments: Any) -> Any:
        async def results_async(**options: Any) -> list[Any]:
            if self.gone:
                raise RuntimeError("no controller")
            self.told.append((method, arguments))
            return [None, ValueError("a router that has died")]

        return SimpleNamespace(results_async=results_async)

    async def choose(self, *question: Any) -> list[str]:
        """The replicas of which Ray takes one."""
        pending = SimpleNamespace(args=question)
        (chosen,) = await PrefixRouter.choose_replicas(cast(PrefixRouter, self), self.replicas, pending)
        return [each.replica_id.to_full_id_str() for each in chosen]

    @asynccontextmanager
    async def choose_replica(self, question: Question, fleet: Fleet, **_: Any) -> Any:
        assert await self.choose(question, fleet) == [question.replica]
        yield


async def said(router: Router, given: object = None, **headers: str) -> dict[str, str]:
    """The headers that HAProxy adds to a request with this body."""
    app = await router.__serve_build_asgi_app__()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        answer = (await client.post("/internal/route", json=given or {}, headers=headers)).json()
        assert answer["replica_id"] == answer["request_headers"][CHOSEN]
        found: dict[str, str] = answer["request_headers"]
        return found


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Head:
    made = Head()
    monkeypatch.setattr(router_module, "serve", made)
    return made


@pytest.mark.parametrize("gone", [False, True])
async def test_routing_and_news_need_neither_the_controller_nor_the_head(gone: bool, head: Head) -> None:
    router = Router(head)
    app = await router.__serve_build_asgi_app__()
    head.gone = gone
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        for number in range(3):
            given = {"prompt": f"{number} {PROMPT}"}
            answer = (await client.post("/internal/route", json=given)).json()
            assert answer["replica_id"] in ("one", "two")
            await asyncio.sleep(1)  # or news would come together
            assert len(head.told) == (0 if gone else number + 1)
    assert head.handles == 1


async def test_what_was_sent_soon_after_each_other_is_told_together_to_all_routers(head: Head) -> None:
    router, began = Router(head), asyncio.get_running_loop().time()
    chosen = [(await said(router, {"prompt": f"{number} {PROMPT}"}))[CHOSEN] for number in range(3)]
    await until(lambda: bool(head.told))
    assert asyncio.get_running_loop().time() - began == pytest.approx(0.05, abs=0.02)
    ((method, (name, news)),) = head.told
    assert (method, name, [sent.replica for sent in news]) == ("heard", "this router", chosen)
    await said(router)
    await asyncio.sleep(0.08)
    assert len(head.told) == 1, "there are two routers, and twice the time"
    await asyncio.sleep(0.04)
    assert [len(told) for _, (_, told) in head.told] == [3, 1]


async def test_another_routers_news_count_and_its_own_were_counted_before(head: Head) -> None:
    router = Router(head)
    sent = {name: [Sent(b"", b"", b"", name)] * 2 for name in ("one", "two")}
    await router.__serve_build_asgi_app__()
    await router.heard("this router", sent["one"])
    assert (await said(router))[CHOSEN] == "one"
    await router.heard("another router", sent["one"])
    assert [(await said(router))[CHOSEN] for _ in range(3)] == ["two"] * 3
    await asyncio.sleep(1)


async def test_a_request_that_ended_two_replicas_is_refused_for_ten_minutes(head: Head) -> None:
    router = Router(head)
    digest = (await said(router))[DIGEST]
    for name in ("one", "two"):
        assert REFUSED not in await said(router)
        await router.accused(["another", digest], name)
    assert (await said(router))[REFUSED] == "600"
    assert REFUSED not in await said(router, **{"x-body-truncated": "8/10"}), "it may go on otherwise"
    await asyncio.sleep(1)


async def test_a_session_keeps_its_replica(head: Head) -> None:
    router = Router(head)
    chosen = {name: (await said(router, **{"x-session-id": name}))[CHOSEN] for name in "abcdef"}
    assert set(chosen.values()) == {"one", "two"}
    assert {name: (await said(router, **{"x-session-id": name}))[CHOSEN] for name in "fedcba"} == chosen
    await asyncio.sleep(1)


@in_real_time
async def test_all_routers_are_told_what_a_replica_was_sent_before_it_died() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    asked: list[bytes] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    head = Head(replica("one", 1), replica("two", 0, server.sockets[0].getsockname()[1]))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(router_module, "serve", head)
        router = Router(head)
        digests = [(await said(router, {"prompt": "a"}))[DIGEST]]
        await router.moved("moved", "two")
        await until(lambda: bool(asked))
        server.close()
        await until(lambda: any(method == "accused" for method, _ in head.told))
    ((accused, name),) = [arguments for method, arguments in head.told if method == "accused"]
    assert (sorted(accused), name) == (sorted([*digests, "moved"]), "two")


async def test_calls_that_are_no_question_of_a_router_have_all_replicas(head: Head) -> None:
    fleet, question = Fleet(), Question.of(b"{}")
    for other in ((), (question,), (question, "no fleet"), ("no question", fleet), (question, fleet, "more")):
        assert await head.choose(*other) == ["one", "two"]
    question.replica = "gone"
    assert await head.choose(question, fleet) == ["one"]
    head.replicas = []
    assert await head.choose(Question.of(b"{}"), fleet) == []
