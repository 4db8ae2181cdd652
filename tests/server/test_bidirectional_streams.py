"""SageMaker's bidirectional streaming: each message of a WebSocket is a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from djl_trtllm.config import Options
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from djl_trtllm.server.access import Access, ApiKey, Role
from djl_trtllm.server.context import BodyMemory, ServerContext
from djl_trtllm.server.exchange import CONNECTION
from djl_trtllm.server.websocket import PATH, BidirectionalStreams
from djl_trtllm.telemetry import ServedRequest, Telemetry
from tests.server.application import Application, body, started
from tests.support.in_process import Hosts
from tests.support.steps import Delta
from tests.support.virtual_time import at_end, until


class Socket:
    """A WebSocket of a client, and what it receives."""

    def __init__(
        self,
        app: ASGIApp,
        path: str = PATH,
        query: bytes = b"",
        *,
        replies: bool = False,
        headers: Sequence[tuple[bytes, bytes]] = (),
        port: int = 8080,
        client: str = "127.0.0.1",
        root: str = "",
    ) -> None:
        """`replies`: the server may refuse the handshake with a response of its own."""
        self.sent: list[Message] = []
        self._received: asyncio.Queue[Message] = asyncio.Queue()
        self._received.put_nowait({"type": "websocket.connect"})
        self.gone = False
        scope = {
            "type": "websocket",
            "scheme": "ws",
            "path": root + path,
            "root_path": root,
            "query_string": query,
            "headers": [(b"content-length", b"0"), (b"x-team", b"blue"), *headers],
            "server": ("127.0.0.1", port),
            "client": (client, 5000),
            "extensions": {"websocket.http.response": {}} if replies else {},
        }
        self.task = asyncio.ensure_future(app(scope, self._received.get, self._send))
        at_end(self._end)

    async def _end(self) -> None:
        self.leave()
        await self.task

    async def _send(self, message: Message) -> None:
        if self.gone:
            raise OSError("the client is gone")
        self.sent.append(message)

    def message(self, content: bytes | str) -> None:
        kind = "text" if isinstance(content, str) else "bytes"
        self._received.put_nowait({"type": "websocket.receive", kind: content})

    def leave(self) -> None:
        self._received.put_nowait({"type": "websocket.disconnect", "code": 1000})

    @property
    def answers(self) -> list[bytes | str]:
        return [each.get("text") or each["bytes"] for each in self.sent if each["type"] == "websocket.send"]

    @property
    def closed(self) -> int:
        """The code of its close; 0 while it is open."""
        return next((each["code"] for each in self.sent if each["type"] == "websocket.close"), 0)


async def served(
    tokenizer: Tokenizer, limit: int = 5000, memory: BodyMemory | None = None, idle: float = 3600, **options: Any
) -> tuple[Application, ASGIApp]:
    inner = await started(tokenizer, **options)
    context = ServerContext(Options(max_request_size=limit, websocket_idle_timeout=idle))
    context.bodies = memory or context.bodies
    return inner, BidirectionalStreams(inner.app, context)


@pytest.mark.parametrize("text", [True, False])
async def test_a_message_is_a_request_and_its_response_is_of_the_same_kind(
    hosts: Hosts, tokenizer: Tokenizer, text: bool
) -> None:
    hosts.alone = True
    _, app = await served(tokenizer)
    socket = Socket(app)
    socket.message(body(2).decode() if text else body(2))
    await until(lambda: len(socket.answers) == 1)
    (answer,) = socket.answers
    assert isinstance(answer, str if text else bytes)
    assert orjson.loads(answer).keys() == {"generated_text"}
    assert socket.sent[0] == {"type": "websocket.accept"}
    socket.leave()
    await socket.task
    assert socket.closed == 0


async def test_every_part_of_a_stream_is_a_message(hosts: Hosts, tokenizer: Tokenizer) -> None:
    _, app = await served(tokenizer)
    socket = Socket(app)
    socket.message(body(3, stream=True))
    await until(lambda: bool(hosts.last.submitted))
    for count in (1, 2, 3):
        hosts.last.step()
        await until(lambda count=count: len(socket.answers) == count)  # type: ignore[misc]
    assert b"generated_text" in bytes(socket.answers[-1])  # type: ignore[arg-type]


async def test_messages_are_answered_in_their_order(hosts: Hosts, tokenizer: Tokenizer) -> None:
    _, app = await served(tokenizer)
    socket = Socket(app)
    socket.message(body(1))
    socket.message(body(2))
    await until(lambda: bool(hosts.last.submitted))
    assert len(hosts.last.submitted) == 1
    hosts.last.step()
    await until(lambda: len(hosts.last.submitted) == 2)
    assert len(socket.answers) == 1


async def test_an_error_is_a_message_and_the_socket_stays_open(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    inner, app = await served(tokenizer)
    socket = Socket(app)
    for content in (b"{", b"", b'{"inputs": 1}', b"x" * 1001):
        socket.message(content)
    await until(lambda: len(socket.answers) == 4)
    assert [orjson.loads(answer)["code"] for answer in socket.answers] == [424, 424, 424, 413]
    inner.registry.models["story"].refuse_new()
    socket.message(body(2))
    await until(lambda: len(socket.answers) == 5)
    assert orjson.loads(socket.answers[-1])["code"] == 529


async def test_the_query_of_the_handshake_names_the_model(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    inner, app = await served(tokenizer)
    await inner.load(tokenizer, "fable")
    for query, count in ((b"model_name=fable", 1), (b"", 1)):
        socket = Socket(app, query=query)
        socket.message(body(2))
        await until(lambda: bool(socket.answers))  # noqa: B023
        assert len(hosts.made[1].submitted) == count
        socket.leave()
        await socket.task
    assert b"model_name is required" in bytes(socket.answers[0])  # type: ignore[arg-type]


async def test_a_client_that_leaves_ends_what_it_asked_for(hosts: Hosts, tokenizer: Tokenizer) -> None:
    _, app = await served(tokenizer)
    socket = Socket(app)
    socket.message(body(4, stream=True))
    await until(lambda: bool(hosts.last.submitted))
    socket.leave()
    await socket.task
    assert len(hosts.last.cancelled) == 1


async def test_a_request_whose_connection_is_reset_has_no_client_any_more() -> None:
    received: list[Message] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        scope[CONNECTION].reset()
        received.extend([await receive(), await receive()])

    Socket(BidirectionalStreams(inner, ServerContext(Options()))).message(b"{}")
    await until(lambda: len(received) == 2)
    assert received == [{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "http.disconnect"}]


async def test_a_client_that_cannot_be_written_to_is_given_up(
    hosts: Hosts, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    _, app = await served(tokenizer)
    socket = Socket(app)
    socket.message(body(4, stream=True))
    await until(lambda: bool(hosts.last.submitted))
    socket.gone = True
    hosts.last.step()
    await asyncio.wait({socket.task})
    assert len(hosts.last.cancelled) == 1
    refused = Socket(app)
    await until(lambda: bool(refused.sent))
    refused.gone = True
    refused.message(b"{")
    await asyncio.wait({refused.task})
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "a client that leaves is no defect"


async def test_messages_count_as_bodies_while_they_wait(hosts: Hosts, tokenizer: Tokenizer) -> None:
    memory = BodyMemory(3000)
    _, app = await served(tokenizer, memory=memory)
    socket = Socket(app)
    socket.message(body(4, stream=True))
    await until(lambda: bool(hosts.last.submitted))
    assert memory.used == 0
    socket.message(b"x" * 1400)
    await until(lambda: memory.used == 1400)
    socket.message(b"x" * 200)
    await socket.task
    assert socket.closed == 1013
    assert memory.used == 0


@pytest.mark.parametrize("messages", [[b"{}"] * 18, [b"x" * 2001] * 4])
async def test_a_client_that_sends_more_than_may_wait_is_closed(
    hosts: Hosts, tokenizer: Tokenizer, messages: list[bytes]
) -> None:
    _, app = await served(tokenizer, limit=5000)
    socket = Socket(app)
    socket.message(body(4, stream=True))
    await until(lambda: bool(hosts.last.submitted))
    for message in messages:
        socket.message(message)
    await socket.task
    assert socket.closed == 1008
    assert len(hosts.last.cancelled) == 1


async def test_a_response_that_cannot_be_finished_closes_the_socket(hosts: Hosts, tokenizer: Tokenizer) -> None:
    _, app = await served(tokenizer)
    socket = Socket(app)
    socket.message(body(4, stream=True, output_formatter="none"))
    await until(lambda: bool(hosts.last.submitted))
    for _ in range(3):
        hosts.last.step()
    request_id = hosts.last.submitted[0].request_id
    hosts.last.send(Delta(request_id, [], None, FinishReason.ERROR, error="broken"))
    await socket.task
    assert socket.closed == 1011


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("secret"), "answering a message of a WebSocket failed"),
        (asyncio.CancelledError("secret"), "a WebSocket is closed with 1011"),
    ],
)
async def test_a_defect_closes_the_socket_and_is_in_the_log(
    caplog: pytest.LogCaptureFixture, error: BaseException, line: str
) -> None:
    caplog.set_level("INFO")

    async def defect(*_: object) -> None:
        raise error

    socket = Socket(BidirectionalStreams(defect, ServerContext(Options())))
    socket.message(b"{}")
    await socket.task
    assert socket.closed == 1011
    assert line in caplog.text
    assert "secret" not in str(socket.sent)


async def test_other_paths_and_too_many_sockets_are_refused(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("djl_trtllm.server.websocket._MOST_SOCKETS", 1)
    _, app = await served(tokenizer)
    other = Socket(app, path="/invocations", replies=True)
    await other.task
    assert (other.sent[0]["type"], other.sent[0]["status"]) == ("websocket.http.response.start", 404)
    assert orjson.loads(other.sent[1]["body"])["message"] == "there is no WebSocket at /invocations"
    plain = Socket(app, path="/invocations")
    await plain.task
    assert [message["type"] for message in plain.sent] == ["websocket.close"]
    first = Socket(app, root="/app")
    await until(lambda: bool(first.sent))
    assert first.sent == [{"type": "websocket.accept"}]
    second = Socket(app, replies=True)
    await second.task
    assert second.sent[0]["status"] == 503
    first.leave()
    await first.task
    third = Socket(app)
    await until(lambda: bool(third.sent))
    assert third.sent == [{"type": "websocket.accept"}]


async def test_a_client_leaves_sockets_for_others(hosts: Hosts, tokenizer: Tokenizer) -> None:
    _, app = await served(tokenizer)
    flood = [Socket(app, replies=True) for _ in range(600)]
    await until(lambda: all(socket.sent for socket in flood))
    opened = [socket for socket in flood if socket.sent[0]["type"] == "websocket.accept"]
    assert len(opened) == 256
    other = Socket(app, client="10.0.0.7")
    await until(lambda: bool(other.sent))
    assert other.sent == [{"type": "websocket.accept"}]


async def test_a_socket_that_is_idle_for_too_long_is_closed(hosts: Hosts, tokenizer: Tokenizer) -> None:
    _, app = await served(tokenizer, idle=50)
    busy, idle = Socket(app), Socket(app)
    busy.message(body(4, stream=True))
    await asyncio.sleep(49)
    idle.message(b"{}")
    await asyncio.sleep(49)
    assert (busy.closed, idle.closed) == (0, 0)
    await idle.task
    assert idle.closed == 1001
    hosts.last.step(4)
    await asyncio.sleep(49)
    assert busy.closed == 0
    await busy.task
    assert busy.closed == 1001


async def test_http_passes_through(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.alone = True
    inner, app = await served(tokenizer)
    inner.client._app = app
    assert (await inner.client.post("/invocations", body(2))).status == 200


@pytest.mark.parametrize(
    ("headers", "port", "status"),
    [
        ([], 8080, 401),
        ([(b"authorization", b"Bearer another")], 8080, 401),
        ([(b"x-api-key", b"scrape-please")], 8080, 403),
        ([(b"x-api-key", b"generate-please")], 8081, 404),
    ],
)
async def test_a_handshake_needs_the_key_and_the_port_of_a_request(
    headers: list[tuple[bytes, bytes]], port: int, status: int
) -> None:
    keys = (
        ApiKey.of("app", "generate-please", frozenset({Role.INFER})),
        ApiKey.of("prometheus", "scrape-please", frozenset({Role.METRICS})),
    )

    async def application(*_: object) -> None:
        raise AssertionError("no message is answered")

    app = BidirectionalStreams(application, ServerContext(Options(), access=Access(keys, management_port=8081)))
    refused = Socket(app, query=b"x-api-key=generate-please", replies=True, headers=headers, port=port)
    refused.message(b"{}")
    await refused.task
    assert [message["type"] for message in refused.sent] == [
        "websocket.http.response.start",
        "websocket.http.response.body",
    ]
    assert refused.sent[0]["status"] == orjson.loads(refused.sent[1]["body"])["code"] == status
    assert ((b"www-authenticate", b"Bearer") in refused.sent[0]["headers"]) == (status == 401)
    accepted = Socket(app, headers=[(b"x-api-key", b"generate-please")])
    await until(lambda: bool(accepted.sent))
    assert accepted.sent == [{"type": "websocket.accept"}]


async def test_a_refused_handshake_is_told_with_its_id() -> None:
    async def application(*_: object) -> None:
        raise AssertionError("no message is answered")

    told: list[ServedRequest] = []

    class Told(Telemetry):
        def ended(self, request: ServedRequest) -> None:
            told.append(request)

    app = BidirectionalStreams(application, ServerContext(Options(request_id_header_key="x-trace"), telemetry=Told()))
    await Socket(app, path="/elsewhere", headers=[(b"x-trace", b"r-1")]).task
    assert [(each.id, each.path, each.status) for each in told] == [("r-1", "/elsewhere", 404)]
