"""Requests that would cost a server much more than their sender, if it did what they ask for."""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.support.client import PING, raw_post
from tests.support.pings import cpu_seconds
from tests.support.processes import PATIENCE, InBackground, wait_until
from tests.support.server import Server
from tests.support.vision import chunk, data_url, encoded, image_part, png, text_bomb

# -- A client that behaves, and what it sees: the time of /ping and of the first token, and the server's memory --------

STREAM = raw_post(
    json.dumps({"inputs": "the wolf", "parameters": {"max_new_tokens": 4}, "stream": True}).encode(),
    "Connection: close",
)


class Times:
    """Seconds until each answer: those that passed, and CPU time that the server used meanwhile.

    The second is what passes where the server has a core of its own, and does not depend on who else uses the machine.
    """

    def __init__(self) -> None:
        self.passed: list[float] = []
        self.used: list[float] = []


def late(values: Iterable[float]) -> float:
    """The 99.9th percentile; 0 without values."""
    ordered = sorted(values)
    return ordered[len(ordered) * 999 // 1000] if ordered else 0.0


def loop_seconds(pid: int) -> float:
    """CPU time of a process' main thread, in which a server's event loop runs (proc_pid_schedstat: nanoseconds)."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


@dataclass
class Seen:
    """Times of each /ping, with its connection, and of the first token of each stream; largest RSS in bytes."""

    pings: Times = field(default_factory=Times)
    first_tokens: Times = field(default_factory=Times)
    failures: list[bytes] = field(default_factory=list)
    rss: int = 0


def observe(server: Server, seconds: float) -> Seen:
    """Ask for /ping and for short streams, one after the other, for this time."""
    seen = Seen()
    end = time.monotonic() + seconds

    def ping() -> None:
        while time.monotonic() < end:
            _ask(server, PING, b"Healthy", seen.pings, seen.failures)
            time.sleep(0.02)

    def stream() -> None:
        while time.monotonic() < end:
            _ask(server, STREAM, b'"token"', seen.first_tokens, seen.failures)
            time.sleep(0.02)

    threads = [threading.Thread(target=work) for work in (ping, stream)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.rss = max(seen.rss, server.process.memory_info().rss)
        time.sleep(0.05)
    return seen


def _ask(server: Server, request: bytes, mark: bytes, times: Times, failures: list[bytes]) -> None:
    started, before = time.monotonic(), cpu_seconds(server.process.pid)
    received = b""
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            connection.sendall(request)
            while mark not in received and (data := connection.recv(65536)):
                received += data
            if mark in received:
                times.passed.append(time.monotonic() - started)
                times.used.append(cpu_seconds(server.process.pid) - before)
                while request is STREAM and connection.recv(65536):
                    pass
            else:
                failures.append(received[:400])
    except OSError as error:
        failures.append(repr(error).encode())


# -- what /ping says all along -----------------------------------------------------------------------------------------


class Pinging(InBackground):
    """Asks for /ping during the block, and keeps each status with the time of its arrival."""

    def __init__(self, server: Server) -> None:
        self.seen: list[tuple[float, int]] = []
        self._server = server
        super().__init__()

    @property
    def statuses(self) -> list[int]:
        """The statuses in their order."""
        return [status for _, status in self.seen]

    def recovered(self) -> float:
        """When a 200 first came after a 503; waits for it."""
        wait_until(lambda: 503 in self.statuses and 200 in self._since_503(), what="recovery")
        later = self.seen[self.statuses.index(503) :]
        return next(at for at, status in later if status == 200)

    def _since_503(self) -> list[int]:
        statuses = self.statuses
        return statuses[statuses.index(503) :]

    def _run(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=300, trust_env=False) as client:
            while not self._end.is_set():
                status = client.get("/ping").status_code
                self.seen.append((time.monotonic(), status))
                time.sleep(0.01)


CHUNKED = b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
_MB = 1_000_000


class Hostile(NamedTuple):
    """`status` is that of the response, 0 where the connection is only closed. `data` may be more than is read."""

    name: str
    status: int
    data: bytes


def send(port: int, data: bytes) -> tuple[int, float]:
    """The status of the response, 0 if there is none; and the time from the last byte that the server took to it.

    What the server does not want any more is not sent.
    """
    left = memoryview(data)
    with socket.create_connection(("127.0.0.1", port)) as connection, selectors.DefaultSelector() as ready:
        connection.setblocking(False)
        ready.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        sent = time.perf_counter()
        while True:
            ((_, events),) = ready.select(60)
            try:
                if events & selectors.EVENT_READ:
                    head = connection.recv(4096)
                    return int(head.split(b" ", 2)[1]) if head else 0, time.perf_counter() - sent
                left = left[connection.send(left[: 1 << 18]) :]
            except OSError:
                return 0, time.perf_counter() - sent
            sent = time.perf_counter()
            if not left:
                ready.modify(connection, selectors.EVENT_READ)


def requests() -> Iterator[Hostile]:
    """Every hostile request, each made when it is its turn."""
    yield from _heads()
    yield from _framing()
    yield from _sizes()
    yield from _json()
    yield from _prompts()
    yield from _parameters()
    yield from _other_dialects()
    yield from _images()


def _post(body: Any, path: str = "/invocations", *headers: str) -> bytes:
    return raw_post(body if isinstance(body, bytes) else json.dumps(body).encode(), *headers, path=path)


def _lmi(inputs: Any = "the wolf", **parameters: Any) -> bytes:
    return _post({"inputs": inputs, "parameters": {"max_new_tokens": 1, **parameters}})


def _chat(*messages: Any, **members: Any) -> bytes:
    return _post({"messages": list(messages), "max_tokens": 1, **members}, "/v1/chat/completions")


def _heads() -> Iterator[Hostile]:
    yield Hostile("an address of 16 MB", 414, b"GET /" + b"a" * 16 * _MB + b" HTTP/1.1\r\n\r\n")
    yield Hostile("a query of 8 kB of &", 200, b"GET /ping?" + b"&" * 8000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    yield Hostile("a header of 16 MB", 431, PING[:-2] + b"X: " + b"a" * 16 * _MB + b"\r\n\r\n")
    yield Hostile("a header's name of 16 MB", 431, PING[:-2] + b"a" * 16 * _MB + b": b\r\n\r\n")
    yield Hostile("1,000,000 headers", 431, PING[:-2] + b"a: b\r\n" * _MB + b"\r\n")
    yield Hostile("20 MB of empty lines", 431, b"\r\n" * 10 * _MB)
    yield Hostile("1,000,000 trailers", 431, CHUNKED + b"0\r\n" + b"a: b\r\n" * _MB + b"\r\n")
    yield Hostile("a method of 16 MB", 400, b"A" * 16 * _MB)
    yield Hostile("TLS to a port without", 400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(400))
    yield Hostile("HTTP/2 with prior knowledge", 400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(400))
    yield Hostile("a custom attribute content-length", 200, _post(
        {"inputs": "the wolf", "parameters": {"max_new_tokens": 1}}, "/invocations",
        "X-Amzn-SageMaker-Custom-Attributes: content-length=5,transfer-encoding=chunked",
    ))  # fmt: skip


def _framing() -> Iterator[Hostile]:
    yield Hostile("two lengths", 400, b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n")
    both = b"POST /invocations HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + PING
    yield Hostile("a length and chunks", 400, both)
    yield Hostile("chunks twice", 400, CHUNKED[:-2] + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n")
    yield Hostile("a length with a sign", 400, b"POST / HTTP/1.1\r\nContent-Length: +5\r\n\r\nabcde")
    yield Hostile("a length of 5,000 digits", 400, b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n")
    yield Hostile("a space before the colon", 400, b"POST / HTTP/1.1\r\nContent-Length : 5\r\n\r\nabcde")
    yield Hostile("a folded header", 400, b"GET /ping HTTP/1.1\r\nA: b\r\n Content-Length: 5\r\n\r\n")
    yield Hostile("a NUL in a header", 400, b"GET /ping HTTP/1.1\r\nA: b\0c\r\n\r\n")
    yield Hostile("a chunk's extension of 16 MB", 431, CHUNKED + b"1;" + b"a" * 16 * _MB)
    yield Hostile("a chunk of a negative size", 400, CHUNKED + b"-1\r\na\r\n0\r\n\r\n")
    yield Hostile("a chunk of 20 digits", 400, CHUNKED + b"F" * 20 + b"\r\na\r\n")
    yield Hostile("16 MB in chunks of one byte", 431, CHUNKED + b"1\r\na\r\n" * (16 * _MB // 6))


def _sizes() -> Iterator[Hostile]:
    yield Hostile("a body of 99 GB", 413, raw_post(b"")[:-5] + b"99999999999\r\n\r\n")
    yield Hostile("a prompt of 60 MB", 413, _lmi("the wolf " * (60 * _MB // 9)))
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    yield Hostile("100 MB in chunks", 413, CHUNKED + chunk * 100)
    yield Hostile("a prompt of 6 MB", 424, _lmi("the wolf " * (6 * _MB // 9)))
    yield Hostile("a prompt of 3 MB", 424, _lmi("the wolf " * (3 * _MB // 9)))
    yield Hostile("a prompt of 1 MB", 424, _lmi("the wolf " * (_MB // 9)))
    yield Hostile("a prompt of 131 kB", 424, _lmi("the wolf " * (131_000 // 9)))
    yield Hostile("a prompt of 30 kB", 424, _lmi("the wolf " * (30_000 // 9)))


def _json() -> Iterator[Hostile]:
    yield Hostile("no JSON", 424, _post(b"{"))
    yield Hostile("6 MB that are no JSON", 424, _post(b"x" * 6 * _MB))
    yield Hostile("6 MB of white space", 424, _post(b" " * 6 * _MB))
    yield Hostile("6 MB of quotation marks", 424, _post(b'"' * 6 * _MB))
    yield Hostile("6 MB of backslashes", 424, _post(b'"' + b"\\" * 6 * _MB))
    yield Hostile("6 MB of escapes", 424, _post(b'{"inputs": "' + b"\\u0041" * (6 * _MB // 6) + b'"}'))
    yield Hostile("6 MB that are no UTF-8", 424, _post(b'{"inputs": "' + b"\xe2\x82" * 3 * _MB + b'"}'))
    yield Hostile("6 MB of a number", 424, _post(b'{"inputs": ' + b"9" * 6 * _MB + b"}"))
    yield Hostile(
        "a number of 5,000 digits", 424, _post(b'{"inputs": "a", "parameters": {"seed": ' + b"9" * 5000 + b"}}")
    )
    yield Hostile("1,000,000 objects", 424, _post(b'{"inputs": [' + b"{}," * _MB + b"{}]}"))
    yield Hostile("32,000 objects", 424, _post(b'{"inputs": [' + b"{}," * 32_000 + b"{}]}"))
    yield Hostile("65,000 texts", 424, _post({"inputs": ["a"] * 65_000}))
    yield Hostile("1,000,000 values", 424, _post({"inputs": [1] * 1_000_000}))
    yield Hostile("800,000 large numbers", 424, _post(b'{"inputs": [' + b"1.2345," * 800_000 + b"1]}"))
    yield Hostile("65,000 members", 424, _post({"inputs": "a", **{f"p{n}": n for n in range(60_000)}}))
    yield Hostile("970 levels", 424, _post(b'{"inputs": ' + b"[" * 970 + b"]" * 970 + b"}"))
    yield Hostile("4,000,000 levels", 424, _post(b"[" * 4 * _MB))
    yield Hostile(
        "127 levels, 200 times", 424, _post(b'{"inputs": [' + b",".join([b"[" * 125 + b"]" * 125] * 200) + b"]}")
    )


def _prompts() -> Iterator[Hostile]:
    yield Hostile("a million ids", 400, _post({"prompt": [1] * 1_000_000, "max_tokens": 1}, "/v1/completions"))
    yield Hostile("10,000 prompts", 400, _post({"prompt": ["a"] * 10_000, "max_tokens": 1}, "/v1/completions"))
    yield Hostile("a prompt of spaces", 424, _lmi(" " * 100_000))
    yield Hostile("a prompt of combining marks", 424, _lmi("\u0301" * 30_000))
    yield Hostile(
        "the text of a long prompt is wanted", 424, _lmi("the wolf " * 5000, decoder_input_details=True, details=True)
    )
    message = {"role": "user", "content": "a"}
    yield Hostile("a million messages", 413, _chat(*[message] * 1_000_000))
    yield Hostile("16,000 messages", 400, _chat(*[message] * 16_000))
    parts = [{"type": "text", "text": "a"}] * 20_000
    yield Hostile("a message of 20,000 parts", 400, _chat({"role": "user", "content": parts}))
    yield Hostile("a long conversation", 400, _chat({"role": "user", "content": "the wolf " * 100_000}))


def _call(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _parameters() -> Iterator[Hostile]:
    yield Hostile("20,000 unknown parameters", 424, _lmi(**{f"max_new_token{n}": n for n in range(20_000)}))
    yield Hostile("an unknown parameter of 1 MB", 200, _lmi(**{"a" * _MB: 1}))
    yield Hostile("stop strings of 16 x 300 kB", 424, _lmi(stop=["a" * 300_000] * 16))
    yield Hostile("60,000 stop strings", 424, _lmi(stop=["a"] * 60_000))
    yield Hostile("60,000 bad words", 424, _lmi(bad_words=["a"] * 60_000))
    yield Hostile("n of 10^9", 424, _lmi(n=10**9))
    deep: Any = {"type": "string"}
    for _ in range(30):
        deep = {"type": "object", "properties": {"a": deep}}
    yield Hostile(
        "a guide of 30 levels", 424, _lmi(guided_json=json.dumps(deep).replace('"string"', "[" * 300 + "]" * 300))
    )
    yield Hostile("a guide as text with 1,000,000 objects", 424, _lmi(guided_json="[" + "{}," * _MB + "{}]"))
    yield Hostile("a regular expression of 1 MB", 424, _lmi(guided_regex="(a+)+" * 200_000))
    yield Hostile("60,000 choices", 424, _lmi(guided_choice=["a"] * 60_000))
    user = {"role": "user", "content": "a"}
    yield Hostile("arguments as text with 1,000,000 objects", 200, _chat(user, _call("[" + "{}," * _MB + "{}]")))
    yield Hostile("arguments as text of 900 levels", 200, _chat(user, _call('{"a":' * 900 + "1" + "}" * 900)))
    yield Hostile("8,000 tool calls", 400, _chat(*[user, _call("{}")] * 4000))
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    yield Hostile("8,000 tools", 400, _chat(user, tools=[function] * 8000))
    yield Hostile("a bias of 60,000 tokens", 400, _chat(user, logit_bias={str(n): 1 for n in range(60_000)}))
    yield Hostile("the name of a model with 1 MB", 404, _chat(user, model="a" * _MB))


def _other_dialects() -> Iterator[Hostile]:
    infer = "/v2/models/scripted/infer"
    tensor = {"name": "text_input", "shape": [10**9, 10**9], "datatype": "BYTES", "data": ["a"]}
    yield Hostile("a tensor of 10^18 texts", 400, _post({"inputs": [tensor]}, infer))
    tensor = {"name": "text_input", "shape": [1] * 60_000, "datatype": "BYTES", "data": ["a"]}
    yield Hostile("a tensor of 60,000 dimensions", 400, _post({"inputs": [tensor]}, infer))
    yield Hostile("30,000 tensors", 400, _post({"inputs": [{"name": "a"}] * 30_000}, infer))
    yield Hostile(
        "TGI with 60,000 stop strings", 422, _post({"inputs": "a", "parameters": {"stop": ["a"] * 60_000}}, "/generate")
    )
    yield Hostile("a text of 6 MB to tokenise", 400, _post({"prompt": "the wolf " * (6 * _MB // 9)}, "/tokenize"))
    yield Hostile("a million ids to decode", 400, _post({"tokens": [1] * 1_000_000}, "/detokenize"))
    yield Hostile("a model that is not there", 404, _post({"inputs": "a"}, "/predictions/" + "a" * 5000))


def _images() -> Iterator[Hostile]:
    def chat(*urls: str) -> bytes:
        return _chat({"role": "user", "content": [image_part(url) for url in urls]})

    yield Hostile("a PNG of 20,000 x 20,000", 400, chat(data_url(png(20_000, 20_000, chunk(b"IDAT", b"")))))
    yield Hostile("a zip bomb as PNG", 400, chat(data_url(text_bomb(100 * _MB))))
    yield Hostile("an SVG", 400, chat("data:image/svg+xml;base64,PHN2Zy8+"))
    yield Hostile("an image at a loopback address", 400, chat("http://127.0.0.1:8080/a.png"))
    yield Hostile("an image at this machine's name", 400, chat("http://localhost:1/a.png"))
    yield Hostile("200 images", 400, chat(*[data_url(encoded())] * 200))
    yield Hostile("4 MB that are no image", 400, chat(data_url(bytes(3 * _MB))))


# -- guides that take a core for seconds -------------------------------------------------------------------------------

GUIDE_BOMBS: dict[str, Callable[[int], str]] = {
    "counted repetitions": lambda number: f"((ab|[a-z]c){{0,{290 + number}}}){{0,300}}",
    "many repetitions": lambda number: ".*" * (1600 + number),
}
"""Regular expressions by their kind; those of different numbers differ, because a guide that was tried is known."""
