"""Servers on an executor whose tokens are known. After every test a leak check: nothing waits, runs or is left open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.serving_process import ServingProcess, scripted_model, serving, tensorrt_llm_model


@pytest.fixture(scope="session", params=["scripted", "tensorrt_llm"])
def executor(request: pytest.FixtureRequest) -> str:
    """What runs behind the servers: the scripted executor, or TensorRT-LLM's over the fake TensorRT-LLM."""
    name: str = request.param
    return name


def make_model(
    executor: str, directory: Path, script: dict[str, object] | None, **options: object
) -> tuple[Path, dict[str, str]]:
    """A model directory for that executor, and the environment it needs."""
    if executor == "scripted":
        return scripted_model(directory, script, **options), {}
    return tensorrt_llm_model(directory, script, **options)


@pytest.fixture(scope="session")
def _paced(executor: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    model, environ = make_model(
        executor,
        tmp_path_factory.mktemp("paced") / "model",
        {"steps_per_second": 200, "faults": [{"action": "error", "at_token": 3, "max_new_tokens": 77}]},
        **{"option.max_rolling_batch_size": 2, "job_queue_size": 3, "max_request_size": 200_000},
    )
    with serving(model, **environ) as server:
        server.note_rest()
        yield server
        server.terminate()
        assert server.wait() == 0


@pytest.fixture
def server(_paced: ServingProcess) -> Iterator[ServingProcess]:
    """A server with 2 places, a queue of 3, 200 tokens per second and request; 77 tokens fail at the fourth."""
    yield _paced
    assert _paced.ping() == 200
    _paced.check_leaks()


Start = Callable[..., ServingProcess]


@pytest.fixture
def start(executor: str, tmp_path: Path) -> Iterator[Start]:
    """`start(script, **options)`: a server of the test's own; leaks are checked if it still serves at the end."""
    with ExitStack() as stack:
        started: list[ServingProcess] = []

        def start_one(
            script: dict[str, object] | None = None, environ: dict[str, str] | None = None, **options: object
        ) -> ServingProcess:
            model, needed = make_model(executor, tmp_path / f"model-{len(started)}", script, **options)
            one = stack.enter_context(serving(model, **needed, **(environ or {})))
            started.append(one)
            one.note_rest()
            return one

        yield start_one
        for one in started:
            if one.process.poll() is None and one.ping() == 200:
                one.check_leaks()
                one.terminate()
                assert one.wait() == 0, "\n".join(one.log)
