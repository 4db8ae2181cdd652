from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from djl_trtllm.bench import client as module
from djl_trtllm.bench.client import Client, Counted, EventReader, Reader, Stream, Target, TokenReader, clock, fetch
from djl_trtllm.errors import BenchmarkError
from tests.support.server import Certificates
from tests.support.stub_http import HEAD, Answer, Asked, chunked, streamed, stub_server, usage_events, whole
from tests.support.tables import by_rows, by_table


def against(answer: Answer, use: Callable[[Client, int], Awaitable[object]], timeout: float = 30.0) -> None:
    """Run `use` with a client of a server that answers so."""

    async def main() -> None:
        async with stub_server(answer) as port:
            client = Client(Target("127.0.0.1", port), timeout)
            await use(client, port)
            client.close()

    asyncio.run(main())


CLOSED = "connection closed during the response"


async def ask(client: Client) -> tuple[int, Stream]:
    stream = Stream(clock())
    status = await client.send(client.target.request("/v1/x", b"{}"), EventReader(stream))
    return status, stream


@pytest.mark.parametrize(("idle", "connections"), [(60.0, 1), (0.0, 3)])
def test_a_stream_is_read_to_its_end_and_its_connection_used_again_while_it_is_fresh(
    idle: float, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_IDLE", idle)
    seen = []

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("peername"))
        if len(seen) < 3:
            writer.write(streamed(*usage_events(3)))
        else:
            writer.close()

    async def use(client: Client, port: int) -> None:
        for _ in range(2):
            status, stream = await ask(client)
            assert (status, stream.tokens, stream.error) == (200, 3, None)
            assert stream.ended is not None and stream.intended <= stream.sent <= stream.times[0] <= stream.ended
        status, stream = await ask(client)
        assert (status, stream.error) == (0, CLOSED), "the status of the response before is not that of this one"

    against(answer, use)
    assert len(set(seen)) == connections


def test_a_request_that_is_given_up_while_it_connects_ends_at_once() -> None:
    async def never(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def use(client: Client, port: int) -> None:
        for turns in range(20):  # of the event loop; there is a connection after some
            asking = asyncio.ensure_future(ask(client))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    against(never, use)


def test_a_body_is_json_with_its_length() -> None:
    head, _, body = Target("host", 80).request("/v1/x", b"{}").partition(b"\r\n\r\n")
    fields = {b"Content-Type: application/json", b"Content-Length: 2", b"User-Agent: djl-trtllm-bench", b"Accept: */*"}
    assert fields <= set(head.split(b"\r\n")) and body == b"{}"
    assert Target("host", 80).request("/v1/x", None).startswith(b"GET /v1/x HTTP/1.1\r\n")


@pytest.mark.parametrize("ended", ["closed", "cancelled"])
def test_a_client_that_ends_leaves_no_connection_open(ended: str) -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await writer.wait_closed()

    async def use(client: Client, port: int) -> None:
        task = asyncio.ensure_future(ask(client))
        await arrived.wait()
        (connection,) = client._open
        if ended == "cancelled":
            task.cancel()
        else:
            client.close()
        await asyncio.gather(task, return_exceptions=True)
        assert connection.closed
        gone.set()

    against(answer, use)
    assert gone.is_set()


@pytest.mark.parametrize(
    ("response", "closes", "expected"),
    [
        (whole(429, b"the queue is full"), False, (429, "HTTP 429", "the queue is full", 0)),
        (HEAD + chunked(*usage_events(2)), True, (200, CLOSED, "", 2)),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"".join(usage_events(2)), True, (200, None, "", 2)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + b"".join(usage_events(2)), True, (200, CLOSED, "", 2)),
        (HEAD + chunked(*usage_events(1)), False, (200, "no end within 0.2 s", "", 1)),
        (b"SSH-2.0-OpenSSH\r\n\r\n", False, (0, "not HTTP", "", 0)),
    ],
    ids=["an error", "closed in mid-stream", "ended by its connection", "cut", "no end", "not HTTP"],
)
def test_how_a_response_ends_is_known(
    response: bytes, closes: bool, expected: tuple[int, str | None, str, int]
) -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(response)
        if closes:
            await writer.drain()
            writer.close()

    async def use(client: Client, port: int) -> None:
        status, stream = await ask(client)
        error = None if stream.error is None else stream.error.partition(":")[0]
        assert (status, error, stream.detail, stream.tokens) == expected
        assert stream.ended is not None

    against(answer, use, timeout=0.2 if expected[1] and "no end" in expected[1] else 30.0)


def test_a_refused_connection_is_an_error() -> None:
    status, stream = asyncio.run(ask(Client(Target("127.0.0.1", 1), 30.0)))
    assert (status, stream.error) == (0, "connection refused")


def test_small_requests_have_their_headers_and_their_body() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        assert (asked.method, asked.path, asked.headers["authorization"]) == ("GET", "/v1/models", "Bearer key")
        writer.write(whole(200, b"[]"))

    async def use(client: Client, port: int) -> None:
        target = Target.parse(f"127.0.0.1:{port}", {"Authorization": "Bearer key"})
        assert await fetch(Client(target, 30.0), "/v1/models") == (200, b"[]", None)

    against(answer, use)


@by_table("url", "address")
def test_an_address_may_be_that_of_the_host_of_the_api_or_of_the_route(url: str, address: list[object]) -> None:
    target = Target.parse(url, {})
    assert [target.host, target.port, target.path("/v1/chat/completions")] == address
    assert (target.tls is not None) == url.startswith("https")


@by_table("url", "headers", "ca", "error")
def test_what_cannot_be_addressed_or_sent_is_an_error(
    url: str, headers: dict[str, str], ca: str | None, error: str
) -> None:
    with pytest.raises(BenchmarkError, match=error):
        Target.parse(url, headers, ca)


def test_a_server_with_a_certificate_of_ones_own_authority_is_trusted(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(whole(200, b"yes"))
            await writer.drain()

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.certificate, certificates.key)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        trusting = Client(Target.parse(url, {}, str(certificates.authority)), 30.0)
        assert (await fetch(trusting, "/"))[:2] == (200, b"yes")
        status, _, error = await fetch(Client(Target.parse(url, {}), 30.0), "/")
        assert status == 0 and "CERTIFICATE_VERIFY_FAILED" in str(error)
        trusting.close()
        server.close()

    asyncio.run(main())


CUT = "the response ended before its last token"
TOKEN = b'{"token":{"id":1,"text":"a"}}\n'


def read(reader: Reader, *pieces: bytes) -> Stream:
    """Feed pieces, each a second after the one before, and end."""
    for second, piece in enumerate(pieces):
        reader.feed(piece, float(second))
    reader.end()
    return reader.stream


def event(text: str = "", tokens: int | None = None, prompt: int = 5) -> bytes:
    usage = "null" if tokens is None else f'{{"prompt_tokens":{prompt},"completion_tokens":{tokens}}}'
    return f'data: {{"choices":[{{"delta":{{"content":"{text}"}}}}],"usage":{usage}}}\n\n'.encode()


def last(tokens: int) -> bytes:
    return b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % tokens


def of_event(fields: str) -> bytes:
    return f"data: {{{fields}}}\n\n".encode()


TEXT = of_event('"choices":[{"text":"b"}]')
ROLE = of_event('"choices":[{"delta":{"role":"assistant","content":""}}]')
LINE = b'{"choices":[{"delta":{"content":"a"}}]}\n'
WHOLE = b'{"token":{"id":3},"generated_text":"abc"}\n'
ESCAPED = b'{"token":{"id":1,"text":"{\\"token\\": 2}"}}\n'


@by_rows(
    ("reader", "pieces", "arrivals", "counted"),
    [
        (TokenReader, (b'{"token":{"id":1}}\n{"tok', b'en":{"id":2}}\n' + WHOLE), {0: 1, 1: 2}, Counted.EACH),
        (TokenReader, (ESCAPED,), {0: 1}, Counted.EACH),
        (TokenReader, (b'{"token":{"error_msg":"no"}}\n',), {}, Counted.EVENTS),
        (EventReader, (event("", 0), event("a", 1), event("bcd", 4), last(5)), {1: 1, 2: 3, 3: 1}, Counted.USAGE),
        (EventReader, (event("a", 1) + event("b", 2), event("c", 3)), {0: 2, 1: 1}, Counted.USAGE),
        (EventReader, (event("a", 1), event("", 1), event("b", 2)), {0: 1, 2: 1}, Counted.USAGE),
        (EventReader, (ROLE, event("a"), event("b"), last(2)), {1: 1, 2: 1}, Counted.EACH),
        (EventReader, (event("a"), event("b"), last(5)), {0: 2, 1: 3}, Counted.TOTAL),
        (EventReader, (event("a"), event("b"), last(0)), {0: 1, 1: 1}, Counted.EVENTS),
        (EventReader, (event("a"), TEXT), {0: 1, 1: 1}, Counted.EVENTS),
        (EventReader, (LINE, LINE), {0: 1, 1: 1}, Counted.EVENTS),
        *(
            (EventReader, (of_event(f'"choices":[{{"delta":{{{field}}}}}]'),), {0: 1}, Counted.EVENTS)
            for field in ('"content":"a"', '"reasoning_content":"a"', '"reasoning":"a"', '"tool_calls":[{"index":0}]')
        ),
    ],
)
def test_tokens_arrive_when_their_events_do_and_are_counted_as_well_as_is_known(
    reader: type[Reader], pieces: tuple[bytes, ...], arrivals: dict[int, int], counted: Counted
) -> None:
    stream = read(reader(Stream(0.0)), *pieces)
    assert dict(zip(stream.times, stream.counts, strict=True)) == arrivals
    assert (stream.tokens, stream.counted) == (sum(arrivals.values()), counted)


def test_the_usage_has_the_tokens_of_the_prompt() -> None:
    assert read(EventReader(Stream(0.0)), event("a", 1), last(1)).prompt_tokens == 5


def test_without_usage_the_requested_length_is_the_count_where_it_is_known() -> None:
    pieces = of_event('"text_output":"a"'), of_event('"text_output":"b"')
    stream = read(EventReader(Stream(0.0, requested=8)), *pieces)
    assert (list(stream.counts), stream.counted) == ([4, 4], Counted.REQUESTED)
    assert read(EventReader(Stream(0.0, requested=8)), b": comment\n\n").tokens == 0


@by_rows(
    ("reader", "pieces", "tokens", "error"),
    [
        (TokenReader, (TOKEN, b'{"token":{"id":-1,"error_msg":"it failed"},"details":{}}\n'), 1, "it failed"),
        (TokenReader, (TOKEN, b'data:{"error":"it failed","error_type":"generation"}\n\n'), 1, "it failed"),
        (TokenReader, (b'{"token":{"id":1,"text":"\\"error_msg\\""},"generated_text":"a"}\n',), 1, None),
        (EventReader, (event("a"), of_event('"error":{"message":"too long","code":400}')), 1, "too long"),
        (EventReader, (event("a"), b"data: {nonsense\n\n"), 1, "nonsense"),
        (EventReader, (b'{"error":{"message":"no such model"}}',), 0, "no such model"),
        (EventReader, (b"<html>",), 0, "a response without tokens"),
        *((reader, (b": comment\n\n",), 0, "a response without tokens") for reader in (TokenReader, EventReader)),
    ],
)
def test_an_error_in_a_stream_is_no_token_and_a_text_about_errors_no_error(
    reader: type[Reader], pieces: tuple[bytes, ...], tokens: int, error: str | None
) -> None:
    stream = read(reader(Stream(0.0)), *pieces)
    assert stream.tokens == tokens
    assert (stream.error is None) if error is None else (error in str(stream.error))
    assert stream.detail == ("<html>" if pieces == (b"<html>",) else "")


@by_rows(
    ("reader", "last", "error"),
    [
        (TokenReader, b"", CUT),
        (TokenReader, b'data:{"token":{"id":2},"generated_text":null,"details":null}\n', CUT),
        (TokenReader, b'{"token":{"id":2,"text":"\\"generated_text\\": 1"}}\n', CUT),
        (TokenReader, b'data:{"token":{"id":2},"generated_text":"ab","details":null}\n\n', None),
        (TokenReader, b'{"token": {"id": 2}, "generated_text": ""}\n', None),
        (EventReader, event("b"), CUT),
        (EventReader, b"data: [DONE]\n\n", None),
        (EventReader, b'{"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}\n', None),
        (EventReader, b'{"choices":[{"delta":{"content":"b"},"finish_reason":null}]}\n', CUT),
    ],
)
def test_a_response_is_whole_only_with_its_last_token(reader: type[Reader], last: bytes, error: str | None) -> None:
    stream = read(reader(Stream(0.0, requested=9)), TOKEN if reader is TokenReader else event("a"), last, b"\n")
    assert stream.error == error


def test_tritons_events_have_no_last_one() -> None:
    assert read(EventReader(Stream(0.0)), b'data: {"text_output":"a"}\n\n').error is None


@pytest.mark.parametrize(
    ("reader", "last"),
    [
        (TokenReader, b'{"token":{"id":2},"generated_text":"ab"}'),
        (EventReader, b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}'),
    ],
)
def test_a_last_line_without_its_end_is_read(reader: type[Reader], last: bytes) -> None:
    stream = read(reader(Stream(0.0)), TOKEN if reader is TokenReader else event("a"), last)
    assert (list(stream.times), stream.error) == ([0.0, 1.0], None)


def test_the_text_of_an_error_is_bounded() -> None:
    reader = Reader(Stream(0.0))
    for _ in range(3):
        reader.feed(b"x" * (1 << 19), 0.0)
    assert len(reader.body) == 1 << 20
