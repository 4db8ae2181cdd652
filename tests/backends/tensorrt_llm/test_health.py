"""What TensorRT-LLM knows of its state is asked, and one that is silent is given a request of one token: a worker ends
with it if it has an error to report."""

from __future__ import annotations

import asyncio
from queue import Queue
from types import SimpleNamespace

import pytest

from djl_trtllm.backends.tensorrt_llm.health import probe_of, trouble_of
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.request import Adapter, Guide, GuideKind, Sampling
from tests.backends.tensorrt_llm.played_llm import MakeEngine, RequestError
from tests.support.virtual_time import in_virtual_time


def llm(*errors: Exception, is_shutdown: bool = False, **others: object) -> SimpleNamespace:
    queue: Queue[Exception] = Queue()
    for error in errors:
        queue.put(error)
    return SimpleNamespace(_executor=SimpleNamespace(_error_queue=queue, is_shutdown=lambda: is_shutdown), **others)


def test_the_first_error_of_a_background_thread_is_the_trouble_and_stays_where_it_is() -> None:
    failed = llm(RuntimeError("in a thread"), OSError("later"), is_shutdown=True, _check_health=lambda: True)
    assert [trouble_of(failed) for _ in range(2)] == ["RuntimeError: in a thread"] * 2


def test_a_version_that_knows_how_it_is_is_asked_and_nothing_else() -> None:
    assert trouble_of(llm(is_shutdown=True, _check_health=lambda: True)) is None
    assert trouble_of(llm(_check_health=lambda: False)) == "it reports that it is not healthy"


def test_one_that_has_shut_down_is_in_trouble() -> None:
    assert trouble_of(llm()) is None
    assert trouble_of(llm(is_shutdown=True)) == "it has shut down"
    for without in (SimpleNamespace(), SimpleNamespace(_executor=None)):
        assert trouble_of(without) == "it has shut down"
    # As with an executor in the process itself, of which nothing is known.
    assert trouble_of(SimpleNamespace(_executor=object())) is None


def test_a_probe_is_one_token_for_an_engine_that_took_the_request() -> None:
    message = Submit(
        7,
        [5, 6, 7],
        Sampling(90, min_new_tokens=4, do_sample=True, beam_width=3),
        stop=["a"],
        guide=Guide(GuideKind.REGEX, "a"),
        adapter=Adapter("a", 1, "/a"),
        logprobs=True,
        top_logprobs=2,
    )
    probe = probe_of(message)
    assert (probe.prompt_ids, probe.sampling) == ([5], Sampling(1, beam_width=3))
    assert (probe.guide, probe.adapter, probe.logprobs, probe.top_logprobs) == (None, None, False, 0)


def test_a_silent_engine_is_probed_once_and_one_that_answers_is_not(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make(hang_timeout=60.0)
        await engine.begin()
        result = engine.submit(1)
        for _ in range(3):
            await asyncio.sleep(4)
            result.say(7)
        assert len(engine.llm.calls) == 1
        await asyncio.sleep(5.6)
        assert len(engine.llm.calls) == 2
        assert engine.llm.calls[1]["inputs"] == [5]
        assert engine.llm.calls[1]["sampling_params"].max_tokens == 1
        await asyncio.sleep(40)
        assert len(engine.llm.calls) == 2
        result.say(8)
        await asyncio.sleep(6.5)
        assert len(engine.llm.calls) == 3
        await engine.ended()

    body()


def test_an_idle_engine_is_not_probed(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make(hang_timeout=60.0)
        await engine.begin()
        await asyncio.sleep(30)
        assert engine.llm.calls == []
        await engine.ended()

    body()


@pytest.mark.parametrize(("error", "lost"), [(RuntimeError("in the worker"), True), (RequestError("too long"), False)])
def test_what_a_probe_is_answered_may_be_the_loss(make: MakeEngine, error: Exception, lost: bool) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make(hang_timeout=60.0)
        await engine.begin()
        engine.submit(1)
        engine.llm.refusal = error
        await asyncio.sleep(6)
        assert engine.running.done() is lost
        if lost:
            with pytest.raises(RuntimeError, match="in the worker"):
                await engine.running
        await engine.ended()

    body()
