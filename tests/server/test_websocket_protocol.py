"""Limits of one WebSocket on a played transport and clock, and SageMaker's bidirectional streaming."""

from __future__ import annotations

import asyncio
import gc
import struct
import weakref
from collections.abc import Sequence
from math import inf
from typing import Any

import orjson
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from djl_trtllm.config import Options
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from djl_trtllm.server.access import Access, ApiKey, Role
from djl_trtllm.server.context import BodyMemory, ServerContext
from djl_trtllm.server.websocket import PATH, BidirectionalStreams, WebSocketProtocol
from djl_trtllm.telemetry import ServedRequest, Telemetry
from tests.server.application import GET, Application, body, started
from tests.server.application import Peer as HttpPeer
from tests.support.client import BINARY, CONTINUATION, HANDSHAKE, PING_FRAME, TEXT, frame
from tests.support.in_process import Hosts
from tests.support.steps import Delta
from tests.support.virtual_time import at_end, until

PONGED = b"\x8a\x00"


class Peer:
    """A WebSocket to an application that keeps what it receives, until the test lets it `leave`."""

    def __init__(self, head: bytes = b"", **options: Any) -> None:
        self.received: list[bytes | str] = []
        self._done = asyncio.Event()
        self.http = HttpPeer(self._answer, **{"max_header_size": 65536, "max_header_count": 100, **options})
        self.connections = self.http.connections
        self.wire = self.http.wire
        self.http.sends(HANDSHAKE + head + b"\r\n")
        assert isinstance(self.wire.protocol, WebSocketProtocol)
        self.protocol = self.wire.protocol
        at_end(self.leave)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        ended = asyncio.ensure_future(self._done.wait())
        while not ended.done():
            receiving = asyncio.ensure_future(receive())
            await asyncio.wait({receiving, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                receiving.cancel()
            elif receiving.result()["type"] == "websocket.receive":
                message = receiving.result()
                self.received.append(message.get("text") or message["bytes"])
            else:
                break
        ended.cancel()

    async def open(self) -> Peer:
        await until(lambda: b"\r\n\r\n" in self.wire.written)
        assert self.wire.written.startswith(b"HTTP/1.1 101 ")
        self.wire.written = b""
        return self

    def sends(self, *data: bytes) -> None:
        for each in data:
            self.protocol.data_received(each)

    async def end_application(self) -> None:
        self._done.set()
        await until(lambda: "close" in self.wire.done)

    @property
    def closed(self) -> tuple[int, str]:
        """The code and the reason of its close."""
        data = self.wire.written[self.wire.written.rindex(b"\x88") + 2 :]
        return struct.unpack("!H", data[:2])[0], data[2:].decode()

    async def leave(self) -> None:
        if self.http.left:
            return
        self.http.left = True
        self.protocol.connection_lost(None)
        await until(lambda: not self.http.state.tasks)
        self.http.watch.cancel()
        await asyncio.gather(self.http.watch, return_exceptions=True)
        assert not self.connections.busy and not self.connections.idle
        assert self.connections.context.bodies.used == 0


async def test_of_many_small_frames_some_are_read_at_a_time_and_no_more_is_received_meanwhile() -> None:
    peer = await Peer().open()
    assert peer.connections.busy == {peer.protocol}
    peer.sends(frame(PING_FRAME) * 2000)
    peer.sends(frame(PING_FRAME) * 2000)
    for turn in (1, 2, 3):
        assert len(peer.wire.written) == len(PONGED) * 170 * turn + len(PONGED) * (turn * 4 // 6)
        assert "pause" in peer.wire.done
        await asyncio.sleep(0)
    await until(lambda: len(peer.wire.written) == len(PONGED) * 4000)
    assert "pause" not in peer.wire.done
    assert peer.connections.context.bodies.used == 0
    peer.sends(frame(PING_FRAME))
    assert len(peer.wire.written) == len(PONGED) * 4001


async def test_a_message_that_the_application_has_not_taken_yet_stops_reading() -> None:
    peer = await Peer().open()
    peer.sends(frame(BINARY, b"a wolf"))
    assert "pause" in peer.wire.done
    await until(lambda: peer.received == [b"a wolf"])
    assert "pause" not in peer.wire.done


@pytest.mark.parametrize("kind", [TEXT, BINARY])
async def test_the_parts_of_a_message_are_joined_as_they_come(kind: int) -> None:
    peer = await Peer().open()
    story = b"the wolf " * 500
    peer.sends(frame(kind, story[:1], end=False))
    for byte in story[1:-1]:
        peer.sends(frame(CONTINUATION, bytes([byte]), end=False))
    assert [len(part) for part in peer.protocol.frames] == [1, len(story) - 2]
    assert peer.connections.context.bodies.used == len(story) - 1
    peer.sends(frame(CONTINUATION, story[-1:]) + frame(kind, b"fox"))
    await until(lambda: len(peer.received) == 2)
    assert peer.received == ([story.decode(), "fox"] if kind == TEXT else [story, b"fox"])
    assert peer.connections.context.bodies.used == 0


async def test_what_is_incomplete_counts_as_memory_of_bodies() -> None:
    peer = await Peer(max_body_memory=20_000).open()
    message = frame(BINARY, b"x" * 12_000)
    peer.sends(message[:6000])
    assert peer.connections.context.bodies.used == 6000 - 8  # without its head
    peer.sends(message[6000:10_000])
    peer.sends(message[10_000:])
    assert peer.closed == (1013, "max_body_memory=20000 bytes leave too little for this")
    assert peer.wire.done >= {"close"}
    peer.sends(frame(PING_FRAME))
    assert peer.received == []


async def test_nothing_is_read_of_a_client_that_does_not_read() -> None:
    peer = await Peer().open()
    peer.protocol.pause_writing()
    peer.sends(frame(PING_FRAME))
    assert peer.wire.written == b""
    assert "pause" in peer.wire.done
    await asyncio.sleep(10)
    peer.protocol.resume_writing()
    assert peer.wire.written == PONGED
    assert "pause" not in peer.wire.done


@pytest.mark.parametrize("paused", [20, 40])
async def test_a_client_has_to_read(paused: int) -> None:
    peer = await Peer().open()
    peer.protocol.ping_interval = None
    peer.protocol.stop_keepalive()
    peer.protocol.pause_writing()
    await asyncio.sleep(paused)
    assert ("abort" in peer.wire.done) == (paused == 40)
    peer.protocol.resume_writing()
    await asyncio.sleep(100)
    assert ("abort" in peer.wire.done) == (paused == 40)


async def test_what_a_client_does_not_read_of_the_end_is_dropped() -> None:
    peer = await Peer().open()
    await peer.end_application()
    await asyncio.sleep(29)
    assert "abort" not in peer.wire.done
    await asyncio.sleep(2)
    assert "abort" in peer.wire.done


async def test_a_client_that_does_not_answer_pings_is_dropped() -> None:
    peer = await Peer().open()
    await asyncio.sleep(41)
    assert peer.closed == (1011, "keepalive ping timeout")
    assert "abort" not in peer.wire.done
    await asyncio.sleep(31)
    assert "abort" in peer.wire.done


@pytest.mark.parametrize(
    "part",
    [
        frame(BINARY, b"a wolf")[:1],
        frame(BINARY, b"a wolf")[:-1],
        frame(TEXT, end=False),
        frame(PING_FRAME, b"ab")[:-1],
    ],
)
async def test_a_message_has_to_come_to_its_end(part: bytes) -> None:
    peer = await Peer(body_read_timeout=15).open()
    peer.sends(part)
    await asyncio.sleep(14)
    assert peer.wire.written == b""
    await asyncio.sleep(2)
    assert peer.closed == (1008, "the message did not come within body_read_timeout=15 seconds")
    assert "abort" not in peer.wire.done


async def test_a_large_message_has_more_time_and_one_that_is_complete_all_of_it() -> None:
    peer = await Peer(body_read_timeout=5).open()
    peer.sends(frame(BINARY, b"x" * 32768, end=False))
    peer.sends(frame(CONTINUATION, b"x" * 32768, end=False))
    await asyncio.sleep(6)
    peer.sends(frame(CONTINUATION))
    await asyncio.sleep(12)
    assert [len(message) for message in peer.received] == [65536]
    assert not peer.wire.done & {"close", "abort"}
    peer.sends(frame(BINARY, b"x" * 32768, end=False))
    peer.sends(frame(CONTINUATION, b"x" * 32768, end=False))
    await asyncio.sleep(9)
    assert "close" in peer.wire.done


@pytest.mark.parametrize("parts", [[b"\xff"], [b"\xe2", b"\x82", b"\xac", b"\xe2"]])
async def test_text_that_is_none_closes_the_socket(parts: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    peer = await Peer().open()
    *first, last = parts
    kind = TEXT
    for part in first:
        peer.sends(frame(kind, part, end=False))
        kind = CONTINUATION
    peer.sends(frame(kind, last))
    assert peer.closed == (1007, "the text message is not UTF-8")
    await peer.leave()
    assert peer.received == []
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"X: " + b"a" * 9000 + b"\r\n", 431),
        (b"a: b\r\n" * 200, 431),
        (b"Sec-WebSocket-Version: 8\r\n", 400),
        (b"Sec-WebSocket-Key: again\r\n", 400),
    ],
)
async def test_a_handshake_that_is_not_understood_is_answered_and_has_its_line(
    head: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "djl_trtllm"):
        peer = Peer(b"X-Request-Id: r-1\r\n" + head, max_header_count=300)
    assert peer.wire.written.startswith(b"HTTP/1.1 %d " % status)
    assert "close" in peer.wire.done
    warning, line = (record.getMessage() for record in caplog.records)
    assert f"refused with {status}: expected a WebSocket handshake: " in warning
    assert line.startswith(f"GET /invocations-bidirectional-stream {status} error=HttpRefusal")
    assert caplog.records[1].request_id == "r-1"  # type: ignore[attr-defined]
    assert [key[0] for key in peer.connections.context.counts.responses] == [status]


async def test_a_handshake_that_opens_a_socket_has_no_line_of_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "djl_trtllm"):
        peer = await Peer().open()
        await peer.leave()
    assert not caplog.records


async def test_the_connection_of_a_handshake_is_freed_at_once() -> None:
    peer = await Peer().open()
    protocol = weakref.ref(peer.http.protocol)
    gc.disable()  # many at once would be a long collection
    try:
        del peer.http.protocol
        assert protocol() is None
    finally:
        gc.enable()


def crowd(application: ASGIApp, count: int, **options: Any) -> list[HttpPeer]:
    """Peers of one server whose WebSockets wait: each of them comes in the turn of the first one's."""
    app = BidirectionalStreams(application, ServerContext(Options()))
    first = HttpPeer(app, **options)
    first.sends(HANDSHAKE + b"\r\n")
    return [first, *(HttpPeer(app, beside=first) for _ in range(count))]


async def leave(peers: Sequence[HttpPeer]) -> None:
    for peer in peers:
        peer.wire.get_protocol().connection_lost(None)
        await until(lambda peer=peer: not peer.state.tasks)  # type: ignore[misc]


async def unasked(*_: object) -> None:
    raise AssertionError("no message is answered")


async def test_sockets_are_opened_one_after_the_other_and_others_have_turns_between_them() -> None:
    peers = crowd(unasked, 6)
    for peer in peers[1:]:
        peer.sends(HANDSHAKE + b"\r\n", frame(PING_FRAME))
    peers.pop(3).protocol.connection_lost(None)
    opened = []
    for _ in range(40):
        opened.append(sum(hasattr(peer.wire, "protocol") for peer in peers))
        await asyncio.sleep(0)
    assert [opened.count(count) for count in range(1, 6)] == [4] * 5 and opened[-1] == 6
    assert [PONGED in peer.wire.written for peer in peers] == [False, *[True] * 5]
    await leave(peers)


async def test_no_client_is_late_while_its_socket_waits_to_be_opened_and_one_that_sends_much_is_refused_once() -> None:
    first, waiting, flooding = crowd(unasked, 2, max_body_memory=10_000)
    for peer in (waiting, flooding):
        peer.sends(HANDSHAKE + b"\r\n")
    assert waiting.protocol.deadline == inf
    flooding.sends(*[bytes(4000)] * 3)
    assert flooding.statuses == [503] and flooding.protocol.deadline < inf
    assert first.connections.context.bodies.used == 4000
    await until(lambda: waiting.statuses == [101])
    assert flooding.statuses == [503]
    await leave([first, waiting])


async def test_a_socket_that_cannot_be_opened_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _, failing, other = peers = crowd(unasked, 2)
    for peer in (failing, other):
        peer.sends(HANDSHAKE + b"\r\n")
    read = WebSocketProtocol.data_received

    def fail(protocol: WebSocketProtocol, data: bytes) -> None:
        if protocol.transport is failing.wire:
            raise MemoryError
        read(protocol, data)

    monkeypatch.setattr(WebSocketProtocol, "data_received", fail)
    await until(lambda: other.statuses == [101])
    assert "abort" in failing.wire.done
    await leave(peers)


async def test_a_socket_that_waits_behind_a_request_keeps_what_comes() -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})
        peer.sends(frame(PING_FRAME))  # before the handshake that came behind the request is read

    first, peer = peers = crowd(application, 1)
    peer.sends(GET + b"\r\n" + HANDSHAKE + b"\r\n")
    await until(lambda: PONGED in peer.wire.written)
    assert peer.statuses == [200, 101] and first.statuses == [101]
    await leave(peers)


async def test_a_handshake_that_is_refused_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    peer = HttpPeer(BidirectionalStreams(unasked, ServerContext(Options())))
    peer.sends(HANDSHAKE.replace(PATH.encode(), b"/elsewhere") + b"\r\n")
    await until(lambda: not peer.state.tasks)
    assert peer.statuses == [404] and "close" in peer.wire.done
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    peer.wire.get_protocol().connection_lost(None)


async def test_what_comes_before_the_answer_to_the_handshake_is_read_after_it() -> None:
    good, wrong = Peer(), Peer()
    good.sends(frame(TEXT, b"early"), frame(TEXT, b"too"))
    wrong.sends(b"\xff" * 9)
    await good.open()
    await until(lambda: good.received == ["early", "too"])
    await until(lambda: "close" in wrong.wire.done)
    assert wrong.closed[0] == 1002


async def test_what_comes_before_the_answer_to_the_handshake_and_cannot_be_kept_ends_it() -> None:
    peer = Peer(max_body_memory=1000)
    peer.sends(b"x" * 1000)
    assert "abort" in peer.wire.done


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
    ) -> None:
        """`replies`: the server may refuse the handshake with a response of its own."""
        self.sent: list[Message] = []
        self._received: asyncio.Queue[Message] = asyncio.Queue()
        self._received.put_nowait({"type": "websocket.connect"})
        self.gone = False
        scope = {
            "type": "websocket",
            "scheme": "ws",
            "path": path,
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


async def test_a_client_that_cannot_be_written_to_is_given_up(hosts: Hosts, tokenizer: Tokenizer) -> None:
    _, app = await served(tokenizer)
    socket = Socket(app)
    socket.message(body(4, stream=True))
    await until(lambda: bool(hosts.last.submitted))
    socket.gone = True
    hosts.last.step()
    await asyncio.wait({socket.task})
    assert len(hosts.last.cancelled) == 1


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
    first = Socket(app)
    await until(lambda: bool(first.sent))
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
