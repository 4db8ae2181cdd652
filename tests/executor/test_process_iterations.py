"""An engine whose iterations the engine process runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from djl_trtllm.backends.scripted.executor import ScriptedExecutor
from djl_trtllm.executor import process as host
from djl_trtllm.executor.channel import Disconnected
from djl_trtllm.executor.held_output import HeldOutput
from djl_trtllm.executor.process import run
from djl_trtllm.executor.protocol import (
    Cancel,
    Delta,
    FromEngine,
    Ping,
    Pong,
    Stats,
    Step,
    ToEngine,
)
from djl_trtllm.request import FinishReason
from tests.executor.host_server import request


class Script:
    """A channel: each call of `receive` brings what stands next, and the server goes away at the end."""

    def __init__(self, *arrivals: list[ToEngine]) -> None:
        self.sent: list[FromEngine] = []
        self.blocked: list[bool] = []
        self.rest: list[bool] = []
        self._arrivals = list(arrivals)

    def receive(self, *, block: bool, rest: bool = False) -> list[ToEngine]:
        self.blocked.append(block)
        self.rest.append(rest)
        if not self._arrivals:
            raise Disconnected
        return self._arrivals.pop(0)

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


def follow(script: Script, executor: ScriptedExecutor, stream_interval: int = 1) -> None:
    """Run an executor to the end of a script."""
    with pytest.raises(Disconnected):
        run(script, executor, HeldOutput(stream_interval, 0.0))  # type: ignore[arg-type]


def test_an_idle_engine_process_waits_for_messages_and_a_busy_one_does_not() -> None:
    script = Script([request(1, tokens=2)], [], [], [Ping()])
    follow(script, ScriptedExecutor())
    assert script.blocked == [True, False, True, True, True]
    assert all(script.rest)


def test_iterations_are_sent_with_the_state_after_them() -> None:
    script = Script([request(1, tokens=1), request(2, tokens=2)], [])
    follow(script, ScriptedExecutor(max_sequences=4))
    first = [Delta(1, [5], None, FinishReason.LENGTH), Delta(2, [5])]
    assert script.sent == [
        Step(first, Stats(running=1, kv_usage=0.25)),
        Step([Delta(2, [6], None, FinishReason.LENGTH)], Stats(kv_usage=0.0)),
    ]


def test_without_work_nothing_is_run_and_nothing_sent() -> None:
    script = Script([Ping()], [Cancel(4)])
    follow(script, ScriptedExecutor())
    assert script.sent == [Pong()]


def test_iterations_without_news_send_a_sign_of_life_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Prefilling(ScriptedExecutor):
        def step(self) -> list[Delta]:
            now[0] += 0.25
            return []

    sent_at: list[float] = []

    class Timed(Script):
        def send(self, message: FromEngine) -> None:
            super().send(message)
            sent_at.append(now[0] - 100)

    script = Timed([request(1)], *([] for _ in range(10)))
    follow(script, Prefilling())
    assert script.sent == [Step([], Stats(running=1, kv_usage=1 / 256))] * 2
    assert sent_at == [1.25, 2.5]  # when more than a second has gone by


def test_news_put_the_next_sign_of_life_off(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(ScriptedExecutor):
        def step(self) -> list[Delta]:
            now[0] += 0.75
            return super().step() if now[0] == 100.75 else []

    script = Script([request(1)], [], [])
    follow(script, Slow())
    assert [len(message.deltas) for message in script.sent if isinstance(message, Step)] == [1, 0]


def test_output_that_is_held_back_is_sent_when_it_is_due() -> None:
    script = Script([request(1, tokens=6)], *([] for _ in range(5)))
    follow(script, ScriptedExecutor(), stream_interval=3)
    sent = [message.deltas for message in script.sent if isinstance(message, Step)]
    assert [[(delta.token_ids, bool(delta.finish)) for delta in deltas] for deltas in sent] == [
        [([5], False)],
        [([6, 7], False)],
        [([5, 6, 7], True)],
    ]


def test_nothing_held_back_waits_for_an_iteration_that_reads_a_prompt() -> None:
    script = Script([request(1, tokens=9)], [], [Ping()], [request(2, tokens=9)])
    follow(script, ScriptedExecutor(max_sequences=4), stream_interval=9)
    sent = [message.deltas for message in script.sent if isinstance(message, Step)]
    assert sent == [[Delta(1, [5])], [Delta(1, [6, 7])], [Delta(2, [5])]]


def test_a_sign_of_life_brings_what_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(ScriptedExecutor):
        def step(self) -> list[Delta]:
            now[0] += 0.75
            return super().step()

    script = Script([request(1, tokens=9)], [], [], [], [])
    follow(script, Slow(), stream_interval=9)
    assert [message.deltas for message in script.sent if isinstance(message, Step)] == [
        [Delta(1, [5])],
        [Delta(1, [6, 7])],
        [Delta(1, [5, 6])],
    ]
