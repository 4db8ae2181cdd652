"""The server's end of an engine process. The host is played, and time is virtual: nothing here waits."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable

import msgspec
import pytest

from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.executor.protocol import (
    Cancel,
    Delta,
    Feature,
    Limits,
    Ready,
    Shutdown,
    Start,
    Stats,
    Step,
    Submit,
)
from djl_trtllm.request import FinishReason, Sampling
from tests.executor.conftest import Play
from tests.executor.played_host import PID, PlayedHost, settled
from tests.support import executors

BUFFER = 64 * 1024


def step(*token_ids: int, finish: FinishReason | None = None) -> Step:
    return Step([Delta(1, list(token_ids), finish=finish)], Stats(running=1))


# -- starting ----------------------------------------------------------------------------------------------------------


def test_the_first_message_says_what_to_run_and_the_answer_what_there_is(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        starting = await host.begin(max_sequences=7)
        assert (host.client.details, host.client.features) == ({}, frozenset())
        await asyncio.sleep(1)
        assert not starting.done()
        assert host.process.heard() == [Start(executors.SCRIPTED, {"max_sequences": 7})]
        host.process.say(Ready(Limits(7, 9, 32, 100), {"engine": "played"}, frozenset({Feature.JSON})))
        await starting
        assert host.client.limits == Limits(7, 9, 32, 100)
        assert host.client.details == {"engine": "played"}
        assert host.client.features == {Feature.JSON}
        assert host.client.pid == PID
        await host.client.kill()

    play(body)


def test_the_process_is_a_python_with_one_end_of_the_socket_and_the_plans_environment(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
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
        await host.client.kill()

    play(body)


def test_little_lies_between_engine_process_and_server(play: Play) -> None:
    """More would be taken in at one go by a server that was slow for a moment."""

    async def body(host: PlayedHost) -> None:
        await host.start()
        ends: tuple[socket.socket, ...] = (
            host.process.connection,
            host.client._transport.get_extra_info("socket"),
        )
        # Linux doubles what it is asked for.
        assert [end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for end in ends] == [2 * BUFFER] * 2
        await host.client.kill()

    play(body)


def test_a_start_that_takes_too_long_is_ended_with_its_process(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        began = host.loop.now
        starting = await host.begin(timeout=30)
        with pytest.raises(ExecutorStartError) as caught:
            await starting
        assert str(caught.value) == "the engine was not loaded within 30 seconds (option.model_loading_timeout)"
        assert host.loop.now - began == pytest.approx(30)
        assert (host.process.kills, host.environment.cleared, host.probe.deaths) == (1, 1, [])

    play(body)


def test_a_cancelled_start_leaves_no_process(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        starting = await host.begin()
        await asyncio.sleep(1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert (host.process.kills, host.environment.cleared, host.probe.deaths) == (1, 1, [])

    play(body)


def test_a_start_that_is_cancelled_while_the_process_is_made_leaves_none(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        host.spawned.clear()
        starting = asyncio.ensure_future(host.probe.start())
        await asyncio.sleep(1)
        starting.cancel()
        await asyncio.sleep(1)
        assert not starting.done()  # there will be a process, and somebody must end it
        host.first_output = b"much"
        host.spawned.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert host.process.kills == 1
        assert host.process.stdout.at_eof()
        assert host.environment.cleared == 1
        assert host.probe.deaths == []

    play(body)


def test_a_process_that_cannot_be_made_is_a_start_error(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        host.spawn_error = OSError("no such python")
        with pytest.raises(ExecutorStartError) as caught:
            await (await host.begin())
        assert str(caught.value) == "the engine process could not be started: no such python"
        assert host.environment.cleared == 1
        assert host.probe.deaths == []

    play(body)


def test_a_full_disk_is_a_start_error(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        host.environment.error = OSError("no space left on device")
        with pytest.raises(ExecutorStartError, match="could not be started: no space left on device"):
            await (await host.begin())
        assert not hasattr(host.client, "_transport")
        host.environment.error = None
        await host.start()
        await host.client.kill()

    play(body)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (lambda host: host.process.end(3), f"the engine process (pid {PID}) is gone: it exited with status 3"),
        (lambda host: host.process.end(0), f"the engine process (pid {PID}) is gone: it exited with status 0"),
        (lambda host: host.process.end(-11), f"the engine process (pid {PID}) is gone: it was killed by SIGSEGV"),
    ],
)
def test_an_engine_process_that_ends_while_it_loads_is_a_start_error_and_no_death(
    play: Play, end: Callable[[PlayedHost], None], cause: str
) -> None:
    async def body(host: PlayedHost) -> None:
        starting = await host.begin()
        end(host)
        with pytest.raises(ExecutorStartError) as caught:
            await starting
        assert str(caught.value) == cause
        assert (host.probe.deaths, host.environment.cleared) == ([], 2)

    play(body)


@pytest.mark.parametrize(
    "words",
    ["CUDA out of memory", "OutOfMemoryError", "CUDAErrorMemoryAllocation", "OSError: Cannot allocate memory", ""],
)
def test_advice_comes_with_a_load_for_which_there_was_no_memory(play: Play, words: str) -> None:
    async def body(host: PlayedHost) -> None:
        starting = await host.begin()
        host.process.print(f"RuntimeError: {words}\n")
        await settled()
        host.process.end(1)
        with pytest.raises(ExecutorStartError) as caught:
            await starting
        advice = (
            "\nmemory ran out while the engine was loaded: lower option.kv_cache_free_gpu_mem_fraction, "
            "option.max_num_tokens or option.max_rolling_batch_size, use more GPUs (option.tensor_parallel_degree), or "
            "end what else is on the GPU"
        )
        assert str(caught.value).endswith(advice) == bool(words)

    play(body)


def test_a_start_error_that_nobody_waits_for_is_no_loose_end(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        starting = await host.begin()
        host.process.connection.close()
        await asyncio.sleep(0.5)  # its end is being looked into
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    play(body)


# -- requests ----------------------------------------------------------------------------------------------------------


def test_requests_and_cancels_are_sent_as_they_are(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        request = Submit(1, [5, 6], Sampling(9))
        host.client.submit(request)
        host.client.cancel(1)
        await settled()
        assert host.process.heard() == [request, Cancel(1)]
        await host.client.kill()

    play(body)


def test_iterations_that_arrive_together_are_handed_on_together(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        handed: list[list[Step]] = []
        host.client._on_steps = handed.append
        await host.start()
        host.process.say(step(5), step(6))
        await settled()
        host.process.say(step(7, finish=FinishReason.LENGTH))
        await settled()
        assert handed == [[step(5), step(6)], [step(7, finish=FinishReason.LENGTH)]]
        await host.client.kill()

    play(body)


def test_iterations_are_taken_in_wherever_the_stream_is_cut(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        body_ = msgspec.msgpack.encode(step(5))
        for byte in len(body_).to_bytes(4, "little") + body_:
            host.process.connection.sendall(bytes([byte]))
            await settled()
        assert host.probe.tokens(1) == [5]
        await host.client.kill()

    play(body)


# -- ending ------------------------------------------------------------------------------------------------------------


def test_close_asks_the_engine_process_to_end_and_waits_for_it(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
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

    play(body)


def test_close_ends_an_engine_process_that_does_not_react(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        began = host.loop.now
        await host.client.close()
        assert host.loop.now - began == pytest.approx(5)
        assert (host.process.kills, host.environment.cleared, host.probe.deaths) == (1, 1, [])

    play(body)


def test_kill_waits_until_the_process_is_gone(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        host.process.immortal = True
        killing = asyncio.ensure_future(host.client.kill())
        await asyncio.sleep(30)  # in the kernel, waiting for its GPU
        assert (host.process.kills, host.environment.cleared) == (1, 0)
        assert not killing.done()
        host.process.end(-9)
        await killing
        assert (host.environment.cleared, host.probe.deaths) == (1, [])

    play(body)


def test_kill_waits_for_a_death_that_is_being_looked_into(play: Play) -> None:
    async def body(host: PlayedHost) -> None:
        await host.start()
        host.process.connection.close()
        await asyncio.sleep(0.5)
        killing = asyncio.ensure_future(host.client.kill())
        host.loop.executor_seconds = lambda: 0.0 if asyncio.current_task() is killing else 3.0
        await killing
        assert len(host.probe.deaths) == 1

    play(body)


def test_what_the_engine_process_left_is_killed_and_logged(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def body(host: PlayedHost) -> None:
        host.environment.left = [7, 70]
        await host.start()
        await host.client.kill()

    play(body)
    assert caplog.messages == ["processes that the engine process left behind were killed: 7, 70"]


def test_without_left_processes_nothing_is_logged(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def body(host: PlayedHost) -> None:
        await host.start()
        await host.client.kill()

    play(body)
    assert caplog.messages == []
