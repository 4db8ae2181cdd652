"""Conversations are rendered in a process of their own, which is given up if it takes too long."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from djl_trtllm.errors import InvalidRequestError, NotReadyError
from djl_trtllm.model import Tokenizer
from djl_trtllm.service.chat_renderer import ChatRenderer

TEMPLATE = (
    "{% if messages[0]['content'] == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% elif messages[0]['content'] == 'power' %}{{ 9 ** (9 ** 9) }}"
    "{% elif messages[0]['content'] == 'memory' %}{{ 'x' * 4000000000 }}"
    "{% elif messages[0]['content'] == 'refuse' %}{{ raise_exception('not so') }}"
    "{% else %}{{ bos_token }}{{ messages[0]['content'] }}{{ more }}{% endif %}"
)


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@asynccontextmanager
async def rendering(timeout: float = 60.0, template: str = TEMPLATE) -> AsyncIterator[ChatRenderer]:
    """A renderer of one template. No process of it outlives the block."""
    before = set(psutil.Process().children())
    tokenizer = SimpleNamespace(chat_templates=({"default": template}, {"bos_token": "<s>"}, Path("here")))
    renderer = ChatRenderer(cast(Tokenizer, tokenizer), timeout)
    try:
        yield renderer
    finally:
        await renderer.close()
        assert set(psutil.Process().children()) <= before
        gc.collect()


def test_conversations_are_rendered_in_order_with_their_keywords() -> None:
    async def main() -> None:
        async with rendering() as renderer:
            texts = [f"{number} 🦊" for number in range(50)]
            prompts = await asyncio.gather(
                *(renderer.render(conversation(text), {"more": number}) for number, text in enumerate(texts))
            )
            assert prompts == [f"<s>{text}{number}" for number, text in enumerate(texts)]

    asyncio.run(main())


def test_what_the_template_refuses_is_refused_with_its_reason() -> None:
    async def main() -> None:
        async with rendering() as renderer:
            with pytest.raises(InvalidRequestError, match="refuses these messages: not so"):
                await renderer.render(conversation("refuse"), {})
            assert await renderer.render(conversation("a"), {}) == "<s>a"

    asyncio.run(main())


@pytest.mark.parametrize("endless", ["loop", "power"])
def test_a_template_that_does_not_end_is_given_up_and_the_others_are_rendered(endless: str) -> None:
    async def main() -> None:
        async with rendering(timeout=0.5) as renderer:
            await renderer.render(conversation("warm"), {})
            results = await asyncio.gather(
                *(renderer.render(conversation(text), {}) for text in ("a", endless, "b", endless, "c")),
                return_exceptions=True,
            )
            assert [result for result in results if isinstance(result, str)] == ["<s>a", "<s>b", "<s>c"]
            assert [str(result) for result in results if isinstance(result, InvalidRequestError)] == [
                "the model's chat template failed on these messages: it takes longer than "
                "chat_template_timeout=0.5 seconds"
            ] * 2

    asyncio.run(main())


def test_a_template_that_takes_all_memory_is_refused_it() -> None:
    async def main() -> None:
        async with rendering() as renderer:
            with pytest.raises(InvalidRequestError, match="MemoryError"):
                await renderer.render(conversation("memory"), {})
            assert await renderer.render(conversation("a"), {}) == "<s>a"

    asyncio.run(main())


def test_a_process_that_is_killed_costs_one_request() -> None:
    async def main() -> None:
        async with rendering() as renderer:
            await renderer.render(conversation("a"), {})
            (process,) = psutil.Process().children()
            process.kill()
            with pytest.raises(InvalidRequestError, match="its process has ended"):
                await renderer.render(conversation("b"), {})
            assert await renderer.render(conversation("c"), {}) == "<s>c"

    asyncio.run(main())


def test_who_leaves_is_not_waited_for_and_closing_ends_the_rest() -> None:
    async def main() -> None:
        async with rendering() as renderer:
            leaving = asyncio.ensure_future(renderer.render(conversation("loop"), {}))
            staying = asyncio.ensure_future(renderer.render(conversation("a"), {}))
            await asyncio.sleep(0)
            leaving.cancel()
            await renderer.close()
            with pytest.raises(NotReadyError):
                await staying

    asyncio.run(main())


def test_messages_that_no_process_can_take_are_refused() -> None:
    async def main() -> None:
        async with rendering() as renderer:
            deep: Any = None
            for _ in range(100_000):
                deep = [deep]
            with pytest.raises(InvalidRequestError, match="the messages are no JSON"):
                await renderer.render([{"role": "user", "content": deep}], {})
            while deep:  # without recursion
                (deep,) = deep

    asyncio.run(main())


def test_the_process_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    async def main() -> None:
        async with rendering() as renderer:
            await renderer.render(conversation("a"), {})
            (process,) = psutil.Process().children()
            assert "HF_TOKEN" not in process.environ()

    asyncio.run(main())
