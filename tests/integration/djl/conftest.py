"""Our handlers in both modes of DJL, under its Java engine and under its Python engine alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.integration.djl.engines import MODES, JavaEngine, SocketEngine, djl_model

Engine: TypeAlias = "JavaEngine | SocketEngine"
Start: TypeAlias = "Callable[..., Engine]"

DRIVERS = ("java", "socket")
KINDS = [pytest.param((driver, mode), id=f"{driver}-{mode}") for driver in DRIVERS for mode in MODES]
STOPPING = 31
"""Tokens of a request that stops the engine process at its third token."""

_SCRIPT = {"steps_per_second": 200, "faults": [{"action": "stop", "at_token": 2, "max_new_tokens": STOPPING}]}
_WIDE = {"option.max_rolling_batch_size": 64, "option.max_input_len": 4096, "option.executor_hang_timeout": 600}
_NARROW = {"option.max_rolling_batch_size": 4, "job_queue_size": 2, "option.executor_hang_timeout": 600}


def engine_of(driver: str, mode: str, model: Path) -> Engine:
    """DJL with a model directory."""
    return JavaEngine(model) if driver == "java" else SocketEngine(model, mode)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """DJL's mode."""
    name: str = request.param
    return name


@pytest.fixture(params=DRIVERS)
def start(request: pytest.FixtureRequest, mode: str, tmp_path: Path) -> Iterator[Start]:
    """`start(script, **options)`: a scripted model under DJL."""
    with ExitStack() as stack:

        def start_one(script: dict[str, object] | None = None, **options: object) -> Engine:
            engine = engine_of(request.param, mode, djl_model(tmp_path / "model", mode, script, **options))
            stack.enter_context(engine)
            return engine

        yield start_one


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A driver and a mode, of engines that tests share."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def wide(kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """200 tokens per second and request, 64 requests at once."""
    driver, mode = kind
    model = djl_model(tmp_path_factory.mktemp("wide") / "model", mode, _SCRIPT, **_WIDE)
    with engine_of(driver, mode, model) as engine:
        yield engine


@pytest.fixture(scope="module")
def narrow(kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """200 tokens per second and request, 4 requests at once and 2 that wait."""
    driver, mode = kind
    model = djl_model(tmp_path_factory.mktemp("narrow") / "model", mode, _SCRIPT, **_NARROW)
    with engine_of(driver, mode, model) as engine:
        yield engine
