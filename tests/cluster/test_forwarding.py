from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from djl_trtllm.cluster.forwarding import ForwardedRequest, Head, IncompleteResponseError, answer

HEADERS = [(b"content-type", b"text/plain")]


def request(body: bytes = b"") -> ForwardedRequest:
    return ForwardedRequest.of({"type": "http", "path": "/p", "extensions": {"x": print}, "app": print}, body)


async def all_of(app: ASGIApp, body: bytes = b"") -> list[Any]:
    return [part async for part in answer(app, request(body))]


def start(status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": HEADERS}


def part(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def test_a_request_is_what_can_be_sent_of_it() -> None:
    names = ["type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"]
    names += ["headers", "client", "server"]
    scope = {name: f"of {name}" for name in names}
    made = ForwardedRequest.of({**scope, "state": {}, "extensions": {}}, b"b", "s", (b"k",))
    assert made.scope == scope
    assert ForwardedRequest.of({"type": "http", "app": print}, b"").scope == {"type": "http"}
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_whole_response_is_one_part() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        await send(start(418))
        await send(part(message["body"] + scope["path"].encode(), more=False))

    assert asyncio.run(all_of(app, b"body of ")) == [Head(418, HEADERS, b"body of /p", True)]


def test_a_stream_comes_in_parts_and_what_came_meanwhile_in_one() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        await send(part(b"1", more=True))
        await asyncio.sleep(0)
        for body in (b"2", b"3"):
            await send(part(body, more=True))
        await send(part(b"", more=False))

    head, *others = asyncio.run(all_of(app))
    assert head == Head(200, HEADERS, b"1", False)
    assert b"".join(others) == b"23"


def test_headers_are_found_by_their_names_in_lower_case() -> None:
    head = Head(200, [*HEADERS, (b"X-Any", b"1")], b"", True)
    assert (head.header(b"content-type"), head.header(b"x-any"), head.header(b"other")) == ("text/plain", "1", "")


def test_what_is_sent_while_the_part_before_is_on_its_way_is_not_lost() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        await send(part(b"1", more=True))
        await asyncio.sleep(0)
        await send(part(b"2", more=False))

    async def scenario() -> bytes:
        parts = answer(app, request())
        head = await anext(parts)
        assert isinstance(head, Head)
        assert not head.whole
        for _ in range(10):
            await asyncio.sleep(0)
        return head.body + b"".join([each async for each in parts if isinstance(each, bytes)])

    assert asyncio.run(scenario()) == b"12"


@pytest.mark.parametrize("more", [True, None])
def test_a_response_without_an_end_is_an_error(more: bool | None) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        if more:
            await send(part(b"1", more=True))

    with pytest.raises(IncompleteResponseError):
        asyncio.run(all_of(app))


def test_an_error_of_the_application_is_raised() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("defect")

    with pytest.raises(KeyError, match="defect"):
        asyncio.run(all_of(app))


def test_an_application_waits_while_nobody_takes_what_it_sends() -> None:
    sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send(start())
        for _ in range(100):
            await send(part(b"x" * 10_000, more=True))
            sent += 1
        await send(part(b"", more=False))

    async def scenario() -> int:
        parts = answer(app, request())
        await anext(parts)
        await anext(parts)
        for _ in range(50):
            await asyncio.sleep(0)
        held = sent
        async for _ in parts:
            pass
        return held

    assert asyncio.run(scenario()) < 30
    assert sent == 100


def test_closing_is_the_disconnection_of_the_client() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((await receive())["type"])
        await send(start())
        await send(part(b"1", more=True))
        seen.append((await receive())["type"])

    async def scenario() -> None:
        parts = answer(app, request())
        await anext(parts)
        await parts.aclose()
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert seen == ["http.request", "http.disconnect"]


def test_an_application_that_does_not_end_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djl_trtllm.cluster.forwarding._END_SECONDS", 0.0)
    cancelled = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(start())
            await send(part(b"1", more=True))
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def scenario() -> None:
        parts = answer(app, request())
        await anext(parts)
        await parts.aclose()
        await asyncio.wait_for(cancelled.wait(), 60)

    asyncio.run(scenario())
