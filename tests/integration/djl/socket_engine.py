"""DJL's `djl_python_engine.py` alone, driven over its socket as DJL's Java side does it; for machines without a JVM."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import orjson
import psutil

from tests.integration.djl.answers import DjlAnswer
from tests.integration.djl.jars import djl_python
from tests.support.waiting import survivors

_START_SECONDS = 300


class _Request:
    def __init__(self, body: bytes, properties: dict[str, str]) -> None:
        self.body = body
        self.properties = properties
        self.answer = DjlAnswer()
        self.sent = False
        self.last = False

    def take(self, content: bytes, headers: dict[str, str]) -> None:
        """What `ai.djl.python.engine.Request.addResponse` does."""
        self.answer.headers |= headers
        pairs = Reader(content)
        values = {pairs.text(): pairs.text() for _ in range(pairs.short())}
        data, self.last = values.get("data") or "", values.get("last", "").lower() == "true"
        if not data and not self.last:
            return
        if "code" in values:
            self.answer.code, self.answer.message = int(values["code"]), values.get("error", "OK")
            self.answer.add(orjson.dumps({"error": values.get("error"), "code": int(values["code"])}))
        else:
            self.answer.code = self.answer.code or 200
            # DJL may lose what is in the last part (`take` in djl_trtllm/djl/item.py). Here it always does.
            self.answer.add(b"" if self.last else data.encode())
        if self.last:
            self.answer.end()


class SocketEngine:
    """One worker process in one mode, or with `ranks` as many that mpirun starts (`option.mpi_mode=true`).

    `entry_point` None: that of the mode.
    """

    def __init__(self, model: Path, mode: str, entry_point: str | None = None, ranks: int = 0) -> None:
        python = djl_python()
        name = str(model.parent / f"djl-{uuid.uuid4().hex[:8]}")
        self._async = mode == "async"
        self._log = model.parent / "worker.log"
        entry_point = entry_point or ("djl_trtllm.async_handler" if self._async else "djl_trtllm.handler")
        flags = {
            "sock-type": "unix",
            "sock-name": name,
            "model-dir": str(model),
            "entry-point": entry_point,
            "device-id": "-1",
            "cluster-size": "1",
            "recommended-entry-point": "",
            "log-level": "info",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(_mpirun(ranks) if ranks else ()),
                    sys.executable,
                    str(python / "djl_python_engine.py"),
                    *(part for flag, value in flags.items() for part in (f"--{flag}", value)),
                    "--async-mode" if self._async else "--no-async-mode",
                ],
                cwd=model,
                # As DJL does, which also leaves what is there.
                env={**os.environ, "PYTHONPATH": f"{python}:{model}:{os.environ.get('PYTHONPATH', '')}"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._socket, *passive = [self._connected(f"{name}.{rank}") for rank in range(ranks)] or [self._connected(name)]
        self._passive: list[socket.socket] = passive
        self._file = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self._work = threading.Condition()
        self._list: list[_Request] = []
        self._by_id: dict[str, _Request] = {}
        self._stopped = False
        mode_options = {"rolling_batch": "disable" if self._async else "enable", "async_mode": str(self._async).lower()}
        # Every rank is asked to load the model; what the passive ones say is not waited for.
        for rank in (self._socket, *passive):
            rank.sendall(_encoded({"handler": "handle", **mode_options}, []))
        code, message, _, _ = self._receive()
        assert code < 300, f"the model was not loaded: {code} {message}\n{self.log()}"
        self._thread = threading.Thread(target=self._collect if self._async else self._roll, daemon=True)
        self._thread.start()

    def __enter__(self) -> SocketEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the worker, as DJL does; nothing of it is left."""
        children = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        with self._work:
            self._stopped = True
            self._work.notify_all()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        # Ranks outlive their mpirun; what ends them, and each thread that reads here, is the end of the connection.
        for connection in (self._socket, *self._passive):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._thread.join(10)
        self._file.close()
        alive = survivors(children)
        assert not alive, f"outlived DJL's worker: {alive}"

    @property
    def pid(self) -> int:
        """The process that was started: the worker, or mpirun."""
        return self._process.pid

    def log(self) -> str:
        """What the worker printed."""
        return self._log.read_text(errors="replace")

    def host(self) -> psutil.Process:
        """The engine process."""
        (found,) = (
            child
            for child in psutil.Process(self._process.pid).children(recursive=True)
            if "djl_trtllm.executor.process" in " ".join(child.cmdline())
        )
        return found

    def request(self, body: bytes, **headers: str) -> DjlAnswer:
        """Send a request; header names have `_` for `-`. The answer fills by itself."""
        properties = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        request = _Request(body, properties)
        if self._async:
            number = str(uuid.uuid4())
            self._by_id[number] = request
            self._send({**properties, "handler": "handle", "request_tracking_id": number}, [("data", body)])
        else:
            with self._work:
                self._list.append(request)
                self._work.notify_all()
        return request.answer

    def call(self, function: str, **properties: str) -> DjlAnswer:
        """Call another function of the handler (async mode)."""
        request = _Request(b"", {})
        number = str(uuid.uuid4())
        self._by_id[number] = request
        self._send({**properties, "handler": function, "request_tracking_id": number}, [("data", b"")])
        return request.answer

    def forget(self, *, tell: bool) -> None:
        """Clear the list, as Java does after a failure; `tell` sends what Java sends then with the next batch."""
        with self._work:
            self._list.clear()
            self._reset = tell

    _reset = False

    # -- the two loops of the Java side ----------------------------------------------------------------------------

    def _collect(self) -> None:
        try:
            while True:
                code, message, properties, contents = self._receive()
                request = self._by_id[properties.pop("request_tracking_id")]
                assert code == 200, message
                request.take(contents[0], properties)
        except (OSError, EOFError, struct.error):
            return

    def _roll(self) -> None:
        try:
            while True:
                with self._work:
                    self._work.wait_for(lambda: bool(self._list) or self._stopped)
                    if self._stopped:
                        return
                    batch = list(self._list)
                    properties = {"handler": "handle", "batch_size": str(len(batch))}
                    if self._reset:
                        properties["reset_rollingbatch"], self._reset = "true", False
                contents: list[tuple[str, bytes]] = []
                for index, request in enumerate(batch):
                    prefix = f"batch_{index:03d}."
                    contents.append((prefix + "data", b"" if request.sent else request.body))
                    if not request.sent:
                        properties |= {prefix + key: value for key, value in request.properties.items()}
                        contents.append((prefix + "seed", b"42"))
                    request.sent = True
                self._send(properties, contents)
                code, message, headers, answers = self._receive()
                assert (code, len(answers)) == (200, len(batch)), message
                for index, (request, answer) in enumerate(zip(batch, answers, strict=True)):
                    prefix = f"batch_{index}_"
                    own = {key[len(prefix) :]: value for key, value in headers.items() if key.startswith(prefix)}
                    request.take(answer, own)
                with self._work:
                    self._list = [request for request in self._list if not request.last]
        except (OSError, EOFError, struct.error):
            return

    # -- the socket ------------------------------------------------------------------------------------------------

    def _connected(self, name: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            assert self._process.poll() is None, self.log()
            try:
                connection.connect(name)
                return connection
            except OSError:
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.05)

    def _send(self, properties: dict[str, str], contents: list[tuple[str, bytes]]) -> None:
        with self._lock:
            self._socket.sendall(_encoded(properties, contents))

    def _receive(self) -> tuple[int, str, dict[str, str], list[bytes]]:
        reader = Reader(self._file)
        code, message = reader.short(), reader.text()
        properties = {reader.text(): reader.text() for _ in range(reader.short())}
        contents: deque[bytes] = deque()
        for _ in range(reader.short()):
            reader.text()
            contents.append(reader.data())
        return code, message, properties, list(contents)


def _mpirun(ranks: int) -> list[str]:
    """As DJL's Java side starts it."""
    options = ["--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "--tag-output", "-x", "PYTHONPATH"]
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    return [mpirun, "-np", str(ranks), *options, "-x", "MKL_DYNAMIC=FALSE"]


def _encoded(properties: dict[str, str], contents: list[tuple[str, bytes]]) -> bytes:
    pairs = b"".join(_text(key) + _text(value) for key, value in properties.items())
    bodies = b"".join(_text(key) + struct.pack(">i", len(value)) + value for key, value in contents)
    return struct.pack(">h", len(properties)) + pairs + struct.pack(">h", len(contents)) + bodies


class Reader:
    """Big-endian counts, lengths and texts."""

    def __init__(self, source: BinaryIO | bytes) -> None:
        self._source, self._at = source, 0

    def short(self) -> int:
        return int(struct.unpack(">h", self._take(2))[0])

    def data(self) -> bytes:
        return self._take(max(0, struct.unpack(">i", self._take(4))[0]))

    def text(self) -> str:
        return self.data().decode()

    def _take(self, count: int) -> bytes:
        if isinstance(self._source, bytes):
            taken = self._source[self._at : self._at + count]
            self._at += count
        else:
            taken = self._source.read(count)
        if len(taken) < count:
            raise EOFError
        return taken


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">i", len(data)) + data
