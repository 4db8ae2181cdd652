"""Several requests in one call."""

from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.api import Call, Prompt
from djl_trtllm.errors import OverloadedError, PromptTooLongError, UnsupportedParameterError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import GenerationRequest, Sampling
from tests.support.in_process import PROMPT, Asked, Hosts, ask, loaded
from tests.support.virtual_time import in_virtual_time
from tests.support.word_encoder import WordEncoder


class PromptsEncoder(WordEncoder):
    """An encoder that keeps the prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[Prompt] = []

    def begin(self, prompt: Prompt) -> None:
        self.prompts.append(prompt)


def several(*prompts: str, encoder: PromptsEncoder, **fields: Any) -> Call:
    return Call(tuple(GenerationRequest(prompt=prompt, **fields) for prompt in prompts), encoder)


@in_virtual_time
async def test_the_requests_of_a_call_run_together_and_their_chunks_say_whose_they_are(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    service, asked, encoder = await loaded(tokenizer), Asked(), PromptsEncoder()
    states = await service.generate(several("a wolf", "a fox", encoder=encoder), asked)
    assert [prompt.text for prompt in encoder.prompts] == ["a wolf", "a fox"]
    assert [submitted.prompt_ids for submitted in hosts.last.submitted] == [*map(tokenizer.encode, ("a wolf", "a fox"))]
    hosts.last.step()
    assert [(chunk.generation, chunk.index) for chunk in asked.updates] == [(0, 0), (1, 0)]
    texts = [chunk.tokens[0].id for chunk in asked.updates]
    assert texts == [tokenizer.encode(prompt)[0] for prompt in ("a wolf", "a fox")]
    service.cancel(states)
    assert [chunk.finished is not None for chunk in asked.updates] == [False, False, True, True]
    assert len(hosts.last.cancelled) == 2
    await service.close()


@in_virtual_time
async def test_a_call_is_admitted_as_a_whole(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer, max_rolling_batch_size=1, job_queue_size=3)
    await ask(service)
    sampling = Sampling(n=2, do_sample=True)
    with pytest.raises(OverloadedError):
        await service.generate(several("a wolf", "a fox", encoder=PromptsEncoder(), sampling=sampling), Asked())
    assert service.load_now == 1
    await service.generate(several("a wolf", "a fox", encoder=PromptsEncoder()), Asked())
    assert service.load_now == 3
    await service.close()


@in_virtual_time
async def test_a_cancelled_call_starts_none_of_its_requests(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer, max_rolling_batch_size=1, job_queue_size=3)
    first = await ask(service)
    states = await service.generate(several("a wolf", "a fox", "a hen", encoder=PromptsEncoder()), Asked())
    service.cancel(first.generations)
    service.cancel(states)
    hosts.last.step()
    assert (len(hosts.last.submitted), service.load_now) == (1, 0)
    await service.close()


@pytest.mark.parametrize("prompts", [(PROMPT, "a", "a"), ("a", PROMPT, "a"), ("a", "a", PROMPT)])
@in_virtual_time
async def test_a_call_with_a_request_that_can_never_run_runs_none(
    hosts: Hosts, tokenizer: Tokenizer, prompts: tuple[str, ...]
) -> None:
    service, asked = await loaded(tokenizer, max_input_len=5), Asked()
    sampling = Sampling(n=2, do_sample=True)
    with pytest.raises(PromptTooLongError):
        await service.generate(several(*prompts, encoder=PromptsEncoder(), sampling=sampling), asked)
    hosts.last.step()
    assert (service.load_now, asked.updates) == (0, [])
    await service.close()


@in_virtual_time
async def test_a_call_of_which_the_engine_cannot_do_a_part_runs_none(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = await loaded(tokenizer)
    requests = (GenerationRequest(prompt="a"), GenerationRequest(prompt="a", sampling=Sampling(min_p=0.5)))
    with pytest.raises(UnsupportedParameterError, match="min_p"):
        await service.generate(Call(requests, PromptsEncoder()), Asked())
    assert (service.load_now, hosts.last.submitted) == (0, [])
    await service.close()
