"""DJL: its Java engine without the HTTP front end (see Driver.java), and its Python engine in ranks of Open MPI."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import uuid
import zipfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import javaproperties
import psutil
import pytest
from filelock import FileLock

from tests.support.models import scripted_model
from tests.support.processes import survivors, wait_until


@dataclass
class DjlAnswer:
    """Chunks as they come; `code` and `headers` as DJL would send them."""

    chunks: list[bytes] = field(default_factory=list)
    code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    error: str = ""
    """An exception in the place of an answer."""
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def body(self) -> bytes:
        """All chunks."""
        return b"".join(self.chunks)

    @property
    def ended(self) -> bool:
        """Whether its end has come."""
        return self._ended.is_set()

    def end(self) -> None:
        """Nothing more comes."""
        self._ended.set()

    def wait(self, timeout: float = 300.0) -> DjlAnswer:
        """Wait until its end; AssertionError after `timeout` seconds."""
        assert self._ended.wait(timeout), f"no end within {timeout:g} s; so far {self.body[-200:]!r}"
        return self


# -- Model directories for DJL -----------------------------------------------------------------------------------------

MODES = ("rolling", "async")
_TEMPLATES = Path(__file__).parents[3] / "serving" / "djl"


def djl_model(directory: Path, mode: str, script: Mapping[str, object] | None = None, /, **options: object) -> Path:
    """The scripted model behind the handler of a mode, by the file that users start from."""
    template = javaproperties.loads((_TEMPLATES / mode / "serving.properties").read_text())
    return scripted_model(directory, script, **{**template, **options})


# -- The real thing: DJL's Python engine and djl_python from Maven Central, fetched once into `.djl/` of the checkout --

HERE = Path(__file__).parent
_CACHE = HERE.parents[2] / ".djl"
_FETCH_SECONDS = 300


def djl_engine() -> Path:
    """A folder with `lib/` (the jars, and the driver's classes) and `python/` (djl_python and its engine).

    Skips the test where there is no JDK or no Maven; where CI is set, that is a failure.
    """
    key = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in ("pom.xml", "Driver.java"))).hexdigest()[:12]
    folder = _CACHE / f"engine-{key}"
    if folder.is_dir():
        return folder
    missing = [tool for tool in ("mvn", "javac") if shutil.which(tool) is None]
    if missing:
        message = f"{' and '.join(missing)} not found: DJL Serving's engine comes from Maven Central"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    _CACHE.mkdir(exist_ok=True)
    with FileLock(_CACHE / "lock"):
        if not folder.is_dir():
            _make(folder)
    return folder


def _make(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=_CACHE) as temporary:
        partial = Path(temporary) / "engine"
        lib = partial / "lib"
        lib.mkdir(parents=True)
        maven = ["mvn", "-q", "-B", "-f", str(HERE / "pom.xml"), "dependency:copy-dependencies"]
        _run([*maven, "-DincludeScope=runtime", f"-DoutputDirectory={lib}"])
        _run(["javac", "-cp", f"{lib}/*", "-d", str(lib / "classes"), str(HERE / "Driver.java")])
        with zipfile.ZipFile(next(lib.glob("python-*.jar"))) as jar:
            names = [name for name in jar.namelist() if name.startswith(("djl_python/", "djl_python_engine.py"))]
            jar.extractall(partial / "python", names)
        partial.rename(folder)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def djl_python() -> Path:
    """The folder of djl_python and its engine: what DJL_PYTHON_HOME names, else that of Maven Central."""
    named = os.environ.get("DJL_PYTHON_HOME")
    return Path(named) if named else djl_engine() / "python"


# -- A model directory under DJL's real Java engine, without the HTTP front end (see Driver.java) ----------------------

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
            answer.chunks.append(data)
            return
        if kind in "he":
            code, _, *pairs = data.decode().split("\n")
            answer.code = int(code)
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


# -- DJL's `djl_python_engine.py` in ranks, driven as DJL's Java side does it, which starts none without GPUs ----------


class Ranks:
    """Workers of one mode that mpirun starts (`option.mpi_mode=true`). The first has the model."""

    def __init__(self, model: Path, mode: str, count: int) -> None:
        python = djl_python()
        self._async = mode == "async"
        name = str(model.parent / f"djl-{uuid.uuid4().hex[:8]}")
        self._log = model.parent / "worker.log"
        flags = {
            "sock-type": "unix",
            "sock-name": name,
            "model-dir": str(model),
            "entry-point": "djl_trtllm.async_handler" if self._async else "djl_trtllm.handler",
            "device-id": "-1",
            "cluster-size": "1",
            "recommended-entry-point": "",
            "log-level": "info",
        }
        with self._log.open("wb") as log:
            self.process = psutil.Popen(
                [
                    *_mpirun(count),
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
        self._sockets = [self._connected(f"{name}.{rank}") for rank in range(count)]
        self._file = self._sockets[0].makefile("rb")
        rolling = "disable" if self._async else "enable"
        loading = {"handler": "handle", "rolling_batch": rolling, "async_mode": str(self._async).lower()}
        # Every rank is asked to load the model; what the passive ones say is not waited for.
        for each in self._sockets:
            each.sendall(_encoded(loading, []))
        code, message, _, _ = self._receive()
        assert code < 300, f"the model was not loaded: {code} {message}\n{self.log()}"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill mpirun, as DJL does; nothing of it is left."""
        children = self.process.children(recursive=True) if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        # Ranks outlive their mpirun; what ends them is the end of the connection.
        self._file.close()
        for each in self._sockets:
            each.close()
        alive = survivors(children)
        assert not alive, f"outlived DJL's worker: {alive}"

    def log(self) -> str:
        """What the workers printed."""
        return self._log.read_text(errors="replace")

    def answers(self, bodies: Sequence[bytes]) -> list[str]:
        """The responses to requests that begin together. DJL may lose what is in the last part; here it always does."""
        texts = [""] * len(bodies)
        if self._async:
            self._collect(bodies, texts)
        else:
            self._roll(bodies, texts)
        return texts

    def _collect(self, bodies: Sequence[bytes], texts: list[str]) -> None:
        """Each part comes by itself, with the id of its request."""
        for number, body in enumerate(bodies):
            properties = {"handler": "handle", "Content-Type": "application/json", "request_tracking_id": str(number)}
            self._sockets[0].sendall(_encoded(properties, [("data", body)]))
        left = len(bodies)
        while left:
            code, message, properties, (item,) = self._receive()
            assert code == 200, message
            data = _data_of(item)
            if data is None:
                left -= 1
            else:
                texts[int(properties["request_tracking_id"])] += data

    def _roll(self, bodies: Sequence[bytes], texts: list[str]) -> None:
        """The whole list of requests is sent again and again, and answered with a part for each."""
        left, new = list(range(len(bodies))), True
        while left:
            properties = {"handler": "handle", "batch_size": str(len(left))}
            contents: list[tuple[str, bytes]] = []
            for place, number in enumerate(left):
                prefix = f"batch_{place:03d}."
                contents.append((prefix + "data", bodies[number] if new else b""))
                if new:
                    properties[prefix + "Content-Type"] = "application/json"
                    contents.append((prefix + "seed", b"42"))
            self._sockets[0].sendall(_encoded(properties, contents))
            code, message, _, items = self._receive()
            assert (code, len(items)) == (200, len(left)), message
            running = []
            for number, item in zip(left, items, strict=True):
                data = _data_of(item)
                if data is not None:
                    texts[number] += data
                    running.append(number)
            left, new = running, False

    # -- the sockets ---------------------------------------------------------------------------------------------------

    def _connected(self, name: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)

        def connects() -> bool:
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(OSError):
                connection.connect(name)
                return True
            return False

        wait_until(connects, _START_SECONDS, f"a worker at {name}")
        return connection

    def _receive(self) -> tuple[int, str, dict[str, str], list[bytes]]:
        """Code, message, properties and contents of what the first rank says."""
        reader = _Reader(self._file)
        code, message, properties = reader.short(), reader.text(), reader.pairs()
        return code, message, properties, [reader.content() for _ in range(reader.short())]


def _data_of(item: bytes) -> str | None:
    """The data of a part of a response; None for the last part. AssertionError: the part is an error."""
    values = _Reader(io.BytesIO(item)).pairs()
    assert "code" not in values, values
    return None if values.get("last") == "true" else values.get("data", "")


def _mpirun(ranks: int) -> list[str]:
    """The command with which DJL's Java side starts ranks."""
    options = ["--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "--tag-output", "-x", "PYTHONPATH"]
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    return [mpirun, "-np", str(ranks), *options, "-x", "MKL_DYNAMIC=FALSE"]


def _encoded(properties: dict[str, str], contents: list[tuple[str, bytes]]) -> bytes:
    pairs = b"".join(_text(key) + _text(value) for key, value in properties.items())
    bodies = b"".join(_text(key) + struct.pack(">i", len(value)) + value for key, value in contents)
    return struct.pack(">h", len(properties)) + pairs + struct.pack(">h", len(contents)) + bodies


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">i", len(data)) + data


class _Reader:
    """Big-endian counts, lengths and texts."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source

    def short(self) -> int:
        return int(struct.unpack(">h", self._source.read(2))[0])

    def data(self) -> bytes:
        return self._source.read(max(0, struct.unpack(">i", self._source.read(4))[0]))

    def text(self) -> str:
        return self.data().decode()

    def pairs(self) -> dict[str, str]:
        """Their number, then keys and values."""
        return {self.text(): self.text() for _ in range(self.short())}

    def content(self) -> bytes:
        """A content, after its key."""
        self.text()
        return self.data()
