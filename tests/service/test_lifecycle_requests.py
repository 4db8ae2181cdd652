"""The way of a request into the rolling batch."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any, cast

import pytest

from djl_trtllm.api import Call, Prompt
from djl_trtllm.errors import (
    ExecutorStartError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PromptTooLongError,
    RequestTimeoutError,
    UnknownAdapterError,
    UnsupportedParameterError,
)
from djl_trtllm.executor.protocol import Feature
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, GenerationRequest, OutputChunk
from djl_trtllm.service import Model, ModelService, State, Texts
from djl_trtllm.service.adapters import Adapters
from tests.support.in_process import PROMPT, Asked, Hosts, ask, loaded, played_model, state_of
from tests.support.virtual_time import in_virtual_time, until

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


class NotingEncoder:
    """An encoder that keeps the prompt."""

    stream = False
    content_type = "text/plain"

    def __init__(self, wants_prompt_tokens: bool = False) -> None:
        self.wants_prompt_tokens = wants_prompt_tokens
        self.prompt: Prompt | None = None

    def begin(self, prompt: Prompt) -> None:
        self.prompt = prompt

    def encode(self, update: OutputChunk) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        return b""


async def prompted(hosts: Hosts, service: ModelService, encoder: NotingEncoder, **request: Any) -> list[int]:
    """Send a request; what the engine is given as its prompt."""
    await service.generate(Call((GenerationRequest(**request),), encoder), Asked())
    return list(hosts.last.submitted[-1].prompt_ids)


@in_virtual_time
async def test_tokens_reach_the_client_as_they_come(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer)
    asked = await ask(service, tokens=3)
    ids = tokenizer.encode(PROMPT)
    for tokens in (1, 2, 3):
        hosts.last.step()
        assert asked.text == tokenizer.decode(ids[:tokens])
    assert asked.reason is FinishReason.LENGTH
    await service.close()


@in_virtual_time
async def test_a_model_that_loads_refuses_with_the_time_to_come_again(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    with pytest.raises(NotReadyError, match="model story is still loading") as refused:
        await service.generate(Call((GenerationRequest(prompt="a wolf"),), NotingEncoder()), Asked())
    assert refused.value.retry_after == 10
    for part in ("model", "adapters"):
        with pytest.raises(NotReadyError, match="still loading"):
            getattr(service, part)


# -- tokenising --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_text_gets_the_models_special_tokens(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service, encoder = await loaded(tokenizer), NotingEncoder()
    assert await prompted(hosts, service, encoder, prompt="a wolf") == tokenizer.encode("a wolf", True)
    assert encoder.prompt == Prompt("a wolf", len(tokenizer.encode("a wolf", True)))
    await service.close()


@in_virtual_time
async def test_a_chat_has_those_of_its_template_and_no_more(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service, encoder = await loaded(tokenizer), NotingEncoder()
    messages = [{"role": "user", "content": "a wolf"}]
    text = tokenizer.render_chat(messages)
    ids = tokenizer.encode(text, False)
    assert await prompted(hosts, service, encoder, messages=messages) == ids
    assert encoder.prompt == Prompt(text, len(ids))
    await service.close()


@in_virtual_time
async def test_token_ids_are_taken_as_they_are(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service, encoder = await loaded(tokenizer), NotingEncoder()
    ids = tokenizer.encode("a wolf", False)
    assert await prompted(hosts, service, encoder, prompt_ids=ids) == ids
    assert encoder.prompt == Prompt(tokenizer.decode(ids), len(ids))
    await service.close()


@in_virtual_time
async def test_a_framer_that_wants_the_prompts_tokens_gets_them(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service, encoder = await loaded(tokenizer), NotingEncoder(wants_prompt_tokens=True)
    ids = await prompted(hosts, service, encoder, prompt="a wolf")
    assert encoder.prompt is not None
    tokens = encoder.prompt.tokens
    assert [token.id for token in tokens] == ids
    assert [token.text for token in tokens] == [tokenizer.decode([id_], False) for id_ in ids]
    assert (tokens[0].text, tokens[0].special, tokens[1].special) == ("<s>", True, False)
    assert {token.logprob for token in tokens} == {None}
    await service.close()


@pytest.mark.parametrize(("characters", "inline"), [(INLINE, True), (INLINE + 1, False)])
@in_virtual_time
async def test_long_texts_are_tokenised_beside_the_event_loop(
    hosts: Hosts, tokenizer: Tokenizer, characters: int, inline: bool
) -> None:
    service, noted = ModelService("story"), NotedTokenizer(tokenizer)
    noted.free.set()
    await service.load(noted.of(played_model(tokenizer, max_input_len=4000)))
    text = ("a " * characters)[:characters]
    assert await prompted(hosts, service, NotingEncoder(), prompt=text) == tokenizer.encode(text)
    assert [thread is threading.main_thread() for thread in noted.threads] == [inline]
    await service.close()


class Tokenised:
    """A service, and a long prompt of which it is in the middle."""

    def __init__(self, service: ModelService, noted: NotedTokenizer) -> None:
        assert service.batch is not None
        self.service, self.batch, self._noted = service, service.batch, noted
        self.request = asyncio.ensure_future(ask(service, prompt="a wolf " * INLINE))

    @classmethod
    async def begin(cls, tokenizer: Tokenizer) -> Tokenised:
        service, noted = ModelService("story"), NotedTokenizer(tokenizer)
        await service.load(noted.of(played_model(tokenizer, max_input_len=8000)))
        tokenised = cls(service, noted)
        await until(lambda: bool(noted.threads))
        return tokenised

    def end(self) -> None:
        self._noted.free.set()


@in_virtual_time
async def test_a_client_that_leaves_while_its_prompt_is_tokenised_gives_its_place_back(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    tokenised = await Tokenised.begin(tokenizer)
    assert tokenised.service.load_now == 1
    tokenised.request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tokenised.request
    assert tokenised.batch.idle
    tokenised.end()
    await tokenised.service.close()


@in_virtual_time
async def test_a_prompt_that_was_being_tokenised_is_answered_while_draining(hosts: Hosts, tokenizer: Tokenizer) -> None:
    tokenised = await Tokenised.begin(tokenizer)
    tokenised.service.refuse_new()
    tokenised.end()
    asked = await tokenised.request
    hosts.last.step(4)
    assert asked.reason is FinishReason.LENGTH
    await tokenised.service.close()


@in_virtual_time
async def test_a_prompt_that_is_tokenised_while_its_engine_process_dies_goes_to_the_next_one(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    tokenised = await Tokenised.begin(tokenizer)
    hosts.last.die()
    await until(lambda: len(hosts.made) == 2 and state_of(tokenised.service) is State.READY)
    tokenised.end()
    await tokenised.request
    assert len(hosts.last.submitted) == 1
    await tokenised.service.close()


@in_virtual_time
async def test_a_model_that_fails_while_a_prompt_is_tokenised_refuses_it(hosts: Hosts, tokenizer: Tokenizer) -> None:
    tokenised = await Tokenised.begin(tokenizer)
    tokenised.service.fail(ExecutorStartError("another worker did not start"))
    tokenised.end()
    with pytest.raises(NotReadyError, match="has failed"):
        await tokenised.request
    assert tokenised.batch.idle
    await tokenised.service.close()


# -- admission ---------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_full_queue_refuses_before_it_tokenises(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service, noted = ModelService("story"), NotedTokenizer(tokenizer)
    await service.load(noted.of(played_model(tokenizer, max_rolling_batch_size=1, job_queue_size=1)))
    asked = [await ask(service) for _ in range(2)]
    assert service.load_now == 2
    tokenised = len(noted.threads)
    with pytest.raises(OverloadedError, match="1 waiting, job_queue_size is 1"):
        await ask(service)
    assert len(noted.threads) == tokenised
    for one in asked:
        service.cancel(one.generations)
        assert one.reason is FinishReason.CANCELLED
    await service.close()


@in_virtual_time
async def test_a_refused_request_gives_its_place_back(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer, max_input_len=5)
    for prompt, error in ((PROMPT, PromptTooLongError), ("\ud800", InvalidRequestError)):
        with pytest.raises(error):
            await service.generate(Call((GenerationRequest(prompt=prompt),), NotingEncoder()), Asked())
        assert service.load_now == 0
    await service.close()


@in_virtual_time
async def test_a_text_that_no_tokens_make_short_enough_is_not_tokenised(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer, max_input_len=400)
    most = 400 * (tokenizer.longest_token or 0)
    for extra, told in ((1, rf"has {most + 1} char.* at least 401 tokens"), (0, r"has \d+ tokens")):
        with pytest.raises(PromptTooLongError, match=rf"{told}.* max_input_len is 400"):
            await prompted(hosts, service, NotingEncoder(), prompt="a" * (most + extra))
    assert len(await prompted(hosts, service, NotingEncoder(), prompt="a" * (most + 1), truncate=5)) == 5
    await service.close()


@in_virtual_time
async def test_every_sequence_takes_a_place(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer, max_rolling_batch_size=2)
    await ask(service, n=3, do_sample=True)
    assert service.load_now == 3
    assert service.batch is not None
    assert (service.batch.running, service.batch.waiting) == (2, 1)
    await service.close()


@in_virtual_time
async def test_what_the_engine_cannot_do_is_refused_by_name(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer)
    with pytest.raises(UnsupportedParameterError, match="min_p"):
        await ask(service, do_sample=True, min_p=0.5)
    assert service.load_now == 0
    await service.close()


FREE = {Feature.LOGPROBS, Feature.FREE_LOGPROBS}


@pytest.mark.parametrize(
    ("features", "place", "asks", "given"),
    [
        (FREE, True, False, True),
        (FREE, False, False, False),
        ({Feature.LOGPROBS}, True, False, False),
        ({Feature.LOGPROBS}, True, True, True),
        (set(), True, True, False),
    ],
    ids=["free", "no place for them", "costly", "costly and asked for", "none"],
)
@in_virtual_time
async def test_log_probabilities_are_asked_of_the_engine_where_they_are_to_be_had(
    hosts: Hosts, tokenizer: Tokenizer, features: set[Feature], place: bool, asks: bool, given: bool
) -> None:
    hosts.features = frozenset(features)
    service = await loaded(tokenizer)
    request = GenerationRequest(prompt="a wolf", logprobs=place, asks_logprobs=asks)
    await service.generate(Call((request,), NotingEncoder()), Asked())
    assert hosts.last.submitted[-1].logprobs is given
    await service.close()


@in_virtual_time
async def test_a_request_runs_with_the_adapter_that_it_names(
    hosts: Hosts, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("model")
    (directory / "adapters" / "dutch").mkdir(parents=True)
    (directory / "adapters" / "dutch" / "adapter_config.json").write_text("{}")
    hosts.features |= {Feature.ADAPTERS}
    service = ModelService("story")
    await service.load(played_model(tokenizer, directory))
    assert isinstance(service.adapters, Adapters)
    assert service.adapters is service.adapters
    for name, expected in (("dutch", "dutch"), (None, None)):
        await service.generate(Call((GenerationRequest(prompt="a wolf", adapter=name),), NotingEncoder()), Asked())
        adapter = hosts.last.submitted[-1].adapter
        assert (adapter and adapter.name) == expected
    with pytest.raises(UnknownAdapterError):
        await service.generate(Call((GenerationRequest(prompt="a wolf", adapter="french"),), NotingEncoder()), Asked())
    assert service.load_now == 2
    await service.close()


# -- the end of a request ----------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_request_whose_client_is_gone_is_cancelled_once(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer)
    running, finished = await ask(service), await ask(service, tokens=1)
    hosts.last.step()
    for asked in (running, running, finished):
        service.cancel(asked.generations)
    assert (running.reason, finished.reason) == (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert hosts.last.cancelled == [hosts.last.submitted[0].request_id]
    await service.close()


@in_virtual_time
async def test_requests_past_predict_timeout_are_looked_for_four_times_a_second(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service = await loaded(tokenizer, predict_timeout=1e-9)
    for tick in (0.25, 0.5):
        asked = await ask(service)
        await asyncio.sleep(0.24)
        assert asked.finished is None
        await asyncio.sleep(tick + 0.001 - asyncio.get_running_loop().time())
        assert isinstance(asked.error, RequestTimeoutError)
        hosts.last.step()
    await service.close()


@in_virtual_time
async def test_requests_past_predict_timeout_end_without_an_engine(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.load_seconds = 5
    service = await loaded(tokenizer, predict_timeout=1e-9)
    asked = [await ask(service)]
    hosts.last.die()
    asked.append(await ask(service))
    assert [one.finished for one in asked] == [None, None]
    await asyncio.sleep(0.26)
    assert all(isinstance(one.error, RequestTimeoutError) for one in asked)
    await service.close()


@in_virtual_time
async def test_an_engine_process_is_busy_while_something_runs(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer)
    host = hosts.last
    assert not host.busy()
    await ask(service, tokens=1)
    assert host.busy()
    host.step()
    assert not host.busy()
    host.die()
    assert not host.busy()
    await service.close()
