"""Limits of one WebSocket on a played transport and clock."""

from __future__ import annotations

import asyncio
import gc
import struct
import weakref
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from djl_trtllm.config import Options
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.websocket import PATH, BidirectionalStreams, WebSocketProtocol
from tests.server.application import GET, Peer as HttpPeer
from tests.support.client import BINARY, CONTINUATION, HANDSHAKE, PING_FRAME, TEXT, frame
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
    assert peer.closed == (1013, "too little of max_body_memory=20000 bytes is left: try again later")
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
    for _ in range(80):
        opened.append(sum(hasattr(peer.wire, "protocol") for peer in peers))
        await asyncio.sleep(0)
    assert [opened.count(count) for count in range(1, 6)] == [8] * 5 and opened[-1] == 6
    assert [PONGED in peer.wire.written for peer in peers] == [False, *[True] * 5]
    await leave(peers)


async def test_a_socket_of_another_client_does_not_wait_for_those_of_a_crowd() -> None:
    first, *peers = crowd(unasked, 6, client_header="x-client")
    order: list[int] = []
    for number, client in enumerate("aaaabb"):
        peers[number].sends(HANDSHAKE + b"X-Client: %b\r\n\r\n" % client.encode())
    peers[1].protocol.connection_lost(None)
    while len(order) < 5:
        order += [number for number, peer in enumerate(peers) if hasattr(peer.wire, "protocol") and number not in order]
        await asyncio.sleep(0)
    assert order == [0, 4, 2, 5, 3]
    peers.pop(1)
    await leave([first, *peers])


@pytest.mark.parametrize("waits", [False, True])
async def test_what_comes_behind_a_handshake_in_the_same_packet_is_read(waits: bool) -> None:
    first, *rest = crowd(unasked, 1)
    peer = rest[0]
    if not waits:
        await until(lambda: first.statuses == [101])
        await asyncio.sleep(1)
    pings = frame(PING_FRAME) * 600  # more than the parser of heads gets at once
    peer.sends(HANDSHAKE + b"\r\n" + pings)
    assert hasattr(peer.wire, "protocol") is not waits
    await until(lambda: peer.wire.written.count(PONGED) == 600)
    assert peer.connections.context.bodies.used == 0
    await leave([first, peer])


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
    peer.sends(GET + b"\r\n" + HANDSHAKE + b"\r\n" + frame(PING_FRAME))
    await until(lambda: peer.wire.written.count(PONGED) == 2)
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
