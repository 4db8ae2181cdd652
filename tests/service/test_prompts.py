"""How a prompt is read: what cannot fit is refused before any work, the rest is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import socket
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import psutil
import pytest
import uvloop

from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.errors import InvalidRequestError, NotReadyError, PromptTooLongError, RequestTimeoutError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import GenerationRequest, Pooling, Sampling
from djl_trtllm.service.prompts import PromptReader
from djl_trtllm.service.rendering import ChatRenderer, RenderingProcess
from djl_trtllm.service.work import WORKERS, WorkerThreads
from tests.support.in_process import Hosts, played_model
from tests.support.processes import PATIENCE
from tests.support.virtual_time import in_real_time, until

TEMPLATE = (
    "{% if messages[0]['content'] == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% elif messages[0]['content'] == 'power' %}{{ 9 ** (9 ** 9) }}"
    "{% elif messages[0]['content'] == 'memory' %}{{ 'x' * 4000000000 }}"
    "{% elif messages[0]['content'] == 'slow' %}{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}"
    "{% endfor %}of another client"
    "{% elif messages[0]['content'] == 'refuse' %}{{ raise_exception('not so') }}"
    "{% else %}{{ bos_token }}{{ messages[0]['content'] }}{{ more }}{% endif %}"
)


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def rendering(
    timeout: float = 60.0, make: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Makes a test, in real time, of a coroutine function with a `renderer` of one template.

    No process of it outlives the test.
    """

    def with_renderer(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def main(**fixtures: Any) -> None:
            before = set(psutil.Process().children())
            tokenizer = SimpleNamespace(chat_templates=({"default": TEMPLATE}, {"bos_token": "<s>"}, Path("here")))
            renderer = ChatRenderer(cast(Tokenizer, tokenizer), timeout)
            try:
                await test(renderer=renderer, **fixtures)
            finally:
                await renderer.close()
                assert set(psutil.Process().children()) <= before
                gc.collect()

        @functools.wraps(test)
        def running(**fixtures: Any) -> None:
            with contextlib.closing(make()) as loop:
                loop.run_until_complete(main(**fixtures))

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name != "renderer"]
        running.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]  # pytest reads it
        return running

    return with_renderer


@rendering()
async def test_conversations_are_rendered_in_order_with_their_keywords(renderer: ChatRenderer) -> None:
    texts = [f"{number} 🦊" for number in range(50)]
    prompts = await asyncio.gather(
        *(renderer.render(conversation(text), {"more": number}) for number, text in enumerate(texts))
    )
    assert prompts == [f"<s>{text}{number}" for number, text in enumerate(texts)]


@rendering()
async def test_what_the_template_refuses_is_refused_with_its_reason(renderer: ChatRenderer) -> None:
    with pytest.raises(InvalidRequestError, match="refuses these messages: not so"):
        await renderer.render(conversation("refuse"), {})
    assert await renderer.render(conversation("a"), {}) == "<s>a"


@rendering(timeout=0.5)
async def test_a_template_that_does_not_end_is_given_up_and_the_others_are_rendered(renderer: ChatRenderer) -> None:
    await renderer.render(conversation("warm"), {})
    results = await asyncio.gather(
        *(renderer.render(conversation(text), {}) for text in ("a", "loop", "b", "power", "c")),
        return_exceptions=True,
    )
    assert [result for result in results if isinstance(result, str)] == ["<s>a", "<s>b", "<s>c"]
    assert [str(result) for result in results if isinstance(result, InvalidRequestError)] == [
        "the model's chat template failed on these messages: it takes longer than chat_template_timeout=0.5 seconds"
    ] * 2


@rendering()
async def test_a_template_that_takes_all_memory_is_refused_it(renderer: ChatRenderer) -> None:
    with pytest.raises(InvalidRequestError, match="MemoryError"):
        await renderer.render(conversation("memory"), {})
    assert await renderer.render(conversation("a"), {}) == "<s>a"


@rendering()
async def test_a_process_that_is_killed_costs_no_request_and_one_whose_processes_end_twice_is_refused(
    renderer: ChatRenderer,
) -> None:
    await renderer.render(conversation("a"), {})
    (process,) = psutil.Process().children()
    process.kill()
    assert await renderer.render(conversation("b"), {}) == "<s>b"
    prompt, killed = renderer.render(conversation("loop"), {}), set[psutil.Process]()
    while not prompt.done():
        for process in set(psutil.Process().children()) - killed:
            process.kill()
            killed.add(process)
        await asyncio.sleep(0.01)
    with pytest.raises(InvalidRequestError, match="its process has ended"):
        await prompt
    assert len(killed) == 2
    assert await renderer.render(conversation("c"), {}) == "<s>c"


@rendering()
async def test_who_leaves_is_not_waited_for_and_closing_ends_the_rest(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = asyncio.ensure_future(renderer.render(conversation("loop"), {}))
    staying = asyncio.ensure_future(renderer.render(conversation("a"), {}))
    await asyncio.sleep(0)
    leaving.cancel()
    await renderer.close()
    with pytest.raises(NotReadyError):
        await staying
    start = mock.AsyncMock(side_effect=OSError)
    monkeypatch.setattr(RenderingProcess, "start", start)
    with pytest.raises(NotReadyError):
        await renderer.render(conversation("a"), {})
    start.assert_not_called()


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_answer_that_came_in_time_is_read_where_the_server_stood_still(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """uvloop's timers run before the connections are read that had something meanwhile."""
    ours, theirs = socket.socketpair()

    def stand_still() -> None:
        ours.recv(1)
        time.sleep(3)

    async def body(renderer: ChatRenderer) -> None:
        await renderer.render(conversation("warm"), {})
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, stand_still)
        prompt = renderer.render(conversation("slow"), {})
        await asyncio.sleep(0)
        theirs.send(b"x")
        assert await prompt == "of another client"
        loop.remove_reader(ours)

    with ours, theirs:
        rendering(2.0, make)(body)()


@rendering(timeout=1.0)
async def test_the_time_of_a_conversation_ends_with_it(renderer: ChatRenderer) -> None:
    loop = asyncio.get_running_loop()
    await renderer.render(conversation("warm"), {})
    begun = loop.time()
    assert await renderer.render(conversation("a"), {}) == "<s>a"
    await asyncio.sleep(0.9)
    while loop.time() < begun + 1.3:  # one is rendered when the time of the first is over
        assert await renderer.render(conversation("a"), {}) == "<s>a"


@rendering()
async def test_the_client_that_leaves_is_not_kept_until_its_prompt_is_rendered(renderer: ChatRenderer) -> None:
    await renderer.render(conversation("warm"), {})
    leaving = asyncio.ensure_future(renderer.render(conversation("loop"), {}))
    await asyncio.sleep(0.1)
    leaving.cancel()
    done, _ = await asyncio.wait({leaving}, timeout=30)
    assert done == {leaving}


@rendering()
async def test_conversations_of_clients_that_have_left_wait_for_no_turn(renderer: ChatRenderer) -> None:
    """Each client may send as many as it likes, one after the other, while another one is rendered."""
    await renderer.render(conversation("warm"), {})
    staying = asyncio.ensure_future(renderer.render(conversation("loop"), {}))
    await asyncio.sleep(0)
    tracemalloc.start()
    try:
        for _ in range(20):
            leaving = renderer.render(conversation("x" * 1_000_000), {})
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.sleep(0)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 5_000_000
    assert not staying.done()
    staying.cancel()


@rendering(timeout=600)
async def test_the_conversation_of_a_client_that_leaves_before_its_turn_is_not_rendered(renderer: ChatRenderer) -> None:
    renderer.render(conversation("loop"), {}).cancel()
    assert await asyncio.wait_for(renderer.render(conversation("a"), {}), 60) == "<s>a"


@rendering()
async def test_nobody_gets_the_prompt_of_a_client_that_has_left(renderer: ChatRenderer) -> None:
    await renderer.render(conversation("warm"), {})
    for number in range(2):
        leaving = asyncio.ensure_future(renderer.render(conversation("slow"), {}))
        await asyncio.sleep(0.1)
        while not leaving.done():  # as where the request is late first, and its client leaves then
            leaving.cancel()
            await asyncio.sleep(0)
        assert await renderer.render(conversation(f"{number}"), {}) == f"<s>{number}"


@rendering()
async def test_messages_that_no_process_can_take_are_refused(renderer: ChatRenderer) -> None:
    deep: Any = None
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="the messages are not JSON"):
        await renderer.render([{"role": "user", "content": deep}], {})
    while deep:  # without recursion
        (deep,) = deep


@rendering()
async def test_the_process_has_what_python_and_texts_need_and_no_secrets(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC", "LD_LIBRARY_PATH": "/no/lib", "VIRTUAL_ENV": "/no/env"}
    for name, value in (kept | {"HF_TOKEN": "hf_secret"}).items():
        monkeypatch.setenv(name, value)
    await renderer.render(conversation("a"), {})
    (process,) = psutil.Process().children()
    environ = process.environ()
    assert "HF_TOKEN" not in environ and kept.items() <= environ.items()


LONG = "the wolf " * 3000


class Lengths:
    """The lengths of the texts that the tokenizer itself is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._raw = tokenizer.raw
        self.seen: list[int] = []

    def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
        self.seen += map(len, texts)
        return self._raw.encode_batch_fast(texts, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


@pytest.fixture
def lengths(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Lengths:
    noted = Lengths(tokenizer)
    monkeypatch.setattr(tokenizer, "raw", noted)
    return noted


def reader(tokenizer: Tokenizer, **options: Any) -> PromptReader:
    return PromptReader(played_model(tokenizer, **options), Statistics())


async def test_of_a_truncated_prompt_only_the_end_is_tokenised(tokenizer: Tokenizer, lengths: Lengths) -> None:
    text = LONG * 100
    _, ids = await reader(tokenizer, max_input_len=10).read(text, 5, special=True)
    assert ids[-5:] == tokenizer.encode(text[-200:])[-5:]
    assert sum(lengths.seen) < len(text) / 10


async def test_a_text_for_a_vector_is_cut_where_that_is_asked_for_and_else_refused(tokenizer: Tokenizer) -> None:
    prompts = reader(tokenizer, max_input_len=10)

    async def lengths_of(truncate: int | None, text: str) -> list[int]:
        request = GenerationRequest(prompt=text, pooling=Pooling(), truncate=truncate, sampling=Sampling(1))
        found = await prompts.read_pooled([request], lambda request, ids: ids)
        return [len(prompt.ids) for _, prompt in found]

    assert await lengths_of(5, "the wolf " * 30) == [5]
    assert await lengths_of(None, "the wolf") == [len(tokenizer.encode("the wolf"))]
    with pytest.raises(PromptTooLongError):
        await lengths_of(None, "a b " * 20)


async def test_a_text_without_a_bound_in_characters_is_tokenised_in_part_first(
    tokenizer: Tokenizer, lengths: Lengths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "longest_token", None)
    with pytest.raises(PromptTooLongError, match=r"more than .* tokens, and max_input_len is 100"):
        await reader(tokenizer, max_input_len=100).read(LONG * 100, None, special=True)
    assert sum(lengths.seen) < len(LONG * 100) / 10


async def test_a_prompt_waits_for_a_worker_no_longer_than_a_request_may_take(tokenizer: Tokenizer) -> None:
    async def never(work: object) -> None:
        await asyncio.sleep(3000)

    late = pytest.raises(RequestTimeoutError, match="predict_timeout=60 seconds")
    with mock.patch.object(WORKERS, "run", never), late:
        await reader(tokenizer, max_input_len=10_000, predict_timeout=60).read(LONG, None, special=True)


async def test_the_renderer_is_made_once_and_closed(tokenizer: Tokenizer) -> None:
    with Hosts().installed():
        prompts = reader(tokenizer)
        messages = [{"role": "user", "content": "a wolf"}]
        texts = {await prompts.render(messages, {}) for _ in range(2)}
        assert texts == {tokenizer.render_chat(messages)}
        await prompts.close()
        await prompts.close()


async def test_only_long_texts_are_worth_a_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def noting(work: Any) -> Any:
        asked.append(work)
        return work()

    monkeypatch.setattr(WORKERS, "run", noting)
    prompts = reader(tokenizer, max_input_len=10_000)
    for characters, threads in ((2048, 0), (2049, 1)):
        await prompts.read("a" * characters, None, special=True)
        assert len(asked) == threads
        assert await prompts.work_of(characters, lambda: 7) == 7
        assert len(asked) == 2 * threads


@in_real_time
async def test_short_texts_of_a_crowd_are_tokenised_together_beside_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[bool, int]] = []
    here = threading.get_ident()

    class Noting(Lengths):
        def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
            calls.append((threading.get_ident() == here, len(texts)))
            return super().encode_batch_fast(texts, **more)

    texts = [f"the wolf {number}" for number in range(12)]
    expected = [tokenizer.encode(text, number % 3 > 0) for number, text in enumerate(texts)]
    monkeypatch.setattr(tokenizer, "raw", Noting(tokenizer))
    prompts = reader(tokenizer)
    reading = [
        asyncio.ensure_future(prompts.read(text, None, special=number % 3 > 0)) for number, text in enumerate(texts)
    ]
    with mock.patch.object(WORKERS, "submit", side_effect=AssertionError):  # long texts may keep these threads
        assert [ids for _, ids in await asyncio.gather(*reading)] == expected
    assert calls[:4] == [(True, 1)] * 4 and sorted(calls[4:]) == [(False, 2), (False, 6)]
    del calls[:]
    assert (await prompts.read(texts[0], None, special=False))[1] == expected[0]
    assert calls == [(True, 1)], "in another turn the first text is alone again"


@in_real_time
async def test_a_text_that_cannot_be_tokenised_or_whose_client_leaves_costs_no_other_of_the_crowd(
    tokenizer: Tokenizer,
) -> None:
    prompts = reader(tokenizer)
    texts = [*("wolf",) * 4, "a", "\ud800", "b", "c"]
    reading = [asyncio.ensure_future(prompts.read(text, None, special=True)) for text in texts]
    await asyncio.sleep(0)
    reading[6].cancel()
    found = await asyncio.gather(*reading, return_exceptions=True)
    assert [isinstance(each, InvalidRequestError) for each in found] == [at == 5 for at in range(8)]
    assert isinstance(found[6], asyncio.CancelledError)
    assert [found[at] for at in (4, 7)] == [(text, tokenizer.encode(text)) for text in "ac"]


async def test_a_crowd_without_a_thread_is_told_so(tokenizer: Tokenizer) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    prompts = reader(tokenizer)
    with mock.patch.object(WorkerThreads, "submit", fail):
        reading = [prompts.read("wolf", None, special=True) for _ in range(6)]
        found = await asyncio.gather(*reading, return_exceptions=True)
    assert [isinstance(each, RuntimeError) for each in found] == [False] * 4 + [True] * 2


@in_real_time
async def test_a_crowd_whose_thread_fails_is_told_so(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "encode_all", mock.Mock(side_effect=MemoryError))
    prompts = reader(tokenizer)
    reading = [prompts.read("wolf", None, special=True) for _ in range(6)]
    found = await asyncio.gather(*reading, return_exceptions=True)
    assert [isinstance(each, MemoryError) for each in found] == [False] * 4 + [True] * 2


@in_real_time
async def test_the_short_texts_of_a_call_are_tokenised_many_at_a_time(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, a thousand texts beside a busy event loop took seconds."""
    lengths: list[int] = []

    class Counting(Lengths):
        def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
            lengths.append(len(texts))
            return super().encode_batch_fast(texts, **more)

    texts = [*(f"the wolf {number}" for number in range(98)), "wolf " * 500, "\ud800"]
    expected = [tokenizer.encode(text) for text in texts[:-1]]
    monkeypatch.setattr(tokenizer, "raw", Counting(tokenizer))
    prompts = reader(tokenizer, max_input_len=4096)
    requests = [GenerationRequest(prompt=text) for text in texts]
    known = await prompts.with_ids([*requests, GenerationRequest(prompt_ids=[5]), GenerationRequest(messages=[])])
    assert [each.prompt_ids for each in known] == [*expected[:-1], None, None, [5], None]
    assert [each.prompt for each in known[:100]] == texts and lengths[:2] == [64, 35]
    assert await prompts.with_ids(requests[:4]) == requests[:4], "few are read as they come"
    assert await reader(tokenizer, max_input_len=2).with_ids(requests) == requests, "these may be refused unread"


async def test_before_a_truncated_prompt_some_text_is_kept(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for longest, kept in ((tokenizer.longest_token, (tokenizer.longest_token or 0) * 5), (None, 1024 * 5)):
        monkeypatch.setattr(tokenizer, "longest_token", longest)
        for length, left in ((2 * (kept + 65_536), 2 * (kept + 65_536)), (2 * (kept + 65_536) + 1, kept + 65_536)):
            text, _ = await reader(tokenizer).read("a" * length, 5, special=True)
            assert len(text) == left


# -- A bounded number of threads works beside the event loop.


@in_real_time
async def test_no_more_threads_work_than_there_may_be_and_the_rest_waits() -> None:
    threads, free = WorkerThreads(2), threading.Event()
    begun: list[str] = []

    def work() -> None:
        begun.append(threading.current_thread().name)
        assert threading.current_thread().daemon
        assert free.wait(60)

    tasks = [asyncio.ensure_future(threads.run(work)) for _ in range(5)]
    await until(lambda: len(begun) == 2)
    assert threads.waiting == 3
    tasks[4].cancel()
    await asyncio.sleep(0)
    free.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert threads.submit(lambda: threads.waiting).result(60) == 0
    assert (len(begun), set(begun)) == (4, {"work-1", "work-2"})


@in_real_time
async def test_work_is_done_where_a_thread_could_not_be_started_before_or_others_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # Python's, as where memory is short

    threads, free = WorkerThreads(2), threading.Event()
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start"):
                await threads.run(lambda: 1)
    assert await asyncio.wait_for(threads.run(lambda: 2), PATIENCE) == 2
    first = asyncio.ensure_future(threads.run(free.wait))
    await asyncio.sleep(0)
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", fail)
        second = asyncio.ensure_future(threads.run(lambda: 3))
        await asyncio.sleep(0)
    free.set()
    assert (await first, await second) == (True, 3)
    assert threads.waiting == 0


class Panic(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("no"), Panic("no")])
@in_real_time
async def test_who_waits_gets_the_result_or_the_error_of_whatever_kind(error: BaseException) -> None:
    threads = WorkerThreads(1)

    def fail() -> None:
        raise error

    with pytest.raises(type(error), match="no"):
        await threads.run(fail)
    assert await threads.run(lambda: 3) == 3


def test_work_whose_caller_has_left_or_whose_loop_is_closed_is_no_error() -> None:
    # pytest turns an exception of a thread into an error.
    threads, begun, free = WorkerThreads(1), threading.Event(), threading.Event()
    wrong: list[object] = []

    def work() -> None:
        begun.set()
        assert free.wait(60)

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        task = asyncio.ensure_future(threads.run(work))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    free.set()
    assert threads.submit(lambda: 7).result(60) == 7, "the thread lives"
    assert wrong == []
