"""Real servers, started as a user starts them and looked at from outside, and a client that costs little."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

CLI = ("-m", "djl_trtllm.cli")
_CONFIGURING = ("OPTION_", "SERVING_", "DJL_", "HF_", "SM_", "SAGEMAKER_")
_START_SECONDS = 120
_NO_LOOPBACK_PROXY = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


def environment(cache: Path, **variables: str) -> dict[str, str]:
    """This process's environment without what would configure a server, with `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_CONFIGURING)}
    return kept | {"DJL_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1"} | _NO_LOOPBACK_PROXY | variables


def run_cli(*arguments: str, environ: dict[str, str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `djl-trtllm` to its end."""
    return subprocess.run(
        [sys.executable, *CLI, *arguments], env=environ, capture_output=True, text=True, timeout=timeout, check=False
    )


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


@dataclass
class Answer:
    """An answer, and when its parts came (seconds on the monotonic clock). Not `complete`: it broke off or was left."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False
    asked: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def json(self) -> Any:
        """The body of a whole answer."""
        return json.loads(self.body)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The objects of a jsonlines answer."""
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def token_ids(self) -> list[int]:
        """The tokens of an answer, whole (with details) or jsonlines."""
        if self.headers.get("content-type") == "application/json":
            return [token["id"] for token in self.json["details"]["tokens"]]
        return [line["token"]["id"] for line in self.lines]

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the request to the first part of the body."""
        return self.arrivals[0] - self.asked


async def exchange(
    port: int,
    body: dict[str, Any],
    *,
    path: str = "/invocations",
    leave_after: int | None = None,
    reset: bool = False,
    on_part: Callable[[], None] | None = None,
) -> Answer:
    """Post a request and read the answer.

    `leave_after` disconnects when so many parts of the body have come (0: as soon as the request is sent), with a
    reset instead of an orderly close if `reset`. `on_part` is called at every part.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    answer = Answer(asked=time.monotonic())
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    try:
        if leave_after == 0:
            await writer.drain()
            return answer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            await _read(reader, answer, leave_after, on_part)
        answer.ended = time.monotonic()
        return answer
    finally:
        if reset:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read(
    reader: asyncio.StreamReader, answer: Answer, leave_after: int | None, on_part: Callable[[], None] | None
) -> None:
    status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    answer.status = int(status.split()[1])
    answer.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in fields)}
    if (length := answer.headers.get("content-length")) is not None:
        answer.body = await reader.readexactly(int(length))
        answer.arrivals.append(time.monotonic())
        answer.complete = True
        return
    while size := int(await reader.readline(), 16):
        part = await reader.readexactly(size + 2)
        answer.body += part[:-2]
        answer.arrivals.append(time.monotonic())
        if on_part is not None:
            on_part()
        if len(answer.arrivals) == leave_after:
            return
    await reader.readline()
    answer.complete = True


def body(inputs: str, *, stream: bool = False, **parameters: Any) -> dict[str, Any]:
    """A request of the LMI schema."""
    return {"inputs": inputs, "parameters": parameters, "stream": stream}


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = psutil.Process(process.pid)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=120, trust_env=False)
        self.log = log

    def post(self, inputs: str, *, stream: bool = False, **parameters: Any) -> httpx.Response:
        """Send one request."""
        return self.http.post("/invocations", json=body(inputs, stream=stream, **parameters))

    def generate(self, inputs: str, **parameters: Any) -> dict[str, Any]:
        """The whole answer to one request, with details."""
        answer = self.post(inputs, **{"details": True, **parameters})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def token_ids(self, inputs: str, **parameters: Any) -> list[int]:
        """The tokens of the answer to one request."""
        return [token["id"] for token in self.generate(inputs, **parameters)["details"]["tokens"]]

    def together(self, requests: list[dict[str, Any]], *, at_once: int = 64) -> list[Answer]:
        """Send requests, `at_once` of them at a time, and read all answers."""

        async def send() -> list[Answer]:
            places = asyncio.Semaphore(at_once)

            async def one(request: dict[str, Any]) -> Answer:
                async with places:
                    return await exchange(self.port, request)

            return await asyncio.gather(*map(one, requests))

        return asyncio.run(send())

    def ping(self) -> int:
        """Status of /ping."""
        return self.http.get("/ping").status_code

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        text = self.http.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "djl_trtllm_" + name and labels.items() <= sample.labels.items()
        )

    def host(self) -> psutil.Process:
        """The executor host."""
        (host,) = self.process.children()
        return host

    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return self.metric("waiting") == self.metric("running") == 0

    def last_log(self) -> str:
        """The end of the server's log."""
        return self.log.read_text(errors="replace")[-4000:]


@contextlib.contextmanager
def serving(
    model: Path | str | None,
    scratch: Path,
    *,
    command: tuple[str, ...] = CLI,
    arguments: tuple[str, ...] = (),
    **variables: str,
) -> Iterator[Server]:
    """A server until the block ends. Then nothing may be left in its queue and of its processes, and it ends with 0."""
    scratch.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = scratch / f"server-{port}.log"
    named = [] if model is None else [str(model)]
    line = [sys.executable, *command, "serve", *named, "--port", str(port), "--host", "127.0.0.1", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            line, env=environment(scratch / "cache", **variables), stdout=output, stderr=subprocess.STDOUT
        )
    server = Server(process, port, log)
    try:
        _await_ready(server, process)
        yield server
        _leave_nothing(server, process)
    finally:
        server.http.close()
        if process.poll() is None:
            for child in server.process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait()


def _await_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{server.last_log()}"
        assert time.monotonic() < deadline, f"the server is not ready:\n{server.last_log()}"
        with contextlib.suppress(httpx.TransportError):
            if server.ping() == 200:
                return
        time.sleep(0.05)


def _leave_nothing(server: Server, process: subprocess.Popen[bytes]) -> None:
    until(server.idle, "an empty queue and an empty batch")
    children = server.process.children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, server.last_log()
    assert [child for child in children if child.is_running()] == []
