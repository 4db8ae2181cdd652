"""How a prompt is read: what cannot fit is refused before any work, the rest is bounded."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest

from djl_trtllm.errors import PromptTooLongError, RequestTimeoutError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import GenerationRequest
from djl_trtllm.service.prompts import PromptReader
from djl_trtllm.service.worker_threads import WORKERS
from tests.support.in_process import Hosts, played_model
from tests.support.virtual_time import in_virtual_time

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
    return PromptReader(played_model(tokenizer, **options))


@in_virtual_time
async def test_a_text_that_cannot_fit_is_not_tokenised(tokenizer: Tokenizer, lengths: Lengths) -> None:
    with pytest.raises(PromptTooLongError, match="characters, which are at least"):
        await reader(tokenizer, max_input_len=10).read(GenerationRequest(prompt=LONG))
    assert lengths.seen == []


@in_virtual_time
async def test_of_a_truncated_prompt_only_the_end_is_tokenised(tokenizer: Tokenizer, lengths: Lengths) -> None:
    text = LONG * 100
    request = GenerationRequest(prompt=text, truncate=5)
    _, ids = await reader(tokenizer, max_input_len=10).read(request)
    assert ids[-5:] == tokenizer.encode(text[-200:])[-5:]
    assert sum(lengths.seen) < len(text) / 10


@in_virtual_time
async def test_a_text_without_a_bound_in_characters_is_tokenised_in_part_first(
    tokenizer: Tokenizer, lengths: Lengths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "longest_token", None)
    with pytest.raises(PromptTooLongError, match=r"more than .* tokens, max_input_len is 100"):
        await reader(tokenizer, max_input_len=100).read(GenerationRequest(prompt=LONG * 100))
    assert sum(lengths.seen) < len(LONG * 100) / 10


@in_virtual_time
async def test_a_prompt_waits_for_a_worker_no_longer_than_a_request_may_take(tokenizer: Tokenizer) -> None:
    async def never(work: object) -> None:
        await asyncio.sleep(3000)

    late = pytest.raises(RequestTimeoutError, match="predict_timeout=60 seconds")
    with mock.patch.object(WORKERS, "run", never), late:
        await reader(tokenizer, max_input_len=10_000, predict_timeout=60).read(GenerationRequest(prompt=LONG))


@in_virtual_time
async def test_the_renderer_is_made_once_and_closed(tokenizer: Tokenizer) -> None:
    with Hosts().installed():
        prompts = reader(tokenizer)
        messages = [{"role": "user", "content": "a wolf"}]
        texts = {await prompts.render(messages, {}) for _ in range(2)}
        assert texts == {tokenizer.render_chat(messages)}
        await prompts.close()
        await prompts.close()


@in_virtual_time
async def test_a_prompt_of_ids_is_taken_as_it_is(tokenizer: Tokenizer) -> None:
    assert await reader(tokenizer).read(GenerationRequest(prompt_ids=[5, 6])) == (None, [5, 6])


@in_virtual_time
async def test_ids_have_their_text_and_each_its_own(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the wolf", False)
    prompts = reader(tokenizer)
    assert await prompts.text(ids) == tokenizer.decode(ids)
    assert [token.id for token in await prompts.tokens(ids)] == ids
    assert [token.text for token in await prompts.tokens(ids)] == [tokenizer.decode([one], False) for one in ids]


@in_virtual_time
async def test_only_long_texts_are_worth_a_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def noting(work: Any) -> Any:
        asked.append(work)
        return work()

    monkeypatch.setattr(WORKERS, "run", noting)
    prompts = reader(tokenizer, max_input_len=10_000)
    for characters, threads in ((2048, 0), (2049, 1)):
        await prompts.read(GenerationRequest(prompt="a" * characters))
        assert len(asked) == threads
        assert await prompts.work_of(characters, lambda: 7) == 7
        assert len(asked) == 2 * threads


@in_virtual_time
async def test_before_a_truncated_prompt_some_text_is_kept(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for longest, kept in ((tokenizer.longest_token, (tokenizer.longest_token or 0) * 5), (None, 1024 * 5)):
        monkeypatch.setattr(tokenizer, "longest_token", longest)
        for length, left in ((2 * (kept + 65_536), 2 * (kept + 65_536)), (2 * (kept + 65_536) + 1, kept + 65_536)):
            text, _ = await reader(tokenizer).read(GenerationRequest(prompt="a" * length, truncate=5))
            assert text is not None and len(text) == left
