"""A model directory under DJL's real Java engine, without the HTTP front end (see Driver.java)."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.integration.djl.answers import DjlAnswer
from tests.integration.djl.jars import djl_engine
from tests.support.waiting import survivors

_START_SECONDS = 300


class JavaEngine:
    """Starts the JVM, which starts the Python worker. Requests run concurrently, each on a thread of Java's."""

    def __init__(self, model: Path, environ: dict[str, str] | None = None) -> None:
        lib = djl_engine() / "lib"
        cache = model.parent / "djl-cache"
        # Not below a test's own folder: a socket's path has at most 107 characters.
        self._temporary = tempfile.TemporaryDirectory(prefix="djl-")
        self.log: deque[str] = deque(maxlen=2000)
        self._answers: dict[int, DjlAnswer] = {}
        self._measured: deque[dict[str, Any]] = deque()
        self._news = threading.Condition()
        self._ready = self._closed = False
        self._next = 0
        self._process = subprocess.Popen(
            # Sockets of DJL have the same names in every JVM, and it kills who has such a one already.
            [
                "java",
                "-Xmx768m",
                f"-Djava.io.tmpdir={self._temporary.name}",
                "-Dai.djl.offline=true",
                "-cp",
                f"{lib}/*:{lib}/classes",
                "Driver",
                str(model),
            ],
            env={**os.environ, "PYTHON_EXECUTABLE": sys.executable, "DJL_CACHE_DIR": str(cache), **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read_events, self._read_log)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> JavaEngine:
        with self._news:
            self._news.wait_for(lambda: self._ready or self._closed, _START_SECONDS)
        if not self._ready:
            self.close()
            raise RuntimeError("\n".join(["the model was not loaded:", *self.log]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the JVM as its user would, by closing it; kill what is left."""
        children = self.children()
        self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(10)
        self._process.stdout.close()  # type: ignore[union-attr]
        self._process.stderr.close()  # type: ignore[union-attr]
        alive = survivors(children)
        for process in alive:
            process.kill()
        self._temporary.cleanup()
        assert not alive, f"outlived DJL: {alive}"

    # -- requests --------------------------------------------------------------------------------------------------

    def request(self, body: bytes, **headers: str) -> DjlAnswer:
        """Send a request; header names have `_` for `-`. The answer fills by itself."""
        properties = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        answer = DjlAnswer()
        with self._news:
            number, self._next = self._next, self._next + 1
            self._answers[number] = answer
            pairs = b"".join(_utf(key) + _utf(value) for key, value in properties.items())
            self._write(struct.pack(">ih", number, len(properties)) + pairs + struct.pack(">i", len(body)) + body)
        return answer

    def measure(self, body: bytes, streams: int, requests: int, timeout: float = 300.0) -> dict[str, Any]:
        """`streams` clients send `requests` one after the other; tok/s and TTFT (seconds), measured in Java."""
        with self._news:
            self._write(struct.pack(">iiii", -1, streams, requests, len(body)) + body)
            assert self._news.wait_for(lambda: bool(self._measured), timeout)
            return self._measured.popleft()

    # -- processes -------------------------------------------------------------------------------------------------

    def children(self) -> list[psutil.Process]:
        """Everything below the JVM."""
        return psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []

    def worker(self) -> psutil.Process:
        """The Python worker."""
        return self._one("djl_python_engine.py")

    def host(self) -> psutil.Process:
        """The engine process below the worker."""
        return self._one("djl_trtllm.executor.process")

    def _one(self, text: str) -> psutil.Process:
        (found,) = (child for child in self.children() if text in " ".join(child.cmdline()))
        return found

    # -- inside ----------------------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        self._process.stdin.write(data)  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]

    def _read_log(self) -> None:
        for line in self._process.stderr:  # type: ignore[union-attr]
            self.log.append(line.decode(errors="replace").rstrip())

    def _read_events(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while len(head := stream.read(9)) == 9:
            kind, number, length = chr(head[0]), *struct.unpack(">ii", head[1:])
            data = stream.read(length)
            if kind == "r":
                self._tell(ready=True)
            elif kind == "m":
                with self._news:
                    self._measured.append(json.loads(data))
                    self._news.notify_all()
            else:
                self._take(kind, number, data)
        for answer in list(self._answers.values()):
            answer.error = answer.error or "the JVM ended"
            answer.end()
        self._tell(closed=True)

    def _take(self, kind: str, number: int, data: bytes) -> None:
        answer = self._answers[number]
        if kind == "c":
            answer.add(data)
            return
        if kind in "he":
            code, message, *pairs = data.decode().split("\n")
            answer.code, answer.message = int(code), message
            answer.headers = {key: value for key, _, value in (pair.partition("\t") for pair in pairs if pair)}
        if kind == "x":
            answer.error = data.decode()
        if kind in "ex":
            del self._answers[number]
            answer.end()

    def _tell(self, *, ready: bool = False, closed: bool = False) -> None:
        with self._news:
            self._ready, self._closed = self._ready or ready, self._closed or closed
            self._news.notify_all()


def _utf(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">H", len(data)) + data
