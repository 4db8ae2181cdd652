"""Servers that tests share. Each is started once for its package, and a test that leaves something in one fails."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from starlette.types import ASGIApp

from djl_trtllm.engines import build
from djl_trtllm.model import Tokenizer
from tests.server.application import application
from tests.support import reference as golden
from tests.support.asgi import listening
from tests.support.in_process import Hosts
from tests.support.server import Server, check_leaks, serving

if TYPE_CHECKING:
    from tests.support.reference import Reference

MODEL_VARIABLE = "DJL_TRTLLM_TEST_MODEL"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """After every test: nothing waits, runs or is open in a server that goes on."""
    yield
    check_leaks()


@pytest.fixture(scope="session")
def model(tiny_stories: Path) -> Path:
    """A model directory with a checkpoint and its compiled engine: the bundled one, or $DJL_TRTLLM_TEST_MODEL."""
    path = Path(os.environ.get(MODEL_VARIABLE, tiny_stories))
    assert (path / "engine" / "openvino_model.xml").is_file(), f"{path} has no compiled engine"
    return path


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of servers, and their cache."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    """The same checkpoint in transformers."""
    from tests.support.reference import Reference

    return Reference(model)


@pytest.fixture(scope="session")
def golden_tokens(model: Path) -> golden.Tokens:
    """What transformers generates from it."""
    return golden.tokens_for(model)


@pytest.fixture(scope="package")
def server(model: Path, scratch: Path) -> Iterator[Server]:
    """A roomy server."""
    with serving(
        model,
        scratch,
        OPTION_MAX_ROLLING_BATCH_SIZE="64",
        OPTION_MAX_INPUT_LEN="2560",
        OPTION_MAX_TOKENS_IN_PAGED_KV_CACHE="65536",
    ) as started:
        yield started


@contextmanager
def compiling_here() -> Iterator[None]:
    """OpenVINO's compiler runs in this process: importing torch in a new one takes longer than compiling."""

    def run(self: build._Run) -> None:
        from djl_trtllm.backends.openvino.compile import OpenVinoSpec, compile_engine

        compile_engine(OpenVinoSpec.load(Path(self.command[-1])))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build._Run, "to_its_end", run)
        yield


@pytest.fixture
def compiled_here() -> Iterator[None]:
    """During the test the compiler runs in this process."""
    with compiling_here():
        yield


@pytest.fixture(scope="module")
def address(tokenizer: Tokenizer) -> Iterator[str]:
    """The URL of a server in this process with the model `story`, whose tokens are played."""

    @asynccontextmanager
    async def served() -> AsyncIterator[ASGIApp]:
        # The stream of the live page has no end.
        async with application(tokenizer, max_request_size=1_000_000, monitor=False) as application_:
            yield application_.app

    with Hosts().installed() as hosts, listening(served) as address:
        hosts.alone = True
        yield address
