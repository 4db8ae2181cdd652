"""Our handlers in both modes of DJL, under its Java engine and under its Python engine alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import pytest

from djl.java_engine import JavaEngine
from djl.models import MODES, djl_model
from djl.socket_engine import SocketEngine

Engine: TypeAlias = "JavaEngine | SocketEngine"
Start: TypeAlias = "Callable[..., Engine]"


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """DJL's mode."""
    name: str = request.param
    return name


@pytest.fixture(params=["java", "socket"])
def start(request: pytest.FixtureRequest, mode: str, tmp_path: Path) -> Iterator[Start]:
    """`start(script, **options)`: a scripted model under DJL."""
    with ExitStack() as stack:

        def start_one(script: dict[str, object] | None = None, **options: object) -> Engine:
            model = djl_model(tmp_path / "model", mode, script, **options)
            engine: Engine = JavaEngine(model) if request.param == "java" else SocketEngine(model, mode)
            return stack.enter_context(engine)

        yield start_one
