"""Makes the token ids of a request's prompt, beside the event loop and with a bound on the work.

A text that cannot fit is refused by its length in characters, before it is tokenised. Of the others, short ones are
tokenised on the event loop, long ones in worker threads (`WORKERS`) by calls that let go of the GIL, and conversations
are rendered in a process of their own (`ChatRenderer`). The request has been admitted before, so that all this waiting
counts as waiting in its queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from djl_trtllm.errors import PromptTooLongError, RequestTimeoutError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import GenerationRequest, Token
from djl_trtllm.service.chat_renderer import ChatRenderer
from djl_trtllm.service.model import Model
from djl_trtllm.service.worker_threads import WORKERS

T = TypeVar("T")

_INLINE_CHARACTERS = 2048
"""Texts up to this length are tokenised on the event loop: it takes under a millisecond, less than using a thread."""
_INLINE_TOKENS = 256
"""The same of tokens whose texts are wanted."""
_ANY_LENGTH = 1024
"""Stands for the longest token of a vocabulary that has none."""
_MARGIN = 65_536
"""Characters before a truncated prompt, which have an influence on where its first token begins."""


class PromptReader:
    """Of one model. All methods run on the event loop."""

    def __init__(self, model: Model) -> None:
        self._tokenizer: Tokenizer = model.tokenizer
        self._max_input_len = model.limits.max_input_len
        self._timeout = model.options.predict_timeout
        self._template_timeout = model.options.chat_template_timeout
        self._renderer: ChatRenderer | None = None

    async def read(self, request: GenerationRequest) -> tuple[str | None, list[int]]:
        """The prompt's text and ids; no text for a prompt of ids.

        Raises InvalidRequestError and RequestTimeoutError.
        """
        if request.prompt_ids is not None:
            return None, request.prompt_ids
        if request.messages is not None:
            text, special = await self._in_time(self.render(request.messages, request.template or {})), False
        else:
            assert request.prompt is not None
            text, special = request.prompt, True
        longest = self._tokenizer.longest_token
        most: int | None = self._max_input_len
        if request.truncate is None:
            require_short_enough(len(text), longest, self._max_input_len)
        else:
            most = None
            kept = (longest or _ANY_LENGTH) * request.truncate + _MARGIN
            if len(text) > 2 * kept:
                text = text[-kept:]
        if len(text) <= _INLINE_CHARACTERS:
            return text, self._tokenizer.encode(text, special)
        encode = partial(self._tokenizer.encode, text, special, most)
        return text, await self._in_time(WORKERS.run(encode))

    async def render(self, messages: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]) -> str:
        """The prompt of a conversation. Raises InvalidRequestError."""
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer, self._template_timeout)
        return await self._renderer.render(messages, keywords)

    async def text(self, ids: list[int]) -> str:
        """The text of a prompt of ids."""
        return await self._work(len(ids), partial(self._tokenizer.decode, ids))

    async def tokens(self, ids: list[int]) -> list[Token]:
        """The prompt's tokens, each with its text."""
        return await self._work(len(ids), partial(self._tokens, ids))

    def _tokens(self, ids: list[int]) -> list[Token]:
        tokenizer = self._tokenizer
        return [Token(id_, tokenizer.decode([id_], False), None, id_ in tokenizer.special_ids) for id_ in ids]

    async def work_of(self, characters: int, work: Callable[[], T]) -> T:
        """Do what takes as long as tokenising this number of characters."""
        return work() if characters <= _INLINE_CHARACTERS else await self._in_time(WORKERS.run(work))

    async def close(self) -> None:
        if self._renderer is not None:
            await self._renderer.close()
            self._renderer = None

    async def _work(self, tokens: int, work: Callable[[], T]) -> T:
        return work() if tokens <= _INLINE_TOKENS else await self._in_time(WORKERS.run(work))

    async def _in_time(self, work: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(work, self._timeout)
        except asyncio.TimeoutError:
            raise RequestTimeoutError(
                f"the request did not finish within predict_timeout={self._timeout:g} seconds"
            ) from None


def require_short_enough(characters: int, longest_token: int | None, max_input_len: int) -> None:
    """Raise PromptTooLongError, before tokenising, for a text that is too long for any tokens of this vocabulary."""
    if longest_token is not None and characters > longest_token * max_input_len:
        raise PromptTooLongError(
            f"the prompt has {characters} characters, which are at least {-(-characters // longest_token)} tokens, and "
            f"max_input_len is {max_input_len}: shorten it, or raise option.max_input_len"
        )
