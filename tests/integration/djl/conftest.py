"""Our handlers in both modes of DJL, under its Java engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.djl.engines import MODES, JavaEngine, djl_model

Start = Callable[..., JavaEngine]

STOPPING, FAILING = 31, 77
"""Tokens of a request that stops the engine process at its third token, and of one that fails at its fourth."""

_SCRIPT = {
    "steps_per_second": 200,
    "faults": [
        {"action": "stop", "at_token": 2, "max_new_tokens": STOPPING},
        {"action": "error", "at_token": 3, "max_new_tokens": FAILING},
    ],
}
_WIDE = {"option.max_rolling_batch_size": 64, "option.max_input_len": 4096, "option.executor_hang_timeout": 600}
_NARROW = {"option.max_rolling_batch_size": 4, "job_queue_size": 2, "option.executor_hang_timeout": 600}


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """DJL's mode."""
    name: str = request.param
    return name


@pytest.fixture
def start(mode: str, tmp_path: Path) -> Iterator[Start]:
    """`start(script, **options)`: a scripted model under DJL."""
    with ExitStack() as stack:

        def start_one(script: dict[str, object] | None = None, **options: object) -> JavaEngine:
            return stack.enter_context(JavaEngine(djl_model(tmp_path / "model", mode, script, **options)))

        yield start_one


@pytest.fixture(scope="module")
def wide(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaEngine]:
    """200 tokens per second and request, 64 requests at once."""
    with JavaEngine(djl_model(tmp_path_factory.mktemp("wide") / "model", mode, _SCRIPT, **_WIDE)) as engine:
        yield engine


@pytest.fixture(scope="module")
def narrow(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaEngine]:
    """200 tokens per second and request, 4 requests at once and 2 that wait."""
    with JavaEngine(djl_model(tmp_path_factory.mktemp("narrow") / "model", mode, _SCRIPT, **_NARROW)) as engine:
        yield engine
