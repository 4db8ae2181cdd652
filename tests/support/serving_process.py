"""Real servers for tests: `python -m djl_trtllm.cli serve` on a model directory with a script."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil

from tests.fakes import fake_tensorrt_llm

TINY_STORIES = Path(__file__).parents[2] / "serving" / "models" / "tiny-stories"
PROMPT = "the little red riding hood went into the dark wood to see her grandmother"


def scripted_model(directory: Path, script: dict[str, object] | None = None, **options: object) -> Path:
    """The bundled model's tokenizer in front of the scripted executor. `options` are `option.NAME`, or any key."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in TINY_STORIES.iterdir():
        if file.is_file() and file.name not in ("serving.properties", "config.json"):
            (directory / file.name).symlink_to(file)
    # Streams that are to outlast anything need more room than the model has.
    config = json.loads((TINY_STORIES / "config.json").read_text()) | {"max_position_embeddings": 5_000_000}
    (directory / "config.json").write_text(json.dumps(config))
    values = {
        "option.backend": "scripted",
        "option.script": json.dumps(script or {}),
        "option.max_rolling_batch_size": 32,
        "option.max_input_len": 4096,
        "option.max_output_len": 4_000_000,
        "option.max_seq_len": 4_100_000,
        "option.model_name": "scripted",
        **options,
    }
    lines = "".join(f"{key}={value}\n" for key, value in values.items())
    (directory / "serving.properties").write_text(lines)
    return directory


def tensorrt_llm_model(
    directory: Path, script: dict[str, object] | None = None, *, backend: str = "pytorch", **options: object
) -> tuple[Path, dict[str, str]]:
    """The same in front of TensorRT-LLM's executor over the fake, and the environment that has the fake.

    `script` is the scripted executor's, as far as an engine in processes of its own can follow it.
    """
    model = scripted_model(directory, None, **{"option.backend": backend, **options})
    properties = model / "serving.properties"
    lines = [line for line in properties.read_text().splitlines() if not line.startswith("option.script")]
    properties.write_text("\n".join(lines) + "\n")
    (model / "model.safetensors").unlink(missing_ok=True)
    (model / "model.safetensors").symlink_to(TINY_STORIES / "model.safetensors")
    names = {"start_seconds": "load_seconds", "start_error": "load_error"}
    translated = {names.get(name, name): value for name, value in (script or {}).items()}
    return model, fake_tensorrt_llm(directory.parent / f"{directory.name}-fake", script=translated)


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], timeout: float = 20.0, what: str = "") -> None:
    """Poll until `condition` holds; AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what or condition}"
        time.sleep(0.01)


class ServingProcess:
    """A running server, its log, and what its metrics say."""

    def __init__(self, model: Path, environ: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log: list[str] = []
        self.client = httpx.Client(base_url=self.url, timeout=30, trust_env=False)
        command = [sys.executable, "-m", "djl_trtllm.cli", "serve", str(model)]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), "--host", "127.0.0.1"],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.info = psutil.Process(self.process.pid)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self._at_rest: tuple[int, int] | None = None

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line.rstrip())

    # -- state -----------------------------------------------------------------------------------------------------

    def ping(self) -> int:
        """Status of /ping; 0 while nobody listens."""
        try:
            return self.client.get("/ping").status_code
        except httpx.TransportError:
            return 0

    def wait_for_ping(self, status: int = 200, timeout: float = 60.0) -> None:
        """Until /ping answers with `status`."""

        def answered() -> bool:
            assert self.process.poll() is None or status == 0, "\n".join(["the server ended:", *self.log])
            return self.ping() == status

        wait_until(answered, timeout, f"/ping {status}")

    def metric(self, name: str) -> float:
        """Sum over the labels of a metric `djl_trtllm_NAME`, e.g. `running` or `finished_total{reason="length"}`."""
        plain, _, label = name.partition("{")
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            found = re.fullmatch(r"djl_trtllm_(\w+)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == plain and label.rstrip("}") in (found[2] or ""):
                total += float(found[3])
        return total

    def hosts(self) -> list[psutil.Process]:
        """Executor host processes of this server."""
        return self._children(recursive=False)

    def descendants(self) -> list[psutil.Process]:
        """Executor hosts, and what they started."""
        return self._children(recursive=True)

    def _children(self, *, recursive: bool) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = self.info.children(recursive=recursive)
            return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return []

    # -- leaks -----------------------------------------------------------------------------------------------------

    def note_rest(self) -> None:
        """Remember how many descriptors and threads the idle server has, after a first request of each kind."""
        self.generate(tokens=2)
        self.generate(tokens=2, stream=True)
        self.client.close()
        self.client = httpx.Client(base_url=self.url, timeout=30, trust_env=False)
        self.ping()
        self._at_rest = (self.info.num_fds(), self.info.num_threads())

    def check_leaks(self) -> None:
        """Everything is back where `note_rest` saw it."""
        assert self._at_rest is not None
        descriptors, threads = self._at_rest
        wait_until(lambda: self.metric("waiting") == self.metric("running") == 0, what="waiting and running at 0")
        # A connection is one descriptor, and a new host may have taken another number of pipes.
        wait_until(lambda: self.info.num_fds() <= descriptors + 2, what=f"{descriptors} file descriptors")
        wait_until(lambda: self.info.num_threads() <= threads + 2, what=f"{threads} threads")

    # -- requests --------------------------------------------------------------------------------------------------

    def generate(self, tokens: int = 4, *, stream: bool = False, **parameters: object) -> httpx.Response:
        """One request, to its end."""
        return self.client.post("/invocations", content=body(tokens, stream=stream, **parameters), headers=JSON)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A raw connection."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", self.port))
        return connection

    # -- the end ---------------------------------------------------------------------------------------------------

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 30.0) -> int:
        """Exit status; the log is complete afterwards."""
        status = self.process.wait(timeout)
        self._reader.join(5)
        return status

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


JSON = {"Content-Type": "application/json"}


def body(tokens: int = 4, *, stream: bool = False, **parameters: object) -> bytes:
    """A request body."""
    return json.dumps(
        {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens, **parameters}, "stream": stream}
    ).encode()


def raw_post(content: bytes, *headers: str, path: str = "/invocations", version: str = "1.1") -> bytes:
    """A POST request as bytes."""
    lines = [f"POST {path} HTTP/{version}", "Host: test", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


@contextlib.contextmanager
def serving(model: Path, **environ: str) -> Iterator[ServingProcess]:
    """A server that is ready. Afterwards neither it nor an executor host of it is left."""
    server = ServingProcess(model, environ)
    hosts: list[psutil.Process] = []
    try:
        server.wait_for_ping()
        hosts = server.descendants()
        yield server
        hosts += server.descendants()
    finally:
        server.close()
    _, alive = psutil.wait_procs(hosts, timeout=10)
    for host in alive:
        host.kill()
    assert not alive, "an executor host outlived its server"


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = bytearray()
    while data := connection.recv(65536):
        received += data
    return bytes(received)


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """Everything until `mark` has come."""
    received = bytearray()
    while mark not in received:
        data = connection.recv(65536)
        assert data, f"closed before {mark!r}: {bytes(received[-300:])!r}"
        received += data
    return bytes(received)
