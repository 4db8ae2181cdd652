"""Real servers, started as a user starts them and left with nothing behind, and certificates for those with TLS.

`with serving(model) as server:` is a server that is ready. When the block ends it has to be as it was at the
beginning, SIGTERM has to end it with status 0, and no process of it may be left. `with Server(model) as server:` is one
that nobody waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from tests.support.client import JSON, Answer, body, exchange, lmi
from tests.support.processes import survivors, wait_until


class Reachable:
    """A port with a client of it."""

    process: psutil.Popen
    """It and its children are what listens and works there."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = self._client()

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=300, trust_env=False)

    def ping(self) -> int:
        """Status of /ping; 0 while nobody listens."""
        try:
            return self.http.get("/ping").status_code
        except httpx.TransportError:
            return 0

    def generate(self, tokens: int = 4, *, stream: bool = False, **parameters: Any) -> httpx.Response:
        """A request for a number of tokens, to its end."""
        return self.http.post("/invocations", content=body(tokens, stream=stream, **parameters), headers=JSON)

    def post(self, inputs: str, *, stream: bool = False, **parameters: Any) -> httpx.Response:
        """A request, to its end."""
        return self.http.post("/invocations", json=lmi(inputs, stream=stream, **parameters))

    def answer(self, inputs: str, **parameters: Any) -> dict[str, Any]:
        """The whole answer to one request, with details."""
        answer = self.post(inputs, **{"details": True, **parameters})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def token_ids(self, inputs: str, **parameters: Any) -> list[int]:
        """The tokens of the answer to one request."""
        return [token["id"] for token in self.answer(inputs, **parameters)["details"]["tokens"]]

    def together(self, requests: list[dict[str, Any]], *, at_once: int = 64) -> list[Answer]:
        """Send requests, `at_once` of them at a time, and read all answers."""

        async def send() -> list[Answer]:
            places = asyncio.Semaphore(at_once)

            async def one(request: dict[str, Any]) -> Answer:
                async with places:
                    return await exchange(self.port, request)

            return await asyncio.gather(*map(one, requests))

        return asyncio.run(send())

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A raw connection."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(300)
        connection.connect(("127.0.0.1", self.port))
        return connection


# -- Real servers, started as a user starts them, looked at from outside, and left with nothing behind -----------------

CLI = ("-m", "djl_trtllm.cli")
START_SECONDS = 300.0
_CONFIGURING = ("OPTION_", "SERVING_", "DJL_", "HF_", "SM_", "SAGEMAKER_")
_NO_LOOPBACK_PROXY = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
_USUAL = {
    **{f"SERVING_TRITON_{name}_PORT": "0" for name in ("HTTP", "GRPC", "METRICS")},
    # Connections that clients keep are closed before the check for leaks gives up.
    "SERVING_KEEP_ALIVE_TIMEOUT": "5",
}
"""Servers of Triton repositories run beside each other."""
_LEEWAY = 2
"""A connection is one descriptor, and a new host may have taken another number of pipes."""
POOL = min(32, (os.cpu_count() or 1) + 4) + 10
"""Threads that asyncio keeps for what blocks, as soon as there was work for all of them, and ten that read images."""

_running: list[Server] = []


def environment(cache: Path, **variables: str) -> dict[str, str]:
    """This process's environment without what would configure a server, with `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_CONFIGURING)}
    return kept | {"DJL_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1"} | _NO_LOOPBACK_PROXY | variables


def run_cli(
    *arguments: str, environ: Mapping[str, str], timeout: float = START_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run `djl-trtllm` to its end."""
    return subprocess.run(
        [sys.executable, *CLI, *arguments], env=environ, capture_output=True, text=True, timeout=timeout, check=False
    )


@functools.cache
def _own_ports() -> Iterator[int]:
    """Ports of this process of pytest alone, again and again.

    A server binds its port seconds after the test has chosen it. The kernel takes the ports of clients from 32768 on,
    and Ray has its own from 10002 and from 30000 on.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = range(20000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), 30000, processes)
    first = random.SystemRandom().randrange(len(own))  # there may be other runs on this machine
    return itertools.cycle([*own[first:], *own[:first]])


def free_port() -> int:
    """A TCP port that nobody listens on, and that no test of this run has had lately."""
    return next(filter(_is_free, _own_ports()))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def sum_of(page: str, name: str, **labels: str) -> float:
    """Sum of the samples on a page of metrics: those of `djl_trtllm_NAME` that have these labels."""
    # A metric that is not there is not 0.
    assert f"# TYPE djl_trtllm_{re.sub('_(sum|count)$', '', name)} " in page, f"there is no metric {name}"
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    samples = re.findall(rf"^djl_trtllm_{name}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)
    return sum(float(value) for given, value in samples if all(label in given for label in wanted))


class Server(Reachable):
    """A server's process, what it says, and clients of it. Its folder has its log and, unless given, its cache."""

    def __init__(
        self,
        model: Path | str | None,
        environ: Mapping[str, str] | None = None,
        scratch: Path | None = None,
        program: tuple[str, ...] = CLI,
        port: int | None = None,
    ) -> None:
        super().__init__(port or free_port())
        self._folder = tempfile.TemporaryDirectory(prefix="server-")
        self._log = Path(self._folder.name) / "log"
        self._at_rest: tuple[int, int] | None = None
        self._seen: set[psutil.Process] = set()
        named = [] if model is None else [str(model)]
        cache = (scratch or Path(self._folder.name)) / "cache"
        with self._log.open("wb") as output:
            self.process = psutil.Popen(
                [sys.executable, *program, "serve", *named, "--port", str(self.port), "--host", "127.0.0.1"],
                env=environment(cache, **{**_USUAL, **(environ or {})}),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Server:
        _running.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            print(f"-- log of the server {self.url}", *self.log[-60:], sep="\n")
        self.close()

    def close(self) -> None:
        """Kill it, if it still runs. AssertionError: a process that it has started outlived it."""
        if self in _running:
            _running.remove(self)
        self.descendants()
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        alive = survivors(self._seen)
        for process in alive:
            process.kill()
        self._folder.cleanup()
        assert not alive, f"outlived its server: {alive}"

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def log(self) -> list[str]:
        """The lines that it has written."""
        return self._log.read_text(errors="replace").splitlines()

    def says(self, text: str) -> bool:
        """Whether a line of the log has this text."""
        return text in self._log.read_text(errors="replace")

    def wait_for_ping(self, status: int = 200, timeout: float = START_SECONDS) -> None:
        """Wait until /ping answers with `status`."""

        def answered() -> bool:
            assert self.process.poll() is None, "\n".join(["the server ended:", *self.log[-60:]])
            return self.ping() == status

        wait_until(answered, timeout, f"/ping {status}")

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of the metric `djl_trtllm_NAME` that have these labels."""
        return sum_of(self.http.get("/metrics").text, name, **labels)

    def finished(self, reason: str) -> float:
        """How many sequences have ended so."""
        return self.metric("finished_total", reason=reason)

    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        page = self.http.get("/metrics").text
        return sum_of(page, "waiting") == sum_of(page, "running") == 0

    def hosts(self) -> list[psutil.Process]:
        """The engine processes of this server."""
        return self._children(recursive=False)

    def host(self) -> psutil.Process:
        """The only engine process."""
        (host,) = self.hosts()
        return host

    def descendants(self) -> list[psutil.Process]:
        """The engine processes, and what they started."""
        return self._children(recursive=True)

    def _children(self, *, recursive: bool) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = self.process.children(recursive=recursive)
            self._seen.update(children)
            return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return []

    # -- an engine that stands still: of a script with the fault `stop` ------------------------------------------------

    def stopped(self) -> list[psutil.Process]:
        """Processes below it that SIGSTOP has stopped."""
        return [child for child in self.descendants() if child.status() == psutil.STATUS_STOPPED]

    def wait_until_stopped(self) -> None:
        """Wait until the fault has come."""
        wait_until(lambda: bool(self.stopped()), what="an engine that stands still")

    def resume(self) -> None:
        """SIGCONT for all below it: a SIGSTOP that was just sent may not have stopped its process yet."""
        for process in self.descendants():
            process.resume()

    # -- leaks ---------------------------------------------------------------------------------------------------------

    def note_rest(self) -> None:
        """Remember what the idle server holds, after a first request of each kind."""
        for stream in (False, True):
            self.generate(2, stream=stream)
        self._connect_anew()
        self.ping()
        self.descendants()
        self._at_rest = self.process.num_fds(), self.process.num_threads()

    def check_leaks(self) -> None:
        """Wait until nothing runs, and descriptors and threads are as few as `note_rest` saw."""
        if self._at_rest is None or self.process.poll() is not None:
            return
        self.descendants()
        descriptors, threads = self._at_rest
        wait_until(self.idle, what="waiting and running at 0")
        wait_until(lambda: self._has_few_descriptors(descriptors + _LEEWAY), what=f"{descriptors} file descriptors")
        wait_until(lambda: self.process.num_threads() <= threads + POOL, what=f"{threads} threads")

    def _has_few_descriptors(self, most: int) -> bool:
        if self.process.num_fds() <= most:
            return True
        self._connect_anew()  # or the server would keep the test's own connection for seconds
        return False

    def _connect_anew(self) -> None:
        self.http.close()
        self.http = self._client()

    # -- the end -------------------------------------------------------------------------------------------------------

    def terminate(self) -> None:
        """SIGTERM."""
        self.descendants()
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 120.0) -> int:
        """Exit status."""
        return int(self.process.wait(timeout))


@contextlib.contextmanager
def serving(model: Path | str | None, scratch: Path | None = None, /, **environ: str) -> Iterator[Server]:
    """A server that is ready, until the block ends."""
    with running(Server(model, environ, scratch)) as server:
        yield server


@contextlib.contextmanager
def running(server: Server, start_seconds: float = START_SECONDS) -> Iterator[Server]:
    """A server that was just started, as in `serving`. One that the block has ended is not looked at any more."""
    with server:
        server.wait_for_ping(timeout=start_seconds)
        server.note_rest()
        yield server
        if server.process.poll() is None:
            server.check_leaks()
            server.terminate()
            assert server.wait() == 0, "\n".join(server.log[-60:])


def check_leaks() -> None:
    """Check every server that runs."""
    for server in _running:
        server.check_leaks()


class Certificates:
    """An authority, a server's certificate for 127.0.0.1 that it signed, and a client's."""

    def __init__(self, folder: Path, days: int = 60) -> None:
        self._folder = folder
        self._days = days
        self.authority = folder / "authority.pem"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", str(days)),
            *("-subj", "/CN=authority", "-keyout", "authority.key", "-out", "authority.pem"),
        )
        self.certificate, self.key = self._signed("server", "subjectAltName=IP:127.0.0.1,DNS:localhost")
        self.client, self.client_key = self._signed("client", "subjectAltName=DNS:client")
        self.locked_key = folder / "locked.key"
        self._openssl("ec", "-in", str(self.key), "-aes128", "-passout", "pass:secret", "-out", "locked.key")

    def _signed(self, name: str, extension: str) -> tuple[Path, Path]:
        (self._folder / f"{name}.ext").write_text(extension)
        self._openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        self._openssl(
            *(
                "x509",
                "-req",
                "-in",
                f"{name}.csr",
                "-CA",
                "authority.pem",
                "-CAkey",
                "authority.key",
                "-days",
                str(self._days),
            ),
            *("-CAcreateserial", "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )
        return self._folder / f"{name}.pem", self._folder / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)
