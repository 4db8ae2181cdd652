"""Servers on an executor whose tokens are known: the scripted one, and for what depends on it TensorRT-LLM's too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import scripted_model, tensorrt_llm_model
from tests.support.sagemaker_front import runtime_of
from tests.support.server import Server, serving

EXECUTORS = ["scripted", "tensorrt_llm"]
with_every_executor = pytest.mark.parametrize("executor", EXECUTORS, indirect=True, scope="session")


@pytest.fixture(scope="session")
def executor(request: pytest.FixtureRequest) -> str:
    """What runs behind the servers: the scripted executor, or TensorRT-LLM's over the fake TensorRT-LLM."""
    return str(getattr(request, "param", "scripted"))


def make_model(
    executor: str, directory: Path, script: dict[str, object] | None, /, **options: object
) -> tuple[Path, dict[str, str]]:
    """A model directory for that executor, and the environment it needs."""
    if executor == "scripted":
        return scripted_model(directory, script, **options), {}
    return tensorrt_llm_model(directory, script, **options)


def make_paced_model(executor: str, directory: Path) -> tuple[Path, dict[str, str]]:
    """A model with 2 places, a queue of 3, 200 tokens per second and request; 77 tokens fail at the fourth."""
    return make_model(
        executor,
        directory,
        {"steps_per_second": 200, "faults": [{"action": "error", "at_token": 3, "max_new_tokens": 77}]},
        **{"option.max_rolling_batch_size": 2, "job_queue_size": 3, "max_request_size": 200_000},
    )


@pytest.fixture(scope="package")
def server(executor: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the paced model."""
    model, environ = make_paced_model(executor, tmp_path_factory.mktemp("paced") / "model")
    with serving(model, **environ) as started:
        yield started


Start = Callable[..., Server]


@pytest.fixture
def start(executor: str, tmp_path: Path) -> Iterator[Start]:
    """`start(script, **options)`: a server of the test's own."""
    with ExitStack() as stack:

        def start_one(
            script: dict[str, object] | None = None, environ: dict[str, str] | None = None, **options: object
        ) -> Server:
            model, needed = make_model(executor, tmp_path / "model", script, **options)
            return stack.enter_context(serving(model, **needed, **(environ or {})))

        yield start_one


@pytest.fixture
def runtime(server: Server) -> Iterator[Any]:
    """boto3's client of SageMaker's runtime, with this server in its place."""
    with runtime_of(server.url) as client:
        yield client
