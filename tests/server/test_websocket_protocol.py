"""Limits of one WebSocket, on a transport and a clock of the test's own."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from djl_trtllm.server.websocket import WebSocketProtocol
from tests.server import http_peer
from tests.support.virtual_time import until
from tests.support.websocket import BINARY, CONTINUATION, HANDSHAKE, PING, TEXT, frame

PONGED = b"\x8a\x00"


class Peer:
    """A WebSocket to an application that keeps what it receives, until the test lets it `leave`."""

    def __init__(self, head: bytes = b"", **options: Any) -> None:
        self.received: list[bytes | str] = []
        self._done = asyncio.Event()
        self.http = http_peer.Peer(self._answer, **{"max_header_size": 65536, "max_header_count": 100, **options})
        self.connections = self.http.connections
        self.wire = self.http.wire
        self.http.sends(HANDSHAKE + head + b"\r\n")
        assert isinstance(self.wire.protocol, WebSocketProtocol)
        self.protocol = self.wire.protocol

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
        self.protocol.connection_lost(None)
        await until(lambda: not self.http.state.tasks)
        self.http.watch.cancel()
        await asyncio.gather(self.http.watch, return_exceptions=True)
        assert not self.connections.busy and not self.connections.idle
        assert self.connections.context.bodies.used == 0


async def test_of_many_small_frames_some_are_read_at_a_time_and_no_more_is_received_meanwhile() -> None:
    peer = await Peer().open()
    assert peer.connections.busy == {peer.protocol}
    peer.sends(frame(PING) * 2000)
    peer.sends(frame(PING) * 2000)
    for turn in (1, 2, 3):
        assert len(peer.wire.written) == len(PONGED) * 170 * turn + len(PONGED) * (turn * 4 // 6)
        assert "pause" in peer.wire.done
        await asyncio.sleep(0)
    await until(lambda: len(peer.wire.written) == len(PONGED) * 4000)
    assert "pause" not in peer.wire.done
    assert peer.connections.context.bodies.used == 0
    peer.sends(frame(PING))
    assert len(peer.wire.written) == len(PONGED) * 4001
    await peer.leave()


async def test_a_message_that_the_application_has_not_taken_yet_stops_reading() -> None:
    peer = await Peer().open()
    peer.sends(frame(BINARY, b"a wolf"))
    assert "pause" in peer.wire.done
    await until(lambda: peer.received == [b"a wolf"])
    assert "pause" not in peer.wire.done
    await peer.leave()


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
    await peer.leave()


async def test_what_is_incomplete_counts_as_memory_of_bodies() -> None:
    peer = await Peer(max_body_memory=20_000).open()
    message = frame(BINARY, b"x" * 12_000)
    peer.sends(message[:6000])
    assert peer.connections.context.bodies.used == 6000 - 8  # without its head
    peer.sends(message[6000:10_000])
    peer.sends(message[10_000:])
    assert peer.closed == (1013, "max_body_memory=20000 bytes leave too little for this")
    assert peer.wire.done >= {"close"}
    peer.sends(frame(PING))
    assert peer.received == []
    await peer.leave()


async def test_nothing_is_read_of_a_client_that_does_not_read() -> None:
    peer = await Peer().open()
    peer.protocol.pause_writing()
    peer.sends(frame(PING))
    assert peer.wire.written == b""
    assert "pause" in peer.wire.done
    await asyncio.sleep(10)
    peer.protocol.resume_writing()
    assert peer.wire.written == PONGED
    assert "pause" not in peer.wire.done
    await peer.leave()


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
    await peer.leave()


async def test_what_a_client_does_not_read_of_the_end_is_dropped() -> None:
    peer = await Peer().open()
    await peer.end_application()
    await asyncio.sleep(29)
    assert "abort" not in peer.wire.done
    await asyncio.sleep(2)
    assert "abort" in peer.wire.done
    await peer.leave()


async def test_a_client_that_does_not_answer_pings_is_dropped() -> None:
    peer = await Peer().open()
    await asyncio.sleep(41)
    assert peer.closed == (1011, "keepalive ping timeout")
    assert "abort" not in peer.wire.done
    await asyncio.sleep(31)
    assert "abort" in peer.wire.done
    await peer.leave()


@pytest.mark.parametrize(
    "part",
    [frame(BINARY, b"a wolf")[:1], frame(BINARY, b"a wolf")[:-1], frame(TEXT, end=False), frame(PING, b"ab")[:-1]],
)
async def test_a_message_has_to_come_to_its_end(part: bytes) -> None:
    peer = await Peer(body_read_timeout=15).open()
    peer.sends(part)
    await asyncio.sleep(14)
    assert peer.wire.written == b""
    await asyncio.sleep(2)
    assert peer.closed == (1008, "the message did not come within body_read_timeout=15 seconds")
    assert "abort" not in peer.wire.done
    await peer.leave()


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
    await peer.leave()


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
    await peer.leave()


async def test_a_handshake_that_opens_a_socket_has_no_line_of_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "djl_trtllm"):
        peer = await Peer().open()
        await peer.leave()
    assert not caplog.records


async def test_what_comes_before_the_answer_to_the_handshake_and_cannot_be_kept_ends_it() -> None:
    peer = Peer(max_body_memory=1000)
    peer.sends(b"x" * 1000)
    assert "abort" in peer.wire.done
    await peer.leave()
