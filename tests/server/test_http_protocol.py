"""One connection: the applications that answer its requests, and its limits."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from djl_trtllm.server.exchange import CONNECTION, REST
from tests.server.application import CHUNKED, GET, POST, Peer
from tests.support.client import HANDSHAKE, raw_post
from tests.support.tables import by_rows
from tests.support.virtual_time import until

PING = GET + b"\r\n"
OLD = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
ENDED = b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"


async def waits(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def test_an_idle_connection_has_little_memory() -> None:
    peers = [Peer() for _ in range(21)]
    gc.collect()
    tracemalloc.start()
    try:
        for peer in peers[:1]:
            peer.sends(PING)
        await asyncio.sleep(1)
        before, _ = tracemalloc.get_traced_memory()
        for peer in peers[1:]:
            peer.sends(PING)
        await asyncio.sleep(1)
        for peer in peers[1:]:
            peer.wire.written = b""
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What a request has left: neither a parser, which takes a kilobyte, nor a scope.
    assert (after - before) / 20 < 1000


async def test_an_application_gets_the_scope_that_asgi_specifies() -> None:
    scopes: list[Scope] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(dict(scope))
        await answers(scope, receive, send)

    for encrypted in (None, object()):
        peer = Peer(application)
        peer.wire.extra.update(sslcontext=encrypted, sockname=("::1", 8080, 0, 0), peername=("::2", 5000, 0, 0))
        peer.protocol.connection_made(peer.wire)
        peer.sends(b"GET /a%20wolf?b=%20 HTTP/1.1\r\nHost: Test\r\n\r\n", OLD)
        await asyncio.sleep(0.001)
    first, second, third, _ = ({name: value for name, value in each.items() if "." not in name} for each in scopes)
    asgi = {"version": "3.0", "spec_version": "2.3"}
    common = {"type": "http", "asgi": asgi, "method": "GET", "root_path": "", "scheme": "http"}
    addresses = {"server": ("::1", 8080), "client": ("::2", 5000)}
    its = {"http_version": "1.1", "path": "/a wolf", "query_string": b"b=%20", "headers": [(b"host", b"Test")]}
    assert first == {**common, **addresses, **its} and third == {**first, "scheme": "https"}
    its = {"http_version": "1.0", "path": "/", "query_string": b"", "headers": [(b"connection", b"keep-alive")]}
    assert second == {**common, **addresses, **its}


@pytest.mark.parametrize("kind", ["open", "closed", "none"])
async def test_a_connection_is_dropped_together_with_what_was_not_read(kind: str) -> None:
    resets: list[Callable[[], None]] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        resets.append(scope[CONNECTION].reset)

    with socket.socket() as connection:
        peer = Peer(application, None if kind == "none" else connection)
        peer.sends(PING)
        await asyncio.sleep(0)
        if kind == "closed":
            connection.close()
        resets[0]()
        if kind == "open":
            assert struct.unpack("ii", connection.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)) == (1, 0)
    assert "abort" in peer.wire.done


async def test_a_part_of_a_body_is_sent_while_the_client_reads_and_is_there() -> None:
    begun = asyncio.Event()
    writes: list[Callable[[bytes], bool]] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        writes.append(scope[CONNECTION].write_part)
        await begun.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await waits(scope, receive, send)

    peer = Peer(application)
    peer.sends(PING)
    await asyncio.sleep(0)
    (write,) = writes
    assert not write(b"before the head")
    begun.set()
    await asyncio.sleep(0.001)
    assert write(b"a wolf, twenty bytes")
    head, _, body = peer.wire.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert body == b"14\r\na wolf, twenty bytes\r\n"
    peer.protocol.pause_writing()
    assert not write(b"too fast")
    peer.protocol.resume_writing()
    assert write(b"!")
    assert peer.wire.written.removeprefix(head + b"\r\n\r\n" + body) == b"1\r\n!\r\n"
    await peer.leave()
    assert not write(b"gone")


async def test_a_body_of_unknown_length_is_sent_in_chunks() -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one", b"", b"three", b"."):
            await send({"type": "http.response.body", "body": part, "more_body": part != b"."})

    peer = Peer(application)
    peer.sends(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 4\r\n\r\nbody")
    await asyncio.sleep(0.01)
    assert peer.wire.written.partition(b"\r\n\r\n")[2] == b"3\r\none\r\n5\r\nthree\r\n1\r\n.\r\n0\r\n\r\n"


@pytest.mark.parametrize(("method", "length"), [(b"GET", b"9"), (b"HEAD", b"9"), (b"HEAD", None)])
async def test_a_body_with_a_length_or_without_content_has_no_parts(method: bytes, length: bytes | None) -> None:
    sent: list[bool] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [] if length is None else [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sent.append(scope[CONNECTION].write_part(b"part"))
        await send({"type": "http.response.body", "body": b"nine long"})

    peer = Peer(application)
    peer.sends(PING.replace(b"GET", method))
    await asyncio.sleep(0.001)
    assert sent == [False]
    _, _, body = peer.wire.written.partition(b"\r\n\r\n")
    assert body == (b"nine long" if method == b"GET" else b"")
    assert b"transfer-encoding" not in peer.wire.written and not peer.wire.done


@by_rows(
    ("messages", "statuses"),
    [
        ([], [500]),
        ([("start", [])], [200]),
        ([("start", [(b"content-length", b"2")]), ("body", b"abc")], [200]),
        ([("start", [(b"content-length", b"2")]), ("body", b"a")], [200]),
        ([("start", [(b"x-wolf", b"a\r\nset-cookie: b")])], []),
        ([("start", [(b"x wolf", b"a")])], []),
    ],
)
@by_rows("fails", [False, True])
async def test_a_response_that_is_not_completed_ends_its_connection(
    messages: list[tuple[str, object]], statuses: list[int], fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        for kind, value in messages:
            name = "headers" if kind == "start" else "body"
            await send({"type": f"http.response.{kind}", "status": 200, name: value})
        if fails:
            raise ZeroDivisionError

    peer = Peer(application)
    peer.sends(PING)
    await asyncio.sleep(0.001)
    assert peer.statuses == statuses and not peer.state.tasks
    assert "close" in peer.wire.done and not peer.wire.written.endswith(b"0\r\n\r\n")
    assert len(caplog.records) == 1
    if statuses == [500]:
        head, _, text = peer.wire.written.partition(b"\r\n\r\n")
        assert b"\r\ncontent-type: text/plain; charset=utf-8\r\n" in head and text == b"Internal Server Error"


@pytest.mark.parametrize("split", [False, True])
async def test_wherever_a_head_ends_the_next_request_is_not_begun_before_the_answer(split: bool) -> None:
    for padding in (0, *range(890, 1000)):
        first, second = (raw_post(b"{}", "X: " + "y" * size) for size in (padding, 800))
        both = first + second
        end = first.index(b"\r\n\r\n")
        for cut in range(end, end + 5) if split else [len(both)]:
            peer = Peer(waits, max_header_size=8192)
            peer.sends(both[:cut], both[cut:])
            assert peer.connections.context.bodies.used == len(second), (padding, cut)
            await peer.leave()
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("head", "status"),
    [(GET.replace(b"/ping", b"/ping?verbose"), 200), (GET.replace(b"/ping", b"/models"), 503), (HANDSHAKE, 503)],
)
async def test_one_connection_too_many_is_for_health_checks(head: bytes, status: int) -> None:
    first = Peer(waits, max_connections=1)
    first.sends(PING)
    second = Peer(answers, beside=first)
    second.sends(head + b"\r\n")
    await asyncio.sleep(0.001)
    assert second.statuses == [status]
    second.protocol.connection_lost(None)
    second.watch.cancel()
    await first.leave()


@pytest.mark.parametrize("last", [ENDED.replace(b"\r\n", b"\r\nConnection: close\r\n", 1), OLD])
async def test_what_follows_the_last_request_of_a_connection_is_ignored(last: bytes) -> None:
    peer = Peer()
    peer.sends(last + PING)
    await asyncio.sleep(0.001)
    assert (peer.seen, peer.statuses, peer.wire.done) == ([("/", b"")], [200], {"close"})


async def test_a_response_before_the_end_of_its_request_can_be_read_by_a_client_that_still_sends() -> None:
    peer = Peer()
    peer.sends(POST.replace(b"/echo", b"/else").replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
    await until(lambda: peer.statuses == [200])
    # A close would be a reset as soon as more of the body comes.
    assert peer.wire.done == {"eof"}
    peer.sends(b"a wolf")
    assert peer.wire.done == {"eof"}
    await until(lambda: "abort" in peer.wire.done)


async def test_what_a_refused_client_still_sends_is_read_although_nobody_took_its_body() -> None:
    peer = Peer(body_read_timeout=5.0)
    peer.hold = asyncio.Event()
    peer.sends(POST.replace(b"/echo", b"/else").replace(b": 6", b": 200000"), b"x" * 65536)
    assert "pause" not in peer.wire.done
    peer.sends(b"x")
    assert "pause" in peer.wire.done
    await until(lambda: peer.statuses == [408])
    assert "pause" not in peer.wire.done
    peer.hold.set()


async def test_a_long_response_before_the_end_of_its_request_may_be_read_slowly() -> None:
    peer = Peer()
    peer.wire.unsent = 1
    peer.sends(POST.replace(b"/echo", b"/else").replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
    await asyncio.sleep(29)
    assert peer.wire.done == {"eof"}
    await asyncio.sleep(2)
    assert "abort" in peer.wire.done


async def test_at_the_servers_end_a_connection_ends_after_its_response() -> None:
    idle, busy = Peer(), Peer()
    busy.hold = asyncio.Event()
    busy.sends(PING)
    await asyncio.sleep(0)
    for peer in (idle, busy):
        peer.protocol.shutdown()
    assert ("close" in idle.wire.done, "close" in busy.wire.done) == (True, False)
    busy.hold.set()
    await asyncio.sleep(0.001)
    assert "close" in busy.wire.done and b"connection: close\r\n" in busy.wire.written
    for peer in (idle, busy):
        assert len(peer.state.connections) == 1
        await peer.leave()
        assert len(peer.state.connections) == 0


@pytest.mark.parametrize("complete", [True, False])
async def test_a_response_may_end_after_its_application_has_returned(complete: bool) -> None:
    rest: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    sends: list[Send] = []
    scopes: list[Scope] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sends.append(send)
        scopes.append(scope)
        scope[REST] = rest

    peer = Peer(application)
    peer.sends(PING)
    await asyncio.sleep(0.001)
    assert not peer.state.tasks and not peer.wire.written.endswith(b"0\r\n\r\n")
    assert scopes[0]["headers"] == []  # nor is anything else kept that only the application needs
    if complete:
        await sends[0]({"type": "http.response.body", "body": b""})
    rest.set_result(None)
    await asyncio.sleep(0.001)
    assert (peer.wire.written.endswith(b"0\r\n\r\n"), "close" in peer.wire.done) == (complete, not complete)


@pytest.mark.parametrize("refused", [False, True])
async def test_the_loss_of_its_client_is_reported_to_a_request_once(refused: bool) -> None:
    reports: list[str] = []
    scopes: list[Scope] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        scope[CONNECTION].when_lost(lambda: reports.append("lost"))
        while (await receive())["type"] != "http.disconnect":
            pass

    peer = Peer(application)
    peer.sends(POST + b"a")
    await asyncio.sleep(0.001)
    assert reports == []
    if refused:
        await asyncio.sleep(62)  # the rest of the body does not come
        assert reports == ["lost"]
    peer.protocol.connection_lost(None)
    assert reports == ["lost"]
    scopes[0][CONNECTION].when_lost(lambda: reports.append("late"))
    assert reports == ["lost", "late"]
    await asyncio.sleep(0.001)
    assert not peer.state.tasks


async def test_a_request_whose_response_has_ended_is_not_told_that_its_client_leaves() -> None:
    reports: list[str] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        scope[CONNECTION].when_lost(lambda: reports.append("lost"))
        await answers(scope, receive, send)

    peer = Peer(application)
    peer.sends(PING)
    await asyncio.sleep(0.001)
    await peer.leave()
    assert reports == []


async def test_all_requests_of_a_client_end_when_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        rest = asyncio.get_running_loop().create_future()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scope[CONNECTION].when_lost(lambda: rest.set_result(None))
        rest.add_done_callback(lambda _: ended.append(scope["path"]))
        scope[REST] = rest

    peer = Peer(application)
    peer.sends(ENDED * 2)  # the parser reads both: the end of a chunked body is not known before
    await asyncio.sleep(0.001)
    peer.wire.close()
    await peer.leave()
    await asyncio.sleep(0.001)
    assert ended == ["/"] and not peer.state.tasks and not caplog.records


async def test_an_application_waits_for_a_client_that_does_not_read() -> None:
    sent: list[bytes] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"a", b"b"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            sent.append(part)
            peer.protocol.pause_writing()

    peer = Peer(application)
    peer.sends(PING)
    await asyncio.sleep(0.001)
    assert sent == [b"a"]
    peer.protocol.resume_writing()
    await asyncio.sleep(0.001)
    assert sent == [b"a", b"b"]
    peer.protocol.connection_lost(None)
    await asyncio.sleep(0.001)
    assert not peer.state.tasks


# -- limits, on a transport and a clock of the test's own --------------------------------------------------------------


@by_rows(
    ("data", "status"),
    [
        (b"GET /" + b"a" * 127 + b" HTTP/1.1\r\nHost: test\r\n\r\n", 200),
        *((b"GET /" + b"a" * 128 + end, 414) for end in (b" HTTP/1.1\r\n\r\n", b"")),
        (GET + b"X: " + b"a" * (1024 - len(GET) - 7) + b"\r\n\r\n", 200),
        (GET + b"X: " + b"a" * (1025 - len(GET) - 7) + b"\r\n\r\n", 431),
        (GET + b"X: " + b"a" * 1024, 431),
        (GET + b"a: b\r\n" * 9 + b"\r\n", 200),
        (GET + b"a: b\r\n" * 10 + b"\r\n", 431),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * 8 + b"\r\n", 200),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * 10 + b"\r\n", 431),
        (CHUNKED + b"1;" + b"a" * 2100, 431),
        (CHUNKED + b"1\r\na\r\n" * 2000, 431),
        (CHUNKED + b"40\r\n" + b"a" * 64 + b"\r\n" + b"0\r\n\r\n", 200),
        (CHUNKED + (b"40\r\n" + b"a" * 64 + b"\r\n") * 500 + b"0\r\n\r\n", 200),
        (b"\r\n" * 20 + GET + b"\r\n", 200),
        *((b"\r\n" * 2000, 431), (b"nonsense\r\n\r\n", 400)),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        *((b"GET / HTTP/1.1\r\n\r\n", 400), (b"GET / HTTP/1.0\r\n\r\n", 200)),
        *((b"GET / HTTP/1.1\r\nHost:\r\n\r\n", 200), (GET + b"Host: test\r\n\r\n", 400)),
        (GET.replace(b"1.1", b"1.0") + b"Host: other\r\n\r\n", 400),
    ],
)
@by_rows("size", [1, 100, 1 << 20])
async def test_bytes_are_bounded_however_they_come(data: bytes, status: int, size: int) -> None:
    peer = Peer()
    peer.sends(*(data[start : start + size] for start in range(0, len(data), size)))
    await until(lambda: bool(peer.statuses))
    assert peer.statuses == [status]
    assert ("eof" in peer.wire.done) == (status != 200)


@pytest.mark.parametrize("data", [b"", GET + b"\r\n", POST + b"a wolf", b"nonsense\r\n\r\n", b"GET /" + b"a" * 128])
async def test_a_connection_that_is_gone_is_freed_at_once(data: bytes) -> None:
    peer = Peer()
    protocol = weakref.ref(peer.protocol)
    peer.watch.cancel()  # it knows the connection that it looked at last
    gc.disable()  # many connections at once would be a long collection
    try:
        peer.sends(data)
        await asyncio.sleep(1)
        peer.protocol.connection_lost(None)
        peer.left = True
        del peer.protocol
        await asyncio.sleep(1)
        assert protocol() is None
    finally:
        gc.enable()


async def test_requests_of_one_connection_are_answered_one_after_the_other() -> None:
    peer = Peer()
    peer.hold = asyncio.Event()
    requests = [GET + b"\r\n", POST + b"a wolf", CHUNKED + b"3\r\nfox\r\n0\r\n\r\n", GET + b"\r\n"]
    peer.sends(b"".join(requests))
    peer.sends(GET)
    await asyncio.sleep(1)
    assert len(peer.seen) == 1
    assert peer.connections.context.bodies.used == len(b"".join([*requests[1:], GET]))
    peer.hold.set()
    await until(lambda: len(peer.statuses) == 4)
    peer.sends(b"\r\n")
    await until(lambda: len(peer.statuses) == 5)
    assert peer.seen == [("/ping", b""), ("/echo", b"a wolf"), ("/echo", b"fox"), ("/ping", b""), ("/ping", b"")]
    assert peer.connections.context.bodies.used == 0


async def test_no_more_is_read_ahead_than_needed_or_than_there_is_memory_for() -> None:
    peer = Peer(max_body_memory=400_000)
    peer.hold = asyncio.Event()
    peer.sends(GET + b"\r\n")
    await asyncio.sleep(0)
    peer.sends(b"x" * 65536)
    assert "pause" not in peer.wire.done
    peer.sends(b"x")
    assert "pause" in peer.wire.done
    peer.sends(b"x" * 140_000, b"x" * 140_000)
    peer.sends(b"x")  # there is room for it, and it is refused already
    assert not peer.statuses and "abort" not in peer.wire.done
    assert peer.connections.context.counts.responses.total() == 1
    assert peer.connections.context.bodies.used == 65_537
    peer.hold.set()
    await until(lambda: "eof" in peer.wire.done)
    assert peer.statuses == [200, 503] and "max_body_memory=400000" in peer.refusal
    # The client gets time to read it, and so what it still sends is read.
    assert "pause" not in peer.wire.done


async def test_a_request_that_comes_while_the_next_one_is_about_to_begin_is_refused_after_that_ones_response() -> None:
    peer = Peer(max_body_memory=400_000)
    peer.hold = asyncio.Event()
    peer.sends(GET + b"\r\n", GET + b"\r\n")
    await asyncio.sleep(0)
    release, peer.hold = peer.hold, asyncio.Event()
    release.set()
    await until(lambda: peer.statuses == [200])
    peer.sends(b"x" * 300_000)
    peer.hold.set()
    await until(lambda: "eof" in peer.wire.done)
    assert peer.statuses == [200, 200, 503] and [path for path, _ in peer.seen] == ["/ping", "/ping"]


async def test_bytes_behind_the_handshake_of_a_websocket_that_was_read_ahead_are_the_websockets() -> None:
    messages: list[Any] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            messages.append(await receive())
            await send({"type": "websocket.close"})
            return
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})
        # Before the event loop goes on with the handshake, which waits for this response.
        peer.sends(b"\x81\x86\0\0\0\0a wolf")

    peer = Peer(application)
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    peer.sends(PING, GET + upgrade + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
    await until(lambda: bool(messages))
    assert messages[0]["text"] == "a wolf" and peer.statuses == [200, 101]
    peer.wire.get_protocol().connection_lost(None)


async def test_reading_goes_on_when_what_was_read_ahead_is_answered() -> None:
    peer = Peer()
    for answered in (3000, 6000):
        peer.hold = asyncio.Event()
        peer.sends((GET + b"\r\n") * 3000)
        assert "pause" in peer.wire.done
        peer.hold.set()
        await until(lambda answered=answered: len(peer.statuses) == answered)  # type: ignore[misc]
        assert "pause" not in peer.wire.done


async def test_reading_does_not_go_on_while_much_that_was_read_ahead_is_to_be_answered() -> None:
    peer = Peer()
    peer.hold = asyncio.Event()
    peer.sends((GET + b"\r\n") * 3000)
    await asyncio.sleep(0.001)
    release, peer.hold = peer.hold, asyncio.Event()
    release.set()
    await asyncio.sleep(0.001)
    assert (peer.statuses, "pause" in peer.wire.done) == ([200], True)
    peer.hold.set()


async def test_an_answer_to_what_was_read_ahead_may_take_longer_than_a_connection_may_be_idle() -> None:
    peer = Peer(keep_alive_timeout=5.0)
    peer.hold = asyncio.Event()
    peer.sends((GET + b"\r\n") * 2)
    await asyncio.sleep(0.001)
    release, peer.hold = peer.hold, asyncio.Event()
    release.set()
    await asyncio.sleep(60)
    assert (peer.statuses, peer.wire.done) == ([200], set())
    peer.hold.set()
    await until(lambda: len(peer.statuses) == 2)


async def test_a_refused_client_that_stays_is_dropped() -> None:
    peer = Peer()
    peer.sends(b"nonsense\r\n\r\n")
    await asyncio.sleep(1)
    assert peer.wire.done == {"eof"}
    await asyncio.sleep(2.5)
    assert peer.wire.done == {"eof", "abort"}
    assert peer.statuses == [400]


@pytest.mark.parametrize(
    ("begin", "what"),
    [(GET + b"X: ", "the head of the request"), (CHUNKED + b"1;", "trailers and chunk headers")],
)
async def test_what_is_too_large_is_named(begin: bytes, what: str) -> None:
    peer = Peer()
    peer.sends(begin + b"a" * 2100)
    await asyncio.sleep(0.001)
    assert peer.refusal.startswith(what)


async def test_a_connection_that_was_answered_early_is_idle_when_the_body_has_come() -> None:
    peer = Peer()
    peer.sends(POST.replace(b"/echo", b"/else"))
    await until(lambda: peer.statuses == [200])
    assert not peer.connections.idle
    await asyncio.sleep(50)
    peer.sends(b"a wolf")
    assert list(peer.connections.idle) == [peer.protocol]
    await asyncio.sleep(70)
    assert "close" not in peer.wire.done
    await asyncio.sleep(10)
    assert "close" in peer.wire.done


async def test_an_answer_may_take_long_but_has_to_be_read() -> None:
    peer = Peer()
    peer.hold = asyncio.Event()
    peer.sends(GET + b"\r\n")
    await asyncio.sleep(1000)
    assert "abort" not in peer.wire.done
    peer.protocol.pause_writing()
    await asyncio.sleep(20)
    peer.protocol.resume_writing()
    await asyncio.sleep(100)
    assert "abort" not in peer.wire.done
    peer.wire.unsent = 1
    peer.protocol.pause_writing()
    await asyncio.sleep(32)
    assert "abort" in peer.wire.done
    peer.hold.set()


async def test_what_a_client_does_not_read_of_the_last_answer_is_dropped() -> None:
    peer = Peer()
    peer.sends(GET + b"Connection: close\r\n\r\n")
    await until(lambda: "close" in peer.wire.done)
    peer.wire.unsent = 1
    await asyncio.sleep(29)
    assert "abort" not in peer.wire.done
    await asyncio.sleep(2)
    assert "abort" in peer.wire.done


async def test_a_body_that_is_not_wanted_is_read_a_while_beyond_the_largest() -> None:
    peer = Peer(max_request_size=1000)
    peer.sends(POST.replace(b"/echo", b"/else").replace(b"6", b"5000000"))
    await until(lambda: peer.statuses == [200])
    peer.sends(b"x" * (1000 + (1 << 20)))
    assert "eof" not in peer.wire.done
    peer.sends(b"x")
    assert "eof" in peer.wire.done
    assert peer.statuses == [200]


@by_rows("follows", [b"nonsense\r\n\r\n", CHUNKED + b"nonsense", b"GET http:// HTTP/1.1\r\n\r\n"])
@by_rows("before", [1, 2])
async def test_a_request_that_is_refused_leaves_those_before_it_their_responses(follows: bytes, before: int) -> None:
    peer = Peer()
    peer.hold = asyncio.Event()
    peer.sends((CHUNKED + b"0\r\n\r\n") * before + follows, b"what is not read")
    await asyncio.sleep(1000)
    assert peer.statuses == []
    peer.hold.set()
    await until(lambda: "eof" in peer.wire.done)
    assert peer.statuses == [200] * before + [400] and peer.seen == [("/echo", b"")] * before
    peer.sends(b"x" * 1000)
    assert "abort" not in peer.wire.done
    await until(lambda: "abort" in peer.wire.done)


@by_rows("method", [b"POST", b"GET"])
@by_rows("offer", [b"h2c", b"websocket", b"other"])
@by_rows("body", [b"Content-Length: 6\r\n\r\na wolf", CHUNKED[-30:] + b"6\r\na wolf\r\n0\r\n\r\n"])
@by_rows("size", [1, 100, 1 << 20])
async def test_the_offer_of_another_protocol_is_ignored(method: bytes, offer: bytes, body: bytes, size: int) -> None:
    peer = Peer()
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAEAAEAA\r\n" % offer
    request = b"%s /echo HTTP/1.1\r\nHost: test\r\n" % method + upgrade + body
    data = (request + GET.replace(b"GET", b"HEAD") + upgrade + b"\r\n") * 2
    peer.sends(*(data[start : start + size] for start in range(0, len(data), size)))
    await until(lambda: len(peer.statuses) == 4)
    assert peer.statuses == [200] * 4
    assert peer.seen == [("/echo", b"a wolf"), ("/ping", b"")] * 2


async def test_a_head_that_is_read_twice_counts_once() -> None:
    offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    for padding, status in ((1024, 200), (1025, 431)):
        peer = Peer()
        head = POST.removesuffix(b"\r\n") + offer
        peer.sends(head + b"X: " + b"a" * (padding - len(head) - 7) + b"\r\n\r\n", b"a wolf")
        await until(lambda peer=peer: bool(peer.statuses))  # type: ignore[misc]
        assert peer.statuses == [status]
        await peer.leave()


async def test_a_proxy_is_not_what_this_is() -> None:
    peer = Peer()
    peer.sends(b"CONNECT test:80 HTTP/1.1\r\nHost: test\r\n\r\n" + GET)
    assert peer.statuses == [501]
    assert "eof" in peer.wire.done


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"GET /" + b"a" * 128 + b" HTTP/1.1\r\n\r\n", "GET /" + "a" * 128 + " 414 error=HttpRefusal"),
        (b"nonsense\r\n\r\n", "- - 400 error=HttpRefusal"),
        (GET + b"X-Request-Id: r-1\r\n" + b"a: b\r\n" * 10 + b"\r\n", "GET /ping 431 error=HttpRefusal"),
    ],
)
async def test_a_head_that_is_refused_has_its_line(data: bytes, line: str, caplog: pytest.LogCaptureFixture) -> None:
    peer = Peer()
    with caplog.at_level("INFO", "djl_trtllm.requests"):
        peer.sends(data)
    (record,) = (record for record in caplog.records if record.name == "djl_trtllm.requests")
    assert record.getMessage().startswith(line)
    if b"r-1" in data:
        assert record.request_id == "r-1"  # type: ignore[attr-defined]
