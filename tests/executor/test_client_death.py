"""A host that ends although nobody asked it to, and what is known of the reason. The host is played."""

from __future__ import annotations

import asyncio
import logging

import pytest

from djl_trtllm.executor.protocol import Delta, Failed, Ping, Pong, Step
from tests.executor.kit import PID, PlayedHost, played, settled, started, started_8_seconds

GONE = f"the engine process (pid {PID}) is gone: "
HINT = " (the kernel does that when memory runs out)"


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (0, "it exited with status 0"),
        (1, "it exited with status 1"),
        (3, "it exited with status 3"),
        (-11, "it was killed by SIGSEGV"),
        (-1, "it was killed by SIGHUP"),
        (-9, "it was killed by SIGKILL" + HINT),
    ],
)
@started
async def test_a_death_is_reported_once_with_the_status(host: PlayedHost, status: int, cause: str) -> None:
    host.process.end(status)
    assert await host.probe.death() == GONE + cause
    await host.client.close()
    assert len(host.probe.deaths) == 1


@pytest.mark.parametrize("said", ["RuntimeError: no engine", "CUDA out of memory"])
@started
async def test_what_the_engine_process_said_of_its_end_counts_more_than_its_status(host: PlayedHost, said: str) -> None:
    """Advice on memory is for loading, and the traceback is in the log."""
    host.process.print("Traceback\n")
    host.process.say(Failed(said))
    host.process.end(1)
    assert await host.probe.death() == GONE + said


@started
async def test_the_last_lines_of_an_engine_process_that_said_nothing_are_reported(host: PlayedHost) -> None:
    host.process.print("".join(f"line {number}  \n" for number in range(25)))
    await settled()
    host.process.end(3)
    lines = (await host.probe.death()).splitlines()
    assert lines == [
        GONE + "it exited with status 3",
        "its last output:",
        *(f"  | line {number}" for number in range(5, 25)),
    ]


@played
async def test_what_was_printed_before_the_end_is_in_the_log_with_the_id_of_its_request(
    host: PlayedHost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "djl_trtllm.executor.process")
    await host.start()
    host.process.print(b'first\n caf\xe9 \r\n\x1e"story-1"\x1ethe sampler is odd\nhalf')
    host.process.end(3)
    assert "  | the sampler is odd\n  | half" in await host.probe.death()
    await host.client.kill()
    assert [(getattr(record, "request_id", None), record.message) for record in caplog.records] == [
        (None, "first"),
        (None, " caf\ufffd"),
        ("story-1", "the sampler is odd"),
        (None, "half"),
    ]


@played
async def test_logging_goes_on_after_a_line_that_is_too_long(
    host: PlayedHost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "djl_trtllm.executor.process")
    await host.start()
    for text in ("before\n", "x" * (1 << 18), "\n", "after\n"):
        host.process.print(text)
        await settled()
    await host.client.kill()
    assert caplog.messages[0] == "before"
    assert caplog.messages[-1] == "after"
    assert caplog.messages.count("before") == 1
    assert all(len(message) < 1 << 17 for message in caplog.messages)


@started
async def test_an_engine_process_that_only_closes_its_socket_is_killed_after_a_second(host: PlayedHost) -> None:
    began = host.loop.now
    host.process.connection.close()
    await host.probe.until(lambda: bool(host.process.kills))
    assert host.loop.now - began == pytest.approx(1)
    assert host.environment.cleared == 1
    await host.probe.death()
    host.client.cancel(1)  # nobody hears it
    await host.client.kill()
    assert len(host.probe.deaths) == 1


@pytest.mark.parametrize("said", [False, True])
@played
async def test_a_failure_while_steps_are_handled_is_a_death_that_names_it(host: PlayedHost, said: bool) -> None:
    host.loop.set_exception_handler(lambda *_: None)
    await host.start()
    host.probe.error = ZeroDivisionError("in the rolling batch")
    messages = [Failed("first")] if said else []
    host.process.say(*messages, Step.of([Delta(1, [5])]))
    cause = "first" if said else "its messages could not be handled: ZeroDivisionError: in the rolling batch"
    assert await host.probe.death() == GONE + cause
    assert host.process.kills == 1


# -- silence -----------------------------------------------------------------------------------------------------------

SILENT = "silent for {} seconds (option.executor_hang_timeout)"


@pytest.mark.parametrize(("hang_timeout", "tick"), [(60.0, 1.0), (8.0, 1.0), (4.0, 0.5), (1.0, 0.125)])
@started
async def test_a_busy_engine_process_is_killed_when_it_was_silent_for_the_timeout(
    host: PlayedHost, hang_timeout: float, tick: float
) -> None:
    """It is looked at every second, or eight times per timeout where that is more often."""
    await asyncio.sleep(1.75 * tick)
    host.probe.busy, began = True, host.loop.now
    assert SILENT.format(f"{hang_timeout:g}") in await host.probe.death(timeout=1000)
    assert host.process.kills == 1
    assert host.process.killed_at - began == pytest.approx(hang_timeout + tick / 4)


@started_8_seconds
async def test_a_busy_engine_process_that_sends_is_never_taken_for_hung(host: PlayedHost) -> None:
    host.probe.busy = True
    for _ in range(20):
        await asyncio.sleep(7.5)
        host.process.say(Step())
    await settled()
    assert (host.process.kills, host.probe.deaths) == (0, [])


@started_8_seconds
async def test_a_pause_of_the_server_is_not_held_against_the_engine_process(host: PlayedHost) -> None:
    host.probe.busy = True
    await asyncio.sleep(4)
    host.loop.now += 1000
    await asyncio.sleep(3)
    assert host.process.kills == 0


@started
async def test_an_idle_engine_process_is_asked_for_a_sign_of_life_every_few_seconds(host: PlayedHost) -> None:
    asked = []
    for second in range(1, 22):
        await asyncio.sleep(1)
        await settled()
        for message in host.process.heard():
            assert message == Ping()
            asked.append(second)
            host.process.say(Pong())
            await settled()
    assert asked == [5, 11, 17]


@started
async def test_an_idle_engine_process_that_does_not_answer_is_killed(host: PlayedHost) -> None:
    ready = host.loop.now
    assert SILENT.format("60") in await host.probe.death(timeout=1000)
    assert host.process.killed_at - ready == pytest.approx(5 + 61)
