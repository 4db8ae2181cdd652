"""The server's end of an engine process that the test plays, in virtual time: starting, sending, ending."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import sys

import msgspec
import pytest

from djl_trtllm.errors import ExecutorStartError, TokenizerError
from djl_trtllm.executor import client as client_module
from djl_trtllm.executor.protocol import (
    Cancel,
    Failed,
    Feature,
    Limits,
    Ping,
    Pong,
    Ready,
    Shutdown,
    Start,
    Stats,
    Step,
    Submit,
    ToEngine,
    Try,
)
from djl_trtllm.processes import oom_kills
from djl_trtllm.request import FinishReason, Guide, GuideKind, Sampling
from tests.executor.kit import PID, READY, PlayedHost, played, settled, started, started_8_seconds
from tests.support import models
from tests.support.steps import Delta, step_of
from tests.support.tables import by_table

BUFFER = 64 * 1024


def step(*token_ids: int, finish: FinishReason | None = None) -> Step:
    return step_of([Delta(1, list(token_ids), finish=finish)], Stats(running=1))


# -- starting ----------------------------------------------------------------------------------------------------------


@played
async def test_the_first_message_says_what_to_run_and_the_answer_what_there_is(host: PlayedHost) -> None:
    starting = await host.begin(max_sequences=7)
    assert (host.client.details, host.client.features) == ({}, frozenset())
    await asyncio.sleep(1)
    assert not starting.done()
    assert host.process.heard() == [Start(models.SCRIPTED, {"max_sequences": 7})]
    host.process.say(Ready(Limits(7, 9, 32, 100), {"engine": "played"}, frozenset({Feature.JSON})))
    await starting
    assert host.client.limits == Limits(7, 9, 32, 100)
    assert host.client.details == {"engine": "played"}
    assert host.client.features == {Feature.JSON}
    assert host.client.pid == PID


@started
async def test_the_process_is_a_python_with_one_end_of_the_socket_and_an_environment_of_its_own(
    host: PlayedHost,
) -> None:
    (descriptor,) = host.options["pass_fds"]
    assert host.command == (sys.executable, "-m", "djl_trtllm.executor.process", str(descriptor))
    assert host.options == {
        "pass_fds": [descriptor],
        "env": host.environment.variables,
        "stdin": asyncio.subprocess.DEVNULL,
        "stdout": asyncio.subprocess.PIPE,
        "stderr": asyncio.subprocess.STDOUT,
    }
    assert host.environment.prepared == 1
    # A server that was slow for a moment would take in more at one go. Linux doubles what it is asked for.
    ends = host.process.connection, host.loop.transports[-1].get_extra_info("socket")
    assert [end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for end in ends] == [2 * BUFFER] * 2


@played
async def test_a_start_that_takes_too_long_is_ended_with_its_process(host: PlayedHost) -> None:
    began = host.loop.now
    with pytest.raises(ExecutorStartError, match=r"within 30 seconds \(option\.model_loading_timeout\)"):
        await (await host.begin(timeout=30))
    assert host.loop.now - began == pytest.approx(30)
    assert (host.process.kills, host.environment.cleared, host.probe.deaths) == (1, 1, [])


@pytest.mark.parametrize("how", ["late", "failed", "ended"])
@played
async def test_a_start_that_fails_quotes_what_the_log_says_of_the_reason(host: PlayedHost, how: str) -> None:
    starting = await host.begin(timeout=30, reasons=r"rank \d+: |refused")
    host.process.print("loading\n" + "rank 1: no memory\n" + 30 * "a traceback\n" + 6 * "refused\n")
    if how == "failed":
        host.process.say(Failed("RuntimeError: a worker died"))
    if how != "late":
        await settled()
        host.process.end(1)
    with pytest.raises(ExecutorStartError) as caught:
        await starting
    reasons = ["its log says why:", "  | rank 1: no memory", *4 * ["  | refused"]]
    assert str(caught.value).splitlines()[-6:] == reasons


@pytest.mark.parametrize("while_it_is_made", [False, True])
@played
async def test_a_cancelled_start_leaves_no_process(host: PlayedHost, while_it_is_made: bool) -> None:
    if while_it_is_made:
        host.spawned.clear()
        host.first_output = b"much"
    starting = asyncio.ensure_future(host.probe.start())
    await asyncio.sleep(1)
    starting.cancel()
    if while_it_is_made:
        await asyncio.sleep(1)
        assert not starting.done(), "there will be a process, and somebody must end it"
        host.spawned.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert host.process.stdout.at_eof()
    assert (host.process.kills, host.environment.cleared, host.probe.deaths) == (1, 1, [])


@played
async def test_a_process_that_cannot_be_made_is_a_start_error(host: PlayedHost) -> None:
    host.spawn_error = OSError("no such python")
    with pytest.raises(ExecutorStartError, match="could not be started: no such python"):
        await (await host.begin())
    assert (host.environment.cleared, host.probe.deaths) == (1, [])


@by_table("words", "advised", apart=True)
@played
async def test_a_process_that_ends_while_it_loads_is_a_start_error_with_advice_on_memory(
    host: PlayedHost, words: str, advised: bool
) -> None:
    starting = await host.begin()
    host.process.print(f"RuntimeError: {words}\n")
    await settled()
    host.process.end(3)
    with pytest.raises(ExecutorStartError) as caught:
        await starting
    message = str(caught.value)
    assert message.startswith(f"the engine process (pid {PID}) is gone: it exited with status 3")
    assert ("option.max_num_tokens" in message) == ("option.tensor_parallel_degree" in message) == advised
    assert (host.probe.deaths, host.environment.cleared) == ([], 2)


# What the server does meanwhile: a failure on either side ends both.


@played
async def test_what_is_done_meanwhile_begins_when_the_process_has_what_to_load(host: PlayedHost) -> None:
    heard: list[ToEngine] = []

    async def meanwhile() -> None:
        heard.extend(host.process.heard())
        host.process.say(READY)
        await asyncio.sleep(5)

    began = host.loop.now
    await host.client.start(Start(models.SCRIPTED, {}), 3, meanwhile=meanwhile)
    assert heard == [Start(models.SCRIPTED, {})]
    assert host.loop.now - began == pytest.approx(5)


@pytest.mark.parametrize("error", [TokenizerError("no tokenizer"), TimeoutError("no tokenizer")])
@played
async def test_what_fails_meanwhile_ends_the_process(host: PlayedHost, error: Exception) -> None:
    async def meanwhile() -> None:
        raise error

    with pytest.raises(type(error), match="no tokenizer"):
        await host.client.start(Start(models.SCRIPTED, {}), 30, meanwhile=meanwhile)
    assert (host.process.kills, host.environment.cleared, host.probe.deaths) == (1, 1, [])


@pytest.mark.parametrize("seconds", [0, 5], ids=["meanwhile it is cleared away", "and is gone"])
@played
async def test_a_process_that_ends_after_its_engine_is_loaded_and_before_all_else_is_a_start_error(
    host: PlayedHost, seconds: float
) -> None:
    host.loop.executor_seconds = lambda: 1.0

    async def meanwhile() -> None:
        host.process.say(READY)
        await settled()
        host.process.end(-9)
        await settled()
        await asyncio.sleep(seconds)

    with pytest.raises(ExecutorStartError, match="killed by SIGKILL") as caught:
        await host.client.start(Start(models.SCRIPTED, {}), 30, meanwhile=meanwhile)
    assert caught.value.killed
    assert host.probe.deaths == []


# -- messages ----------------------------------------------------------------------------------------------------------


@started
async def test_messages_of_one_turn_of_the_event_loop_are_sent_together(host: PlayedHost) -> None:
    """Each write takes some room of a socket, however short it is, and an engine may read once in an iteration."""
    request = Submit(1, [5, 6], Sampling(9))
    host.client.submit(request)
    host.client.cancel(1)
    assert host.process.heard() == [], "they wait for the others of their turn"
    host.client.try_guide(trial := Try(2, Guide(GuideKind.REGEX, "a")))
    await settled()
    assert host.process.heard() == [request, Cancel(1), trial]
    host.client.pause_writing()
    for number in (1, 2):
        host.client.cancel(number)
        await settled()
    assert host.process.heard() == [], "the socket has no room"
    host.client.resume_writing()
    await settled()
    assert host.process.heard() == [Cancel(1), Cancel(2)]


@started
async def test_messages_of_a_busy_event_loop_wait_for_each_other_for_a_moment(host: PlayedHost) -> None:
    """A crowd of requests comes in many turns, and each write wakes the engine process."""
    times = itertools.count()
    host.client.clock = lambda: next(times) / 8192  # the time of a turn
    sent: list[ToEngine] = []
    for number in range(6):
        host.client.cancel(number)
        sent.append(Cancel(number))
        await asyncio.sleep(0)
        assert host.process.heard() == []
    await settled()
    assert host.process.heard() == sent


@pytest.mark.parametrize(
    ("turns", "sent_in"),
    [([0.00004], 1), ([0.0002, 0.0002, 0.00004], 3), ([0.0002] * 5, 5), ([0.0002, 0.0002, 0.0002, 0.0002, 0.0001], 0)],
)
@started
async def test_messages_are_sent_after_a_turn_without_much_to_do_and_after_a_millisecond_at_the_latest(
    host: PlayedHost, turns: list[float], sent_in: int
) -> None:
    times = itertools.accumulate(turns, initial=0.0)
    host.client.clock = lambda: next(times)
    host.client.cancel(1)
    sent = []
    for _ in turns:
        await asyncio.sleep(0)
        sent.append(host.process.heard() != [])
    host.client.clock = lambda: 1000.0
    await settled()
    assert sent == [turn == sent_in for turn in range(1, len(turns) + 1)]


@started
async def test_iterations_that_arrive_together_are_handed_on_together_wherever_the_stream_is_cut(
    host: PlayedHost,
) -> None:
    host.process.say(step(5), step(6))
    await settled()
    body = msgspec.msgpack.encode(step(7, finish=FinishReason.LENGTH))
    for byte in len(body).to_bytes(4, "little") + body:
        host.process.connection.sendall(bytes([byte]))
        await settled()
    assert host.probe.steps == [[step(5), step(6)], [step(7, finish=FinishReason.LENGTH)]]


# -- ending ------------------------------------------------------------------------------------------------------------


@started
async def test_close_asks_the_engine_process_to_end_and_waits_for_it(host: PlayedHost) -> None:
    closing = asyncio.ensure_future(host.client.close())
    await asyncio.sleep(2)
    assert host.process.heard() == [Shutdown()]
    assert not closing.done()
    host.process.end(0)
    await closing
    assert (host.process.kills, host.environment.cleared, host.probe.deaths) == (0, 1, [])
    # Nobody hears it, and nothing breaks.
    host.client.submit(Submit(2, [5], Sampling(1)))
    host.client.cancel(2)
    await host.client.close()


@started
async def test_close_ends_an_engine_process_that_does_not_react(host: PlayedHost) -> None:
    began = host.loop.now
    await host.client.close()
    assert host.loop.now - began == pytest.approx(5)
    assert (host.process.kills, host.environment.cleared, host.probe.deaths) == (1, 1, [])


@started
async def test_kill_waits_until_the_process_is_gone(host: PlayedHost) -> None:
    host.process.immortal = True
    killing = asyncio.ensure_future(host.client.kill())
    await asyncio.sleep(30)  # in the kernel, waiting for its GPU
    assert (host.process.kills, host.environment.cleared) == (1, 0)
    assert not killing.done()
    host.process.end(-9)
    await killing
    assert (host.environment.cleared, host.probe.deaths) == (1, [])


@pytest.mark.parametrize("left", [[7, 70], []])
@played
async def test_what_the_engine_process_left_is_killed_and_logged(
    host: PlayedHost, caplog: pytest.LogCaptureFixture, left: list[int]
) -> None:
    caplog.set_level("INFO")
    host.environment.left = left
    await host.start()
    await host.client.kill()
    logged = ["processes that the engine process left behind were killed: 7, 70"] if left else []
    assert caplog.messages == logged


# -- a process that ends although nobody asked it to, and what is known of the reason ----------------------------------

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
    assert [death.killed for death in host.probe.deaths] == [status == -9]


@pytest.mark.parametrize("said", [None, "a worker process of TensorRT-LLM is gone (pid 7)"])
@played
async def test_an_end_while_the_kernel_ran_out_of_memory_is_that_of_a_killed_process(
    host: PlayedHost, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have killed a worker, and the engine process then ends by itself."""
    await host.start()
    monkeypatch.setattr(client_module, "oom_kills", lambda: oom_kills() + 1)
    if said is not None:
        host.process.say(Failed(said))
    host.process.end(1)
    message = await host.probe.death()
    assert message.startswith(GONE + (said or "it exited with status 1"))
    assert "memory ran out" in message
    assert [death.killed for death in host.probe.deaths] == [True]


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
    assert [death.killed for death in host.probe.deaths] == [False]  # from outside


@pytest.mark.parametrize("said", [False, True])
@played
async def test_a_failure_while_steps_are_handled_is_a_death_that_names_it(host: PlayedHost, said: bool) -> None:
    host.loop.set_exception_handler(lambda *_: None)
    await host.start()
    host.probe.error = ZeroDivisionError("in the rolling batch")
    messages = [Failed("first")] if said else []
    host.process.say(*messages, step_of([Delta(1, [5])]))
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
    assert not host.probe.deaths[0].killed, "by this server, for its own fault"


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
