"""TensorRT-LLM, fake and installed, and servers on both of its backends, started by the ordinary command line."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from djl_trtllm.backends.tensorrt_llm.names import members
from tests.fakes.installation import fake_tensorrt_llm
from tests.support import server as cli
from tests.support.server import Server, running


class KeptServer:
    """Started when it is first wanted. One that a test has left broken is replaced, so that only that test fails."""

    def __init__(self, start: Callable[[], AbstractContextManager[Server]]) -> None:
        self._start = start
        self._stack = ExitStack()
        self._server: Server | None = None

    def get(self) -> Server:
        """A server that answers."""
        if self._server is not None and not _answers(self._server):
            if self._server.process.poll() is None:
                self._server.process.kill()
                self._server.process.wait()
            self.close()
        if self._server is None:
            self._server = self._stack.enter_context(self._start())
        return self._server

    def close(self) -> None:
        self._server = None
        self._stack.close()


def _answers(server: Server) -> bool:
    """Whether the server passes the strongest check that there is: it generates."""
    if server.process.poll() is not None:
        return False
    try:
        return server.ping() == 200 and server.generate(2).status_code == 200
    except httpx.HTTPError:
        return False


CHECKPOINT = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
START_SECONDS = 900
"""Importing TensorRT-LLM, compiling and loading take minutes on a GPU."""


@dataclass(frozen=True)
class Installation:
    """A TensorRT-LLM, and the environment in which a subprocess sees it."""

    name: str
    version: str
    environ: dict[str, str] = field(repr=False)

    @property
    def is_fake(self) -> bool:
        return self.name == "fake"

    def has(self, backend: str) -> bool:
        """Whether this version has `LLM.BACKEND`."""
        return bool(members(f"LLM.{backend}", self.version))


def _installed() -> str | None:
    """The version of the real package."""
    try:
        return importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.fixture(
    scope="session",
    params=["fake", *([pytest.param("installed", marks=pytest.mark.trtllm)] if _installed() is not None else [])],
)
def installation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The fake TensorRT-LLM 1.2.1, and what is installed."""
    scratch = tmp_path_factory.mktemp(request.param)
    environ = {"DJL_CACHE_DIR": str(scratch / "cache"), "HF_HUB_OFFLINE": "1"}
    if request.param == "fake":
        # Slow enough to be disconnected from in the middle.
        script = {"steps_per_second": 2000, "sampled": True}
        fake = fake_tensorrt_llm(scratch / "fake", version="1.2.1", script=script)
        return Installation("fake", "1.2.1", {**environ, **fake})
    version = _installed()
    assert version is not None
    return Installation("installed", version, environ)


@pytest.fixture(scope="session", params=[pytest.param("tensorrt", marks=pytest.mark.slow), "pytorch"])
def backend(request: pytest.FixtureRequest, installation: Installation) -> str:
    """The backends that this TensorRT-LLM has."""
    if not installation.has(request.param):
        pytest.skip(f"TensorRT-LLM {installation.version} has no backend {request.param}")
    name: str = request.param
    return name


MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory, tiny_stories: Path) -> MakeModel:
    """`make_model(BACKEND, **options)`: the bundled checkpoint, with options of its own."""

    def make(backend: str, **options: object) -> Path:
        directory = tmp_path_factory.mktemp("model") / "story"
        directory.mkdir()
        for name in CHECKPOINT:
            (directory / name).symlink_to(tiny_stories / name)
        values = {
            "backend": backend,
            "max_rolling_batch_size": 2,
            "max_input_len": 512,
            "max_output_len": 1024,
            **options,
        }
        lines = "".join(f"option.{name}={value}\n" for name, value in values.items())
        (directory / "serving.properties").write_text(lines)
        return directory

    return make


def takes_seeds(installation: Installation) -> bool:
    """Whether the PyTorch backend's own sampler has seeds of requests (TensorRT-LLM #17172)."""
    program = (
        "import sys; from djl_trtllm.backends.tensorrt_llm.sampling import takes_seeds; sys.exit(not takes_seeds())"
    )
    environ = {**os.environ, **installation.environ}
    return subprocess.run([sys.executable, "-c", program], env=environ, timeout=START_SECONDS).returncode == 0


def run_cli(installation: Installation, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`djl-trtllm` to its end."""
    return cli.run_cli(*arguments, environ={**os.environ, **installation.environ}, timeout=START_SECONDS)


@contextlib.contextmanager
def serving(installation: Installation, model: Path) -> Iterator[Server]:
    """A server that is ready. It ends with status 0, and nothing of it is left."""
    with running(Server(model, installation.environ), START_SECONDS) as server:
        yield server


def ask(server: Server, inputs: str, *, stream: bool = False, **parameters: Any) -> httpx.Response:
    """Send a request, and read its answer to the end."""
    return server.post(inputs, stream=stream, **parameters)


@pytest.fixture(scope="session")
def compiled(installation: Installation, make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the bundled model, by `djl-trtllm compile`."""
    if not installation.has("tensorrt"):
        pytest.skip(f"TensorRT-LLM {installation.version} has no engine backend")
    out = tmp_path_factory.mktemp("compiled") / "story"
    result = run_cli(installation, "compile", str(make_model("tensorrt")), str(out))
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="package")
def kept_server(
    request: pytest.FixtureRequest, installation: Installation, backend: str, make_model: MakeModel
) -> Iterator[KeptServer]:
    model = request.getfixturevalue("compiled") if backend == "tensorrt" else make_model("pytorch")
    kept = KeptServer(lambda: serving(installation, model))
    yield kept
    kept.close()


@pytest.fixture
def server(kept_server: KeptServer) -> Server:
    """A server with two places, the same for all tests that leave it whole."""
    return kept_server.get()
