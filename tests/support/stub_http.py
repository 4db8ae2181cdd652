"""Servers for clients' tests: one that a function answers, one of OpenAI's chat API, and a small Hugging Face hub."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.asgi import listening


class Asked(NamedTuple):
    """A request that has arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


def chunked(*pieces: bytes) -> bytes:
    """Chunks of a body."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def streamed(*pieces: bytes) -> bytes:
    """A whole response in chunks."""
    return HEAD + chunked(*pieces) + END


def whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def usage_events(tokens: int) -> list[bytes]:
    """Events of a chat, one for each token, with the usage in each; the last one has the reason of the end."""
    return [
        b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":%b}],"usage":{"prompt_tokens":7,'
        b'"completion_tokens":%d}}\n\n' % (b'"length"' if number == tokens else b"null", number)
        for number in range(1, tokens + 1)
    ]


@contextlib.asynccontextmanager
async def stub_server(answer: Answer) -> AsyncIterator[int]:
    """The port of a server in this event loop; connections end with the block."""
    writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                asked = await _read(reader)
                await answer(asked, writer)
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(method, path, headers, orjson.loads(body) if body else None)


# -- A server of OpenAI's chat API in a thread: streams of the requested length, and a way to fail ---------------------


class OpenAiStub:
    """`fails_after`: requests that succeed before all others fail. `hangs_after`: before all others have no response.

    `seconds`: of each token. `warning`: the header of each response.
    """

    def __init__(
        self,
        fails_after: int | None = None,
        seconds: float = 0.0,
        tokenizer: bool = True,
        hangs_after: int | None = None,
        warning: str | None = None,
    ) -> None:
        self.headers = {} if warning is None else {"Warning": warning}
        self.fails_after, self.hangs_after, self.seconds, self.tokenizer = fails_after, hangs_after, seconds, tokenizer
        self.requests: list[Request] = []
        self.bodies: list[dict[str, Any]] = []

    async def chat(self, request: Request) -> Response:
        self.requests.append(request)
        body = await request.json()
        self.bodies.append(body)
        if self.fails_after is not None and len(self.bodies) > self.fails_after:
            return PlainTextResponse("the queue is full", 429)

        async def events() -> AsyncIterator[bytes]:
            if self.hangs_after is not None and len(self.bodies) > self.hangs_after:
                await asyncio.Event().wait()
            for event in usage_events(body["max_tokens"]):
                await asyncio.sleep(self.seconds)
                yield event

        return StreamingResponse(events(), media_type="text/event-stream", headers=self.headers)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "stub"}]})

    async def tokenize(self, request: Request) -> Response:
        if not self.tokenizer:
            return PlainTextResponse("", 404)
        return JSONResponse({"count": 2 * len((await request.json())["prompt"].split())})

    @contextlib.asynccontextmanager
    async def application(self) -> AsyncIterator[Starlette]:
        yield Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
            ]
        )

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """Its address."""
        with listening(self.application) as url:
            yield url


_SLICE = 64 * 1024
LARGE = (".safetensors", ".bin", ".engine", ".model")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories by id: files by path. `private` and `gated` ones want `token`. `cut` breaks a file off once.

    `LARGE` files are kept as LFS keeps them.
    """

    repositories: dict[str, dict[str, bytes]]
    private: frozenset[str] = frozenset()
    gated: frozenset[str] = frozenset()
    token: str = "hf_right"
    cut: dict[str, int] = field(default_factory=dict)
    bytes_per_second: float = 0.0
    fetched: list[str] = field(default_factory=list)


def _checksum(name: str, content: bytes) -> str:
    """The hub's name of the content: SHA-256 of LFS files, git's SHA-1 of others."""
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _listed(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": "f" * 40}
    if name.endswith(LARGE):
        return entry | {"lfs": {"sha256": _checksum(name, content), "size": len(content), "pointerSize": 134}}
    return entry | {"blobId": _checksum(name, content)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if path.startswith("api/models/"):
            repository, tree, revision = path.removeprefix("api/models/").partition("/tree/")
            if tree:
                if self._may(repository, revision):
                    self._tree(repository)
                return
            repository, _, revision = repository.partition("/revision/")
            if self._may(repository, revision or "main"):
                self._information(repository)
            return
        for repository in self.hub.repositories:
            prefix = f"{repository}/resolve/"
            if path.startswith(prefix):
                revision, _, name = path.removeprefix(prefix).partition("/")
                if self._may(repository, revision):
                    self._file(repository, name)
                return
        self._refuse(401, "RepoNotFound", "Repository Not Found")

    def _may(self, repository: str, revision: str) -> bool:
        allowed = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repository not in self.hub.repositories or (repository in self.hub.private and not allowed):
            self._refuse(401, "RepoNotFound", "Repository Not Found")
        elif repository in self.hub.gated and not allowed:
            self._refuse(403, "GatedRepo", "Access to this model is restricted")
        elif revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
        else:
            return True
        return False

    def _information(self, repository: str) -> None:
        files = self.hub.repositories[repository]
        siblings = [_listed(name, content) for name, content in files.items()]
        body = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings, "private": False}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _tree(self, repository: str) -> None:
        entries = []
        for name, content in self.hub.repositories[repository].items():
            listed = _listed(name, content)
            entry = {"type": "file", "path": name, "size": listed["size"], "oid": listed["blobId"]}
            if lfs := listed.get("lfs"):
                entry["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
            entries.append(entry)
        self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: str, name: str) -> None:
        content = self.hub.repositories[repository].get(name)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        start, end = 0, None
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) + 1 if last else None
        headers = {
            "ETag": f'"{_checksum(name, content)}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        status = 206 if start or end is not None else 200
        part = content[start:end]
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
        if self.command == "GET":
            self.hub.fetched.append(name)
            cut = self.hub.cut.pop(name, None)
            if cut is not None:
                self.close_connection = True
                self._send(status, part, headers, body_to=cut)
                return
        self._send(status, part, headers)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str], body_to: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            body = body[:body_to]
            for at in range(0, len(body), _SLICE):
                self.wfile.write(body[at : at + _SLICE])
                if self.hub.bytes_per_second:
                    time.sleep(_SLICE / self.hub.bytes_per_second)


@contextlib.contextmanager
def hub_server(hub: Hub) -> Iterator[str]:
    """Serve a hub; its endpoint, for HF_ENDPOINT."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
