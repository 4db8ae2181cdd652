"""Shared by the executor's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import pytest

from djl_trtllm.executor import client as client_module
from tests.executor.host_loop import HostLoop, run_with_loop
from tests.executor.played_host import PlayedEnvironment, PlayedHost


class Play(Protocol):
    def __call__(self, body: Callable[[PlayedHost], Awaitable[None]], hang_timeout: float = ...) -> None: ...


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """`play(body, hang_timeout)`: a test whose host is played, in virtual time. Nothing of it may be left."""

    def run(body: Callable[[PlayedHost], Awaitable[None]], hang_timeout: float = 60.0) -> None:
        async def whole(loop: HostLoop) -> None:
            environment = PlayedEnvironment()
            with monkeypatch.context() as patch:
                patch.setattr(client_module, "ProcessEnvironment", lambda: environment)
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
