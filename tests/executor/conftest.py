"""Shared by the executor's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from djl_trtllm.executor import client as client_module

from .host_loop import HostLoop, run_with_loop
from .played_host import PlayedEnvironment, PlayedHost
from .played_llm import MakeEngine, patched
from .tensorrt_llm_machine import Machine


class Play(Protocol):
    def __call__(self, body: Callable[[PlayedHost], Awaitable[None]], hang_timeout: float = ...) -> None: ...


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """`play(body, hang_timeout)`: a test whose host is played, in virtual time. Nothing of it may be left."""

    def run(body: Callable[[PlayedHost], Awaitable[None]], hang_timeout: float = 60.0) -> None:
        async def whole(loop: HostLoop) -> None:
            environment = PlayedEnvironment()
            with monkeypatch.context() as patch:
                patch.setattr(client_module, "HostEnvironment", lambda: environment)
                host = PlayedHost(loop, environment, hang_timeout)
                patch.setattr(asyncio, "create_subprocess_exec", host.spawn)
                try:
                    await body(host)
                    assert host.transport.is_closing()
                    assert environment.cleared
                finally:
                    host.end()

        run_with_loop(whole)

    return run


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """`make(version, **options)`: TensorRT-LLM's executor over an LLM that is played."""
    # Other tests of this process may have servers with ranks, which are none of the played LLM's.
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [])
    return patched(monkeypatch)


@pytest.fixture
def machine(tmp_path: Path, tiny_stories: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with the fake TensorRT-LLM."""
    return Machine(tmp_path, tiny_stories, monkeypatch)
