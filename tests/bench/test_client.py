from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from djl_trtllm.bench import client as module
from djl_trtllm.bench.client import Client, Target, clock, fetch
from djl_trtllm.bench.streams import EventReader, Stream
from djl_trtllm.errors import BenchmarkError
from tests.support.certificates import Certificates
from tests.support.stub_http import END, HEAD, Answer, Asked, chunked, streamed, stub_server, usage_events, whole


def against(answer: Answer, use: Callable[[Client, int], Awaitable[object]], timeout: float = 30.0) -> None:
    """Run `use` with a client of a server that answers so."""

    async def main() -> None:
        async with stub_server(answer) as port:
            client = Client(Target("127.0.0.1", port), timeout)
            await use(client, port)
            client.close()

    asyncio.run(main())


def always(response: bytes) -> Answer:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(response)

    return answer


async def ask(client: Client) -> tuple[int, Stream]:
    stream = Stream(clock())
    status = await client.send(client.target.request("/v1/x", b"{}"), EventReader(stream))
    return status, stream


def test_a_stream_is_read_to_its_end_and_its_connection_used_again() -> None:
    connections = set()

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        connections.add(writer.get_extra_info("peername"))
        writer.write(streamed(*usage_events(3)))

    async def use(client: Client, port: int) -> None:
        for _ in range(2):
            status, stream = await ask(client)
            assert (status, stream.tokens, stream.error) == (200, 3, None)
            assert stream.ended is not None and stream.intended <= stream.sent <= stream.times[0] <= stream.ended

    against(answer, use)
    assert len(connections) == 1


def test_a_body_is_json_with_its_length() -> None:
    head, _, body = Target("host", 80).request("/v1/x", b"{}").partition(b"\r\n\r\n")
    assert {b"Content-Type: application/json", b"Content-Length: 2"} <= set(head.split(b"\r\n")) and body == b"{}"
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


def test_a_connection_that_was_idle_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = set()
    monkeypatch.setattr(module, "_MOST_IDLE", 0.0)

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        connections.add(writer.get_extra_info("peername"))
        writer.write(streamed(*usage_events(1)))

    async def use(client: Client, port: int) -> None:
        await ask(client)
        await ask(client)

    against(answer, use)
    assert len(connections) == 2


def test_an_error_has_its_status_and_the_beginning_of_its_body() -> None:
    async def use(client: Client, port: int) -> None:
        status, stream = await ask(client)
        assert (status, stream.error, stream.detail) == (429, "HTTP 429", "the queue is full")
        assert stream.ended is not None

    against(always(whole(429, b"the queue is full")), use)


def test_a_connection_that_closes_in_mid_stream_is_an_error_and_its_tokens_stay() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunked(*usage_events(2)))
        await writer.drain()
        writer.close()

    async def use(client: Client, port: int) -> None:
        _, stream = await ask(client)
        assert (stream.error, stream.tokens) == ("connection closed during the response", 2)

    against(answer, use)


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"".join(usage_events(2)))
        await writer.drain()
        writer.close()

    async def use(client: Client, port: int) -> None:
        _, stream = await ask(client)
        assert (stream.error, stream.tokens) == (None, 2)

    against(answer, use)


def test_a_response_without_an_end_is_an_error_after_the_timeout() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunked(*usage_events(1)))

    async def use(client: Client, port: int) -> None:
        _, stream = await ask(client)
        assert (stream.error, stream.tokens) == ("no end within 0.2 s", 1)

    against(answer, use, timeout=0.2)


def test_what_is_not_http_is_an_error() -> None:
    async def use(client: Client, port: int) -> None:
        status, stream = await ask(client)
        assert status == 0 and str(stream.error).startswith("not HTTP")

    against(always(b"SSH-2.0-OpenSSH\r\n\r\n"), use)


def test_a_refused_connection_is_an_error() -> None:
    async def use(client: Client, port: int) -> None:
        status, stream = await ask(Client(Target("127.0.0.1", 1), 30.0))
        assert (status, stream.error) == (0, "connection refused")

    against(always(END), use)


def test_a_small_request_has_its_body() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        assert (asked.method, asked.path) == ("GET", "/v1/models")
        writer.write(whole(200, b"[]"))

    async def use(client: Client, port: int) -> None:
        assert await fetch(client, "/v1/models") == (200, b"[]", None)

    against(answer, use)


def test_headers_arrive_as_they_were_given() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        assert asked.headers["authorization"] == "Bearer key"
        writer.write(whole(200, b""))

    async def use(client: Client, port: int) -> None:
        target = Target.parse(f"127.0.0.1:{port}", {"Authorization": "Bearer key"})
        assert (await fetch(Client(target, 30.0), "/", b"{}"))[0] == 200

    against(answer, use)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://host", ("host", 80, "/v1/chat/completions")),
        ("host:8080", ("host", 8080, "/v1/chat/completions")),
        ("https://host/", ("host", 443, "/v1/chat/completions")),
        ("http://host/v1", ("host", 80, "/v1/chat/completions")),
        ("http://host/v1/", ("host", 80, "/v1/chat/completions")),
        ("http://host/some/v1", ("host", 80, "/some/v1/chat/completions")),
        ("http://host/some", ("host", 80, "/some/v1/chat/completions")),
        ("http://host/v1/chat/completions", ("host", 80, "/v1/chat/completions")),
        ("http://[::1]:9", ("::1", 9, "/v1/chat/completions")),
    ],
)
def test_an_address_may_be_that_of_the_host_of_the_api_or_of_the_route(url: str, address: tuple[str, int, str]) -> None:
    target = Target.parse(url, {})
    assert (target.host, target.port, target.path("/v1/chat/completions")) == address
    assert (target.tls is not None) == url.startswith("https")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host/?a=b",
        "http://host/#a",
        "http://host/a b",
        "http://user:pass@host",
    ],
)
def test_a_wrong_address_is_an_error(url: str) -> None:
    with pytest.raises(BenchmarkError, match="URL"):
        Target.parse(url, {})


@pytest.mark.parametrize("header", [("a b", "c"), ("", "c"), ("a", "c\r\nd: e"), ("a", "é")])
def test_a_header_that_cannot_be_sent_is_an_error(header: tuple[str, str]) -> None:
    with pytest.raises(BenchmarkError, match="header"):
        Target.parse("http://host", dict([header]))


def test_certificates_need_tls_and_have_to_be_readable(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="does not use TLS"):
        Target.parse("http://host", {}, "ca.pem")
    with pytest.raises(BenchmarkError, match="cannot read certificates"):
        Target.parse("https://host", {}, str(tmp_path / "ca.pem"))


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
