"""Images of requests are read beside the event loop, with bounds, and fetched from nowhere but allowed public hosts."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.model.vision import Vision
from djl_trtllm.request import Image, ImageSource
from djl_trtllm.service import prompts as images
from djl_trtllm.service.prompts import read_images
from tests.support.tables import by_rows
from tests.support.vision import data_url, encoded, picture, png

VISION = Vision(placeholder=7, side=28, least=3136, most=50176)
FILE = encoded(picture(84, 56))
MOST = 100_000


def read(*urls: str, most_bytes: int = MOST) -> tuple[Image, ...]:
    sources = [ImageSource(url, f"messages[0].content[{at}]") for at, url in enumerate(urls)]
    return asyncio.run(read_images(sources, VISION, most_bytes, COUNTED))


COUNTED: Counter[str] = Counter()


def refusal(*urls: str, most_bytes: int = MOST) -> str:
    counted = COUNTED.total()
    with pytest.raises(InvalidRequestError) as caught:
        read(*urls, most_bytes=most_bytes)
    assert COUNTED.total() == counted + 1
    return str(caught.value)


@by_rows(
    ("url", "reason"),
    [
        (data_url(encoded(picture(804, 4))), "size"),
        (data_url(png(20_000, 20_000)), "size"),
        ("data:image/png;base64,AAAA", "format"),
        ("data:image/png,abc", "format"),
        (data_url(FILE[:-200]), "damaged"),
        ("http://127.0.0.1:1/a.png", "address"),
        ("http://localhost:99999/a.png", "address"),
    ],
)
def test_an_image_that_is_not_taken_counts_by_its_reason(url: str, reason: str) -> None:
    counted = COUNTED[reason]
    refusal(url)
    assert COUNTED[reason] == counted + 1


def test_images_come_in_order_with_their_sizes_and_tokens() -> None:
    other = encoded(picture(56, 112), "JPEG")
    assert read(data_url(FILE), data_url(other, "image/jpeg")) == (
        Image(FILE, 84, 56, 6),
        Image(other, 56, 112, 8),
    )


@pytest.mark.parametrize(
    "url", ["data:image/png,abc", "data:image/png;base64", "data:;base64,@@", "data:;base64,AAA", "data:;base64,ä"]
)
def test_what_is_no_base64_is_refused_by_its_place(url: str) -> None:
    assert "'messages[0].content[1]'" in refusal(data_url(FILE), url)


def test_an_image_that_is_too_long_for_the_model_is_refused() -> None:
    assert "200 times" in refusal(data_url(encoded(picture(804, 4))))


def test_the_images_of_a_request_share_their_bytes() -> None:
    assert read(data_url(FILE), data_url(FILE), most_bytes=2 * len(FILE) + 2)
    told = refusal(data_url(FILE), data_url(FILE), most_bytes=2 * len(FILE) - 3)
    assert "'messages[0].content[1]'" in told and f"{len(FILE) - 3} bytes" in told


def test_the_images_of_a_request_share_their_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MOST_PIXELS", 2 * 84 * 56)
    assert len(read(data_url(FILE), data_url(FILE))) == 2
    told = refusal(data_url(FILE), data_url(FILE), data_url(encoded(picture(1, 1))))
    assert "'messages[0].content[2]'" in told and "1 x 1 pixels" in told


# -- addresses ---------------------------------------------------------------------------------------------------------


class Host:
    """A server that gives every connection one answer, and then stays silent if it `hangs`, or sends `drips` bytes."""

    def __init__(self, answer: bytes, *, hangs: bool = False, drips: int = 0) -> None:
        self.requests: list[bytes] = []
        self.dripped = 0
        self._answer, self._hangs, self._drips = answer, hangs, drips
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def url(self, path: str = "/a.png") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.requests.append(connection.recv(65536))
                connection.sendall(self._answer)
                with suppress(OSError):
                    while self.dripped < self._drips:
                        time.sleep(0.05)
                        connection.sendall(bytes(1))
                        self.dripped += 1
                if self._hangs:
                    self._ended.wait(60)

    def close(self) -> None:
        self._ended.set()
        self._socket.close()


@contextmanager
def host(answer: bytes, *, hangs: bool = False, drips: int = 0) -> Iterator[Host]:
    found = Host(answer, hangs=hangs, drips=drips)
    try:
        yield found
    finally:
        found.close()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own addresses count as public ones."""
    address = ipaddress.ip_address("8.8.8.8")
    given = SimpleNamespace(ip_address=lambda text: address, IPv6Address=ipaddress.IPv6Address)
    monkeypatch.setattr(images, "ipaddress", given)


@pytest.mark.usefixtures("public")
def test_an_image_is_fetched_without_a_header_of_its_own() -> None:
    with host(ok(FILE)) as found:
        assert read(found.url("/a%20b.png?size=1#part")) == (Image(FILE, 84, 56, 6),)
    (request,) = found.requests
    line, *headers = request.decode().strip().split("\r\n")
    assert line == "GET /a%20b.png?size=1 HTTP/1.1"
    assert {header.partition(":")[0] for header in headers} == {"Host", "Accept-Encoding", "Accept", "User-Agent"}


@by_rows(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("::1", "fe80::1", "fc00::1", "fec0::1", "::ffff:127.0.0.1", "::127.0.0.1"),
        *("64:ff9b::10.0.0.1", "64:ff9b:1::8.8.8.8", "2002:808:808::1", "224.0.0.1", "ff0e::1"),
    ],
)
def test_no_connection_is_made_to_an_address_that_is_not_public(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def resolve(name: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (given, port))
            for given in ("8.8.8.8", "2606:4700::1", "64:ff9b::8.8.8.8", address)
        ]  # one of several is enough

    made = SimpleNamespace(getaddrinfo=resolve, SOCK_STREAM=socket.SOCK_STREAM, socket=lambda *_: pytest.fail("made"))
    monkeypatch.setattr(images, "socket", made)
    told = refusal("https://images.example.com/a.png?token=secret")
    assert f"the host images.example.com has the address {address}, which is not a public one" in told
    assert "secret" not in told


def test_nothing_is_sent_to_this_machine() -> None:
    with host(ok(FILE)) as found:
        assert "not a public one" in refusal(found.url())
    assert found.requests == []
    assert "the host ::1 has the address ::1, which is not a public one" in refusal("http://[::1]/a.png")


@pytest.mark.usefixtures("public")
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n", "302; redirects are not followed"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "404"),
        (ok(bytes(MOST + 1)), f"more than the {MOST} bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(MOST + 1), f"more than the {MOST} bytes"),
        (b"nonsense\r\n\r\n", "cannot be fetched"),
        (ok(FILE)[:-100], "damaged"),
    ],
    ids=["redirect", "missing", "large", "large without a length", "no HTTP", "cut"],
)
def test_what_is_not_an_image_of_a_bounded_size_is_refused(answer: bytes, told: str) -> None:
    with host(answer) as found:
        assert told in refusal(found.url())
    assert len(found.requests) == 1


@pytest.mark.usefixtures("public")
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nA: b\r\n", ok(FILE)[:-100]])
def test_a_host_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    monkeypatch.setattr(images, "_FETCH_SECONDS", 0.3)
    with host(answer, hangs=True) as found:
        assert "'messages[0].content[0]'" in refusal(found.url())


@pytest.mark.usefixtures("public")
@pytest.mark.parametrize("head", ["HTTP/1.1 200 OK\r\nConnection: close", "HTTP/1.0 200 OK", "HTTP/1.1 200 OK\r\nA: b"])
def test_a_host_that_sends_a_little_at_a_time_is_left(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    monkeypatch.setattr(images, "_FETCH_SECONDS", 0.3)
    answer = f"{head}\r\nContent-Length: 1000\r\n\r\n".encode()
    with host(answer, drips=100) as found:
        assert "cannot be fetched within 0.3 seconds" in refusal(found.url())
        assert found.dripped < 100


@pytest.mark.usefixtures("public")
def test_a_host_that_never_ends_its_handshake_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_FETCH_SECONDS", 0.3)
    # The beginning of a long record of TLS.
    with host(b"\x16\x03\x03\x40\x00", drips=100) as found:
        assert "cannot be fetched within 0.3 seconds" in refusal(found.url().replace("http", "https"))
        assert found.dripped < 100


@pytest.mark.usefixtures("public")
def test_a_query_without_a_path_is_one_of_the_root() -> None:
    with host(ok(FILE)) as found:
        read(found.url("?size=1"))
    assert found.requests[0].startswith(b"GET /?size=1 HTTP/1.1\r\n")


@pytest.mark.parametrize("url", ["http://localhost:99999/a", "http://localhost:1/a", "https://none.invalid/a"])
def test_an_address_that_leads_nowhere_is_refused(url: str) -> None:
    assert "'messages[0].content[0]'" in refusal(url)
