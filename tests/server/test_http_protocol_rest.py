"""Responses that go on after their application has returned, and clients that leave meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from djl_trtllm.server.connections import Refusal
from djl_trtllm.server.exchange import CONNECTION, REST
from tests.server.connected import Wire, connected


@pytest.mark.parametrize("complete", [True, False])
def test_a_response_may_end_after_its_application_has_returned(complete: bool) -> None:
    async def body() -> None:
        wire = Wire(None)
        rest: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sends: list[Send] = []

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            sends.append(send)
            scope[REST] = rest

        protocol = connected(wire, application)
        await asyncio.sleep(0.001)
        assert not protocol.tasks and not wire.written.endswith(b"0\r\n\r\n")
        assert protocol.scope["headers"] == []  # nor is anything else kept that only the application needs
        if complete:
            await sends[0]({"type": "http.response.body", "body": b""})
        rest.set_result(None)
        await asyncio.sleep(0.001)
        assert not protocol.tasks
        assert (wire.written.endswith(b"0\r\n\r\n"), wire.closed) == (complete, not complete)

    asyncio.run(body())


@pytest.mark.parametrize("refused", [False, True])
def test_the_loss_of_its_client_is_told_to_a_request_once(refused: bool) -> None:
    async def body() -> None:
        wire = Wire(None)
        told: list[str] = []
        scopes: list[Scope] = []

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            scopes.append(scope)
            scope[CONNECTION].when_lost(lambda: told.append("lost"))
            await receive()
            await receive()

        protocol = connected(wire, application)
        await asyncio.sleep(0.001)
        assert told == []
        if refused:
            protocol._refuse(Refusal(400, "this is not HTTP"))
            assert told == ["lost"]
        protocol.connection_lost(None)
        assert told == ["lost"]
        scopes[0][CONNECTION].when_lost(lambda: told.append("late"))
        assert told == ["lost", "late"]
        await asyncio.sleep(0.001)

    asyncio.run(body())


def test_a_request_whose_response_has_ended_is_not_told_that_its_client_leaves() -> None:
    async def body() -> None:
        wire = Wire(None)
        told: list[str] = []

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            scope[CONNECTION].when_lost(lambda: told.append("lost"))
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        protocol = connected(wire, application)
        await asyncio.sleep(0.001)
        protocol.connection_lost(None)
        assert told == []

    asyncio.run(body())


def test_the_loss_of_a_client_that_has_sent_more_requests_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        wire = Wire(None)
        rest: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            scope[CONNECTION].when_lost(lambda: rest.set_result(None))
            scope[REST] = rest

        head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        protocol = connected(wire, application, head * 2)
        await asyncio.sleep(0.001)
        wire.closed = True
        protocol.connection_lost(None)
        await asyncio.sleep(0.001)
        assert rest.done() and not protocol.tasks and not caplog.records

    asyncio.run(body())
