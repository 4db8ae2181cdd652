"""A small Hugging Face hub: model information, file resolution with ranges, private and gated repositories."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

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
