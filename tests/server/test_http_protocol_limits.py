"""Limits of one connection, on a transport and a clock of the test's own."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from tests.server.http_peer import CHUNKED, GET, POST, Peer
from tests.support.virtual_time import in_virtual_time, until


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * 127 + b" HTTP/1.1\r\n\r\n", 200),
        (b"GET /" + b"a" * 128 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /" + b"a" * 128, 414),
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
        (b"\r\n" * 2000, 431),
        (b"nonsense\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    ],
)
@pytest.mark.parametrize("size", [1, 100, 1 << 20])
@in_virtual_time
async def test_bytes_are_bounded_however_they_come(data: bytes, status: int, size: int) -> None:
    peer = Peer()
    peer.sends(*(data[start : start + size] for start in range(0, len(data), size)))
    await until(lambda: bool(peer.statuses))
    assert peer.statuses == [status]
    assert ("eof" in peer.wire.done) == (status != 200)
    await peer.leave()


@pytest.mark.parametrize("data", [b"", GET + b"\r\n", POST + b"a wolf", b"nonsense\r\n\r\n", b"GET /" + b"a" * 128])
@in_virtual_time
async def test_a_connection_that_is_gone_is_freed_at_once(data: bytes) -> None:
    peer = Peer()
    protocol = weakref.ref(peer.protocol)
    peer._watch.cancel()  # it knows the connection that it looked at last
    gc.disable()  # many connections at once would be a long collection
    try:
        peer.sends(data)
        await asyncio.sleep(1)
        peer.protocol.connection_lost(None)
        del peer.protocol
        await asyncio.sleep(1)
        assert protocol() is None
    finally:
        gc.enable()


@in_virtual_time
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
    await peer.leave()


@in_virtual_time
async def test_no_more_is_read_ahead_than_needed_or_than_there_is_memory_for() -> None:
    peer = Peer(max_body_memory=400_000)
    peer.hold = asyncio.Event()
    peer.sends(GET + b"\r\n")
    await asyncio.sleep(0)
    peer.sends(b"x" * 65536)
    assert "pause" not in peer.wire.done
    peer.sends(b"x")
    assert "pause" in peer.wire.done
    peer.sends(b"x" * 140_000)
    assert "abort" in peer.wire.done
    peer.hold.set()
    await asyncio.sleep(0)
    await peer.leave()


@in_virtual_time
async def test_reading_goes_on_when_what_was_read_ahead_is_answered() -> None:
    peer = Peer()
    for answered in (3000, 6000):
        peer.hold = asyncio.Event()
        peer.sends((GET + b"\r\n") * 3000)
        assert "pause" in peer.wire.done
        peer.hold.set()
        await until(lambda answered=answered: len(peer.statuses) == answered)  # type: ignore[misc]
        assert "pause" not in peer.wire.done
    await peer.leave()


@in_virtual_time
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
    await peer.leave()


@in_virtual_time
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
    await peer.leave()


@in_virtual_time
async def test_a_refused_client_that_stays_is_dropped() -> None:
    peer = Peer()
    peer.sends(b"nonsense\r\n\r\n")
    await asyncio.sleep(1)
    assert peer.wire.done == {"eof"}
    await asyncio.sleep(2.5)
    assert peer.wire.done == {"eof", "abort"}
    assert peer.statuses == [400]
    await peer.leave()


@pytest.mark.parametrize(
    ("begin", "what"),
    [(GET + b"X: ", "the head of the request"), (CHUNKED + b"1;", "trailers and chunk headers")],
)
@in_virtual_time
async def test_what_is_too_large_is_named(begin: bytes, what: str) -> None:
    peer = Peer()
    peer.sends(begin + b"a" * 2100)
    await asyncio.sleep(0.001)
    assert peer.refusal.startswith(what)
    await peer.leave()


@in_virtual_time
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
    await peer.leave()


@pytest.mark.parametrize(
    ("data", "seconds", "message"),
    [
        (GET, 30, "the headers did not come within header_read_timeout=30 seconds"),
        (POST + b"a", 60, "the request body did not come within body_read_timeout=60 seconds"),
        (CHUNKED + b"1\r\na", 60, "the request body did not come within body_read_timeout=60 seconds"),
    ],
)
@in_virtual_time
async def test_slow_requests_are_refused_when_their_time_is_over(data: bytes, seconds: float, message: str) -> None:
    peer = Peer()
    peer.sends(data)
    await asyncio.sleep(seconds - 1)
    assert not peer.statuses
    await asyncio.sleep(2)
    assert peer.statuses == [408]
    assert peer.refusal == message
    assert peer.seen == ([] if data == GET else [("/echo", None)])
    peer.sends(b"x" * (1 << 20))
    assert "abort" not in peer.wire.done
    peer.sends(b"x")
    assert "abort" in peer.wire.done
    await peer.leave()


@in_virtual_time
async def test_a_large_body_has_more_time() -> None:
    peer = Peer()
    size = 16384 * 100
    peer.sends(POST.replace(b"6", b"%d" % (size + 1)), b"x" * size)
    await asyncio.sleep(155)
    assert not peer.statuses
    await asyncio.sleep(10)
    assert peer.statuses == [408]
    await peer.leave()


@pytest.mark.parametrize("data", [b"", GET + b"\r\n", POST + b"a wolf"])
@in_virtual_time
async def test_an_idle_connection_is_closed_after_its_time(data: bytes) -> None:
    peer = Peer()
    peer.sends(data)
    await asyncio.sleep(70)
    assert "close" not in peer.wire.done
    assert list(peer.connections.idle) == [peer.protocol]
    await asyncio.sleep(10)
    assert "close" in peer.wire.done
    await peer.leave()


@in_virtual_time
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
    await peer.leave()


@in_virtual_time
async def test_what_a_client_does_not_read_of_the_last_answer_is_dropped() -> None:
    peer = Peer()
    peer.sends(GET + b"Connection: close\r\n\r\n")
    await until(lambda: "close" in peer.wire.done)
    peer.wire.unsent = 1
    await asyncio.sleep(29)
    assert "abort" not in peer.wire.done
    await asyncio.sleep(2)
    assert "abort" in peer.wire.done
    await peer.leave()


@in_virtual_time
async def test_a_body_that_is_not_wanted_is_read_a_while_beyond_the_largest() -> None:
    peer = Peer(max_request_size=1000)
    peer.sends(POST.replace(b"/echo", b"/else").replace(b"6", b"5000000"))
    await until(lambda: peer.statuses == [200])
    peer.sends(b"x" * (1000 + (1 << 20)))
    assert "eof" not in peer.wire.done
    peer.sends(b"x")
    assert "eof" in peer.wire.done
    assert peer.statuses == [200]
    await peer.leave()


@pytest.mark.parametrize("follows", [b"nonsense\r\n\r\n", CHUNKED + b"nonsense", b"GET http:// HTTP/1.1\r\n\r\n"])
@in_virtual_time
async def test_what_is_refused_while_another_is_answered_ends_both(follows: bytes) -> None:
    peer = Peer()
    peer.hold = asyncio.Event()
    # It is parsed at once, because the end of a chunked body is not known before.
    peer.sends(CHUNKED + b"0\r\n\r\n" + follows)
    await asyncio.sleep(0)
    assert "abort" in peer.wire.done
    assert peer.statuses == []
    peer.hold.set()
    await peer.leave()


@pytest.mark.parametrize("answered", [0, 1])
@in_virtual_time
async def test_an_address_that_is_none_is_refused_whatever_was_answered_before(answered: int) -> None:
    peer = Peer()
    peer.sends(*[GET + b"\r\n"] * answered)
    await asyncio.sleep(0.001)
    peer.sends(b"GET http:// HTTP/1.1\r\n\r\n")
    assert peer.statuses == [200] * answered + [400]
    assert "eof" in peer.wire.done
    await peer.leave()


@pytest.mark.parametrize("method", [b"POST", b"GET"])
@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"other"])
@pytest.mark.parametrize("body", [b"Content-Length: 6\r\n\r\na wolf", CHUNKED[-30:] + b"6\r\na wolf\r\n0\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 100, 1 << 20])
@in_virtual_time
async def test_the_offer_of_another_protocol_is_ignored(method: bytes, offer: bytes, body: bytes, size: int) -> None:
    peer = Peer()
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAEAAEAA\r\n" % offer
    request = b"%s /echo HTTP/1.1\r\nHost: test\r\n" % method + upgrade + body
    data = (request + GET.replace(b"GET", b"HEAD") + upgrade + b"\r\n") * 2
    peer.sends(*(data[start : start + size] for start in range(0, len(data), size)))
    await until(lambda: len(peer.statuses) == 4)
    assert peer.statuses == [200] * 4
    assert peer.seen == [("/echo", b"a wolf"), ("/ping", b"")] * 2
    await peer.leave()


@in_virtual_time
async def test_the_offer_of_another_protocol_is_ignored_without_a_body_too() -> None:
    peer = Peer()
    peer.sends(GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    await until(lambda: peer.statuses == [200])
    assert peer.seen == [("/ping", b"")]
    await peer.leave()


@in_virtual_time
async def test_a_head_that_is_read_twice_counts_once() -> None:
    offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    for padding, status in ((1024, 200), (1025, 431)):
        peer = Peer()
        head = POST.removesuffix(b"\r\n") + offer
        peer.sends(head + b"X: " + b"a" * (padding - len(head) - 7) + b"\r\n\r\n", b"a wolf")
        await until(lambda peer=peer: bool(peer.statuses))  # type: ignore[misc]
        assert peer.statuses == [status]
        await peer.leave()


@in_virtual_time
async def test_a_proxy_is_not_what_this_is() -> None:
    peer = Peer()
    peer.sends(b"CONNECT test:80 HTTP/1.1\r\nHost: test\r\n\r\n" + GET)
    assert peer.statuses == [501]
    assert "eof" in peer.wire.done
    await peer.leave()


@pytest.mark.parametrize("path", [b"/else", b"/echo"])
@in_virtual_time
async def test_a_body_that_was_announced_and_not_asked_for_ends_the_connection(path: bytes) -> None:
    peer = Peer()
    head = POST.replace(b"/echo", path).removesuffix(b"\r\n") + b"Expect: 100-continue\r\n\r\n"
    peer.sends(head)
    await until(lambda: bool(peer.statuses))
    assert peer.statuses == [200 if path == b"/else" else 100]
    assert ("close" in peer.wire.done) == (path == b"/else")
    if path == b"/echo":
        peer.sends(b"a wolf")
        await until(lambda: len(peer.statuses) == 2)
        assert peer.seen == [("/echo", b"a wolf")]
        assert "close" not in peer.wire.done
    await peer.leave()


@in_virtual_time
async def test_a_body_that_was_refused_is_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    peer = Peer()
    peer.sends(CHUNKED.removesuffix(b"\r\n") + b"Expect: 100-continue\r\n\r\n" + b"-1\r\n")
    await asyncio.sleep(1)
    assert peer.statuses == [400]
    assert not [record for record in caplog.records if record.exc_info]
    await peer.leave()


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"GET /" + b"a" * 128 + b" HTTP/1.1\r\n\r\n", "GET /" + "a" * 128 + " 414 error=Refusal"),
        (b"nonsense\r\n\r\n", "- - 400 error=Refusal"),
        (GET + b"X-Request-Id: r-1\r\n" + b"a: b\r\n" * 10 + b"\r\n", "GET /ping 431 error=Refusal"),
    ],
)
@in_virtual_time
async def test_a_head_that_is_refused_has_its_line(data: bytes, line: str, caplog: pytest.LogCaptureFixture) -> None:
    peer = Peer()
    with caplog.at_level("INFO", "djl_trtllm.requests"):
        peer.sends(data)
    (record,) = (record for record in caplog.records if record.name == "djl_trtllm.requests")
    assert record.getMessage().startswith(line)
    if b"r-1" in data:
        assert record.request_id == "r-1"  # type: ignore[attr-defined]
    await peer.leave()
