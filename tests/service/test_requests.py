"""The way of a request into the rolling batch, and calls in a process apart."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import threading
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest import mock

import psutil
import pytest
from msgspec.structs import replace

from djl_trtllm.api.base import Call, Prompt
from djl_trtllm.batching.rolling_batch import RollingBatch
from djl_trtllm.config import Task
from djl_trtllm.errors import (
    BuildError,
    ConfigError,
    DjlTrtllmError,
    ExecutorStartError,
    GenerationError,
    InvalidRequestError,
    ModelError,
    NotReadyError,
    OverloadedError,
    PromptTooLongError,
    RequestTimeoutError,
    UnknownAdapterError,
    UnsupportedParameterError,
)
from djl_trtllm.executor.protocol import Feature
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, GenerationRequest, Pooling, Sampling, Token
from djl_trtllm.service.lifecycle import ModelService, State
from djl_trtllm.service.model import Model, Texts, open_source, prepare, prepare_apart
from djl_trtllm.service.prompts import PromptReader
from djl_trtllm.service.work import BoundedCalls, Calls
from tests.service.conftest import TOKENIZER, Stage
from tests.support.in_process import PROMPT, Asked, ask, state_of
from tests.support.models import TINY_STORIES, WordEncoder
from tests.support.steps import Delta
from tests.support.virtual_time import until

INLINE = 2048
"""Characters of the longest text that is tokenised on the event loop."""


class NotedTokenizer:
    """A tokenizer that notes the threads in which it encodes, and waits in a thread of its own until it is `free`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.threads: list[threading.Thread] = []
        self.free = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        self.threads.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            assert self.free.wait(60)
        return self._tokenizer.encode(text, add_special_tokens, most)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def of(self, model: Model) -> Model:
        """The model with this tokenizer."""
        return dataclasses.replace(model, texts=lambda: Texts(cast(Tokenizer, self)))


class PromptsEncoder(WordEncoder):
    """An encoder that keeps the prompts."""

    def __init__(self, wants_prompt_tokens: bool = False) -> None:
        super().__init__()
        self.wants_prompt_tokens = wants_prompt_tokens
        self.prompts: list[Prompt] = []

    def begin(self, prompt: Prompt) -> None:
        self.prompts.append(prompt)


async def prompted(stage: Stage, service: ModelService, encoder: PromptsEncoder, **request: Any) -> list[int]:
    """Send a request; what the engine is given as its prompt."""
    await service.generate(Call((GenerationRequest(**request),), encoder), Asked())
    return list(stage.last.submitted[-1].prompt_ids)


async def test_a_model_that_loads_refuses_with_the_time_to_come_again(stage: Stage) -> None:
    service = stage.service()
    with pytest.raises(NotReadyError, match="model story is still loading") as refused:
        await service.generate(Call((GenerationRequest(prompt="a wolf"),), PromptsEncoder()), Asked())
    assert refused.value.retry_after == 10
    for part in ("model", "adapters"):
        with pytest.raises(NotReadyError, match="still loading"):
            getattr(service, part)


# -- tokenising --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wants_tokens", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_an_encoder_has_the_prompt_as_the_engine_gets_it(stage: Stage, chat: bool, wants_tokens: bool) -> None:
    """A text has the model's special tokens, a chat has those of its template and no more."""
    service, encoder = await stage.load(), PromptsEncoder(wants_tokens)
    messages = [{"role": "user", "content": "a wolf"}]
    text = TOKENIZER.render_chat(messages) if chat else "a wolf"
    ids = TOKENIZER.encode(text, not chat)
    assert await prompted(stage, service, encoder, **({"messages": messages} if chat else {"prompt": text})) == ids
    special = TOKENIZER.special_ids
    tokens = [Token(id_, TOKENIZER.decode([id_], False), None, id_ in special) for id_ in ids]
    assert encoder.prompts == [Prompt(text, len(ids), tokens if wants_tokens else ())]
    assert await prompted(stage, service, encoder, prompt_ids=ids) == ids
    assert encoder.prompts[1] == Prompt(TOKENIZER.decode(ids), len(ids), tokens if wants_tokens else ())


class Tokenised:
    """A service, and a long prompt of which it is in the middle."""

    def __init__(self, service: ModelService, noted: NotedTokenizer) -> None:
        assert service.batch is not None
        self.service, self.batch, self._noted = service, service.batch, noted
        self.request = asyncio.ensure_future(ask(service, prompt="a wolf " * INLINE))

    @classmethod
    async def begin(cls, stage: Stage) -> Tokenised:
        service, noted = stage.service(), NotedTokenizer(TOKENIZER)
        await service.load(noted.of(stage.model(max_input_len=8000)))
        tokenised = cls(service, noted)
        await until(lambda: bool(noted.threads))
        return tokenised

    def end(self) -> None:
        self._noted.free.set()


async def test_a_client_that_leaves_while_its_prompt_is_tokenised_gives_its_place_back(stage: Stage) -> None:
    tokenised = await Tokenised.begin(stage)
    assert tokenised.service.load_now == 1
    tokenised.request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tokenised.request
    assert tokenised.batch.idle
    tokenised.end()


async def test_a_prompt_that_was_being_tokenised_is_answered_while_draining(stage: Stage) -> None:
    tokenised = await Tokenised.begin(stage)
    tokenised.service.refuse_new()
    tokenised.end()
    asked = await tokenised.request
    stage.last.step(4)
    assert asked.reason is FinishReason.LENGTH


async def test_a_prompt_that_is_tokenised_while_its_engine_process_dies_goes_to_the_next_one(stage: Stage) -> None:
    tokenised = await Tokenised.begin(stage)
    stage.last.die()
    await until(lambda: len(stage.made) == 2 and state_of(tokenised.service) is State.READY)
    tokenised.end()
    await tokenised.request
    assert len(stage.last.submitted) == 1


async def test_a_model_that_fails_while_a_prompt_is_tokenised_refuses_it(stage: Stage) -> None:
    tokenised = await Tokenised.begin(stage)
    tokenised.service.fail(ExecutorStartError("another worker did not start"))
    tokenised.end()
    with pytest.raises(NotReadyError, match="has failed"):
        await tokenised.request
    assert tokenised.batch.idle


async def test_stop_strings_are_learned_before_the_request_that_has_them_is_queued(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenising thousands of characters of them takes a thread, and not the event loop."""
    service, learned = await stage.load(), list[tuple[list[str], int]]()
    monkeypatch.setattr(
        RollingBatch, "learn_stops", lambda _, request: learned.append(([*request.stop], len(stage.last.submitted)))
    )
    for stop in ("one", "two"):
        request = GenerationRequest(prompt="a wolf", stop=(stop,))
        await service.generate(Call((request,), PromptsEncoder()), Asked())
    assert learned == [(["one"], 0), (["two"], 1)]


# -- admission ---------------------------------------------------------------------------------------------------------


async def test_a_full_queue_refuses_before_it_tokenises(stage: Stage) -> None:
    service, noted = stage.service(), NotedTokenizer(TOKENIZER)
    await service.load(noted.of(stage.model(max_rolling_batch_size=1, job_queue_size=1)))
    asked = [await ask(service) for _ in range(2)]
    assert service.load_now == 2
    tokenised = len(noted.threads)
    with pytest.raises(OverloadedError, match="1 waiting, job_queue_size is 1"):
        await ask(service)
    assert len(noted.threads) == tokenised
    for one in asked:
        service.cancel(one.generations)
        assert one.reason is FinishReason.CANCELLED


async def test_a_refused_request_gives_its_place_back(stage: Stage) -> None:
    service = await stage.load(max_input_len=5)
    for prompt, error in ((PROMPT, PromptTooLongError), ("\ud800", InvalidRequestError)):
        with pytest.raises(error):
            await service.generate(Call((GenerationRequest(prompt=prompt),), PromptsEncoder()), Asked())
        assert service.load_now == 0


async def test_a_text_that_no_tokens_make_short_enough_is_not_tokenised(stage: Stage) -> None:
    service = await stage.load(max_input_len=400)
    most = 400 * (TOKENIZER.longest_token or 0)
    for extra, told in ((1, rf"has {most + 1} char.* at least 401 tokens"), (0, r"has \d+ tokens")):
        with pytest.raises(PromptTooLongError, match=rf"{told}.* max_input_len is 400"):
            await prompted(stage, service, PromptsEncoder(), prompt="a" * (most + extra))
    assert len(await prompted(stage, service, PromptsEncoder(), prompt="a" * (most + 1), truncate=5)) == 5


async def test_a_request_runs_with_the_adapter_that_it_names(
    stage: Stage, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("model")
    (directory / "adapters" / "dutch").mkdir(parents=True)
    (directory / "adapters" / "dutch" / "adapter_config.json").write_text("{}")
    serves = [stage.service().serves_adapters, (await stage.load()).serves_adapters]
    stage.features |= {Feature.ADAPTERS}
    service = await stage.load(stage.model(directory))
    assert [*serves, service.serves_adapters] == [False, False, True]
    for name, expected in (("dutch", "dutch"), (None, None)):
        await service.generate(Call((GenerationRequest(prompt="a wolf", adapter=name),), PromptsEncoder()), Asked())
        adapter = stage.last.submitted[-1].adapter
        assert (adapter and adapter.name) == expected
    with pytest.raises(UnknownAdapterError):
        await service.generate(Call((GenerationRequest(prompt="a wolf", adapter="french"),), PromptsEncoder()), Asked())
    assert service.load_now == 2


# -- the end of a request ----------------------------------------------------------------------------------------------


async def test_a_request_whose_client_is_gone_is_cancelled_once(stage: Stage) -> None:
    service = await stage.load()
    running, finished = await ask(service), await ask(service, tokens=1)
    stage.last.step()
    for asked in (running, running, finished):
        service.cancel(asked.generations)
    assert (running.reason, finished.reason) == (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert stage.last.cancelled == [stage.last.submitted[0].request_id]


async def test_requests_past_predict_timeout_are_looked_for_four_times_a_second(stage: Stage) -> None:
    service = await stage.load(predict_timeout=1e-9)
    for tick in (0.25, 0.5):
        asked = await ask(service)
        await asyncio.sleep(0.24)
        assert asked.finished is None
        await asyncio.sleep(tick + 0.001 - asyncio.get_running_loop().time())
        assert isinstance(asked.error, RequestTimeoutError)
        stage.last.step()


async def test_an_engine_process_is_busy_while_something_runs(stage: Stage) -> None:
    service = await stage.load()
    host = stage.last
    assert not host.busy()
    await ask(service, tokens=1)
    assert host.busy()
    host.step()
    assert not host.busy()
    host.die()
    assert not host.busy()


# -- several requests in one call --------------------------------------------------------------------------------------


def several(*prompts: str, encoder: PromptsEncoder, **fields: Any) -> Call:
    return Call(tuple(GenerationRequest(prompt=prompt, **fields) for prompt in prompts), encoder)


async def test_the_requests_of_a_call_run_together_and_their_chunks_say_whose_they_are(stage: Stage) -> None:
    service, asked, encoder = await stage.load(), Asked(), PromptsEncoder()
    states = await service.generate(several("a wolf", "a fox", encoder=encoder), asked)
    assert [prompt.text for prompt in encoder.prompts] == ["a wolf", "a fox"]
    assert [submitted.prompt_ids for submitted in stage.last.submitted] == [*map(TOKENIZER.encode, ("a wolf", "a fox"))]
    stage.last.step()
    assert [(chunk.generation, chunk.index) for chunk in asked.updates] == [(0, 0), (1, 0)]
    texts = [chunk.tokens[0].id for chunk in asked.updates]
    assert texts == [TOKENIZER.encode(prompt)[0] for prompt in ("a wolf", "a fox")]
    service.cancel(states)
    assert [chunk.finished is not None for chunk in asked.updates] == [False, False, True, True]
    assert len(stage.last.cancelled) == 2


async def test_the_short_texts_of_a_call_are_not_read_one_by_one(stage: Stage) -> None:
    service = await stage.load()
    with mock.patch.object(PromptReader, "read", side_effect=AssertionError):
        await service.generate(several(*"abcdef", encoder=PromptsEncoder()), Asked())
    assert [submitted.prompt_ids for submitted in stage.last.submitted] == [*map(TOKENIZER.encode, "abcdef")]


async def test_a_call_is_admitted_as_a_whole(stage: Stage) -> None:
    service = await stage.load(max_rolling_batch_size=1, job_queue_size=3)
    await ask(service)
    sampling = Sampling(n=2, do_sample=True)
    with pytest.raises(OverloadedError):
        await service.generate(several("a wolf", "a fox", encoder=PromptsEncoder(), sampling=sampling), Asked())
    assert service.load_now == 1
    await service.generate(several("a wolf", "a fox", encoder=PromptsEncoder()), Asked())
    assert service.load_now == 3


async def test_a_cancelled_call_starts_none_of_its_requests(stage: Stage) -> None:
    service = await stage.load(max_rolling_batch_size=1, job_queue_size=3)
    first = await ask(service)
    states = await service.generate(several("a wolf", "a fox", "a hen", encoder=PromptsEncoder()), Asked())
    service.cancel(first.generations)
    service.cancel(states)
    stage.last.step()
    assert (len(stage.last.submitted), service.load_now) == (1, 0)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"prompt": PROMPT}, PromptTooLongError),
        ({"sampling": Sampling(do_sample=True, min_p=0.5)}, UnsupportedParameterError),
    ],
)
async def test_a_call_with_a_request_that_cannot_run_runs_none(
    stage: Stage, place: int, wrong: dict[str, Any], error: type[Exception]
) -> None:
    service, asked = await stage.load(max_input_len=5), Asked()
    fields: dict[str, Any] = {"prompt": "a", "sampling": Sampling(n=2, do_sample=True)}
    requests = [GenerationRequest(**fields | (wrong if number == place else {})) for number in range(3)]
    with pytest.raises(error):
        await service.generate(Call(tuple(requests), PromptsEncoder()), asked)
    stage.last.step()
    assert (service.load_now, asked.updates, stage.last.submitted) == (0, [], [])


def of_texts(count: int) -> Call:
    requests = [GenerationRequest(prompt_ids=[3, 4], pooling=Pooling()) for _ in range(count)]
    return Call(tuple(requests), WordEncoder())


async def embedding(stage: Stage) -> ModelService:
    return await stage.load(task=Task.EMBED, max_rolling_batch_size=300, job_queue_size=300)


async def test_others_have_the_event_loop_while_many_texts_are_queued(stage: Stage) -> None:
    service, asked, queued = await embedding(stage), Asked(), [0]
    calling = asyncio.ensure_future(service.generate(of_texts(200), asked))
    while not calling.done():
        await asyncio.sleep(0)
        queued.append(len(stage.last.submitted))
    assert queued[-1] == 200
    assert max(later - earlier for earlier, later in pairwise(queued)) <= 64
    while service.load_now:
        stage.last.step()
    assert sorted(update.generation for update in asked.updates) == list(range(200))


async def test_texts_of_a_call_that_ends_start_in_no_place_of_another(stage: Stage) -> None:
    service = await stage.load(task=Task.EMBED, max_rolling_batch_size=2, job_queue_size=10)
    service.cancel(await service.generate(of_texts(6), Asked()))
    while service.load_now:
        stage.last.step()
    assert len(stage.last.submitted) == 2
    assert service.batch is not None and service.batch.idle


@pytest.mark.parametrize(("dimensions", "asked", "fits"), [(2048, None, True), (2049, None, False), (4096, 2048, True)])
async def test_more_numbers_than_a_response_may_have_are_refused_before_anything_is_computed(
    stage: Stage, dimensions: int, asked: int | None, fits: bool
) -> None:
    service = await stage.load(task=Task.EMBED, job_queue_size=2048)
    stage.last.limits = replace(stage.last.limits, dimensions=dimensions)
    requests = [GenerationRequest(prompt_ids=[3], pooling=Pooling("embed", None, asked)) for _ in range(2048)]
    if fits:
        service.cancel(await service.generate(Call(tuple(requests), WordEncoder()), Asked()))
        return
    with pytest.raises(InvalidRequestError, match="send fewer texts"):
        await service.generate(Call(tuple(requests), WordEncoder()), Asked())
    assert stage.last.submitted == [] and service.load_now == 0


@pytest.mark.parametrize(("texts", "tokens", "beside"), [(1, 1, False), (8, 8, False), (40, 1, True), (1, 2100, True)])
async def test_the_ids_of_many_texts_are_packed_beside_the_event_loop(
    stage: Stage, texts: int, tokens: int, beside: bool
) -> None:
    service, threads = await embedding(stage), set[threading.Thread]()

    def fit(request: GenerationRequest, ids: Sequence[int]) -> Sequence[int]:
        threads.add(threading.current_thread())
        return ids

    requests = [GenerationRequest(prompt_ids=[3] * tokens, pooling=Pooling()) for _ in range(texts)]
    found = await service.prompts.read_pooled(requests, fit)
    assert [prompt.ids for _, prompt in found] == [array("i", [3] * tokens)] * texts
    assert (threads != {threading.main_thread()}) == beside


async def test_many_texts_whose_client_is_gone_are_cancelled_in_several_turns_of_the_event_loop(
    stage: Stage,
) -> None:
    service = await embedding(stage)
    states = await service.generate(of_texts(250), Asked())
    submitted = len(stage.last.submitted)
    left = [len(states)]
    service.cancel(states)
    while left[-1]:
        left.append(sum(not state.done for state in states))
        await asyncio.sleep(0)
    assert max(before - after for before, after in pairwise(left)) <= 64
    assert len(stage.last.submitted) == submitted, "none started in the place of another one"
    while service.load_now:
        stage.last.step()
    assert service.batch is not None and service.batch.idle


@pytest.mark.parametrize("cause", ["cancelled", "failed", "one failed"])
async def test_a_call_that_ends_while_its_texts_are_queued_leaves_none_and_has_one_error(
    stage: Stage, cause: str
) -> None:
    service, asked = await embedding(stage), Asked()
    calling = asyncio.ensure_future(service.generate(of_texts(200), asked))
    while not stage.last.submitted:  # noqa: ASYNC110  in the next turn of the loop there are more
        await asyncio.sleep(0)
    assert len(stage.last.submitted) < 200
    if cause == "cancelled":
        calling.cancel()
    elif cause == "failed":
        service.fail(ExecutorStartError("another worker did not start"))
    else:
        stage.last.send(Delta(stage.last.submitted[0].request_id, [], finish=FinishReason.ERROR, error="not finite"))
    errors = {"cancelled": asyncio.CancelledError, "failed": NotReadyError, "one failed": GenerationError}
    with pytest.raises(errors[cause]):
        await calling
    while service.load_now:
        stage.last.step()
    assert (asked.updates, len(stage.last.submitted) < 200) == ([], True)
    assert service.batch is not None and service.batch.idle


# -- beams and seeds of the engine -------------------------------------------------------------------------------------

OWN = ("X-Own", "1")


async def limited(stage: Stage, **limits: object) -> ModelService:
    """A service whose engine has these limits."""
    service = await stage.load()
    stage.last.limits = replace(stage.last.limits, **limits)
    stage.last.features |= {"beam_width"}
    return service


def call(**sampling: object) -> Call:
    request = GenerationRequest(prompt="a wolf", sampling=Sampling(**sampling))  # type: ignore[arg-type]
    return Call((request,), WordEncoder(), (OWN,))


async def test_a_plain_request_has_the_beams_of_its_engine(stage: Stage) -> None:
    service = await limited(stage, beams=3)
    await service.generate(call(), Asked())
    assert [message.sampling.beam_width for message in stage.last.submitted] == [3]
    assert service.load_now == 3
    with pytest.raises(UnsupportedParameterError, match="runs every request with 3 beams"):
        await service.generate(call(beam_width=2), Asked())


async def test_a_seed_that_the_engine_ignores_is_warned_of_in_the_response(stage: Stage) -> None:
    service = await limited(stage, seeded=False)
    own, (name, warning) = service.with_warnings(call(do_sample=True, seed=3)).headers
    assert (own, name) == (OWN, "Warning")
    assert warning == '299 djl-trtllm "the engine ignores the seed of this request (option.ignored_seed=warn)"'
    for others in (call(do_sample=True), call(seed=3), call()):
        assert service.with_warnings(others) is others
    stage.last.limits = replace(stage.last.limits, seeded=True)
    assert service.with_warnings(call(do_sample=True, seed=3)).headers == (OWN,)
    stage.last.limits = replace(stage.last.limits, seeded=False)
    await service.close()
    assert service.with_warnings(call(do_sample=True, seed=3)).headers == (OWN,)
    stage.load_seconds = 5
    loading = asyncio.ensure_future((other := stage.service()).load(stage.model()))
    await asyncio.sleep(1)
    assert other.with_warnings(call(do_sample=True, seed=3)).headers == (OWN,)
    await loading


ERRORS = (
    ConfigError(["a is wrong", "b is wrong"], ["c is odd"]),
    BuildError("it failed", Path("build.log"), ["the last line"], "no memory", "add some"),
    ModelError("no such model"),
)


def warn(text: str) -> int:
    logging.getLogger("djl_trtllm.test").info("not so important")
    logging.getLogger("djl_trtllm.test").warning("%s of process %d", text, os.getpid())
    return os.getpid()


def fail(number: int) -> None:
    raise ERRORS[number]


def divide() -> float:
    return 1 / 0


def work_for_ever() -> None:
    while True:
        pass


def take_memory() -> bytearray:
    return bytearray(1 << 30)


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_call_returns_its_result_and_its_log_from_another_process(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "djl_trtllm")
    with BoundedCalls("reading a model") as calls:
        first, second = calls(warn, "one"), calls.later(warn, "two")()
    assert first == second != os.getpid()
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"one of process {first}", f"two of process {first}"]


def test_an_expected_error_arrives_as_it_was_raised() -> None:
    with BoundedCalls("reading a model") as calls:
        for number, error in enumerate(ERRORS):
            with pytest.raises(DjlTrtllmError) as raised:
                calls(fail, number)
            assert (type(raised.value), str(raised.value)) == (type(error), str(error))
            assert vars(raised.value) == vars(error)


@pytest.mark.parametrize(
    ("work", "said"),
    [(divide, "ZeroDivisionError"), (work_for_ever, "1 seconds"), (take_memory, "300,000,000"), (end, "status -9")],
)
def test_what_a_call_may_not_take_is_an_error_that_names_its_work(work: Callable[[], Any], said: str) -> None:
    bounded = BoundedCalls("counting wolves", seconds=1, memory=300_000_000)
    with bounded as calls, pytest.raises(ModelError, match=said) as raised:
        calls(work)
    assert str(raised.value).startswith("counting wolves ")
    assert len(str(raised.value).splitlines()) == 1


def test_the_process_ends_with_the_block_and_may_take_two_gibibytes() -> None:
    with pytest.raises(ModelError, match="2,147,483,648 bytes"), BoundedCalls("counting wolves") as calls:
        calls(end)
    with BoundedCalls("counting wolves") as calls:
        pid = calls(os.getpid)
    assert not psutil.pid_exists(pid), "it has been waited for"


def test_the_process_imports_nothing_from_where_the_server_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("djl_trtllm", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    with BoundedCalls("reading a model") as calls:
        assert calls(os.getcwd) == str(tmp_path)


def test_a_model_is_prepared_apart_as_it_is_here(tmp_path: Path) -> None:
    environ = {"OPTION_BACKEND": "scripted", "OPTION_MODEL_ID": str(TINY_STORIES)}

    readers: list[int] = []

    def opened(**keywords: Any) -> Any:
        readers.extend(calls(os.getpid) for calls in keywords.values())
        return open_source(tmp_path, environ, **keywords)

    apart, here = prepare_apart(str(tmp_path), opened), prepare(opened())
    assert len(readers) == 1 and os.getpid() not in readers
    assert (apart.config, apart.start, apart.limits) == (here.config, here.start, here.limits)
    text = "Once upon a time, ünï 🐺"
    ids = here.tokenizer.encode(text)
    assert apart.tokenizer.encode(text) == ids and apart.tokenizer.decode(ids) == here.tokenizer.decode(ids)
    assert [apart.tokenizer.texts[id_] for id_ in ids] == [here.tokenizer.texts[id_] for id_ in ids]
    assert apart.tokenizer.end_ids == here.tokenizer.end_ids and apart.vocab_size == here.vocab_size
    chat = [{"role": "user", "content": "hello"}]
    assert here.tokenizer.chat_source() and apart.tokenizer.render_chat(chat) == here.tokenizer.render_chat(chat)


class OneByOne(Calls):
    """Calls here, and whether one is under way."""

    def __init__(self) -> None:
        self.under_way = False

    def later(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        self.under_way = True
        try:
            result = work(*args, **kwargs)
        finally:
            self.under_way = False
        return lambda: result


def test_all_that_is_parsed_of_an_engine_is_read_by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, read, elsewhere = OneByOne(), set[str](), set[str]()

    def opened(path: Any, *others: Any, **keywords: Any) -> int:
        (read if calls.under_way else elsewhere).add(Path(path).name)
        return os_open(path, *others, **keywords)

    os_open = os.open
    monkeypatch.setattr(os, "open", opened)
    prepare(open_source(TINY_STORIES / "engine", {}, calls=calls), calls=calls)
    assert {"config.json", "manifest.json", "serving.properties"} <= read and elsewhere == set()
