"""The budget of reasoning on the bundled model, on OpenVINO, and over TensorRT-LLM's executor with the fake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import tensorrt_llm_model
from tests.support.server import Server, serving

pytestmark = pytest.mark.slow

BUDGET, TOKENS = 8, 40
CLOSING = "\n</think>\n\n"
MESSAGES = [{"role": "user", "content": "Tell me a story about a wolf"}]


def ask(server: Server, path: str, **body: Any) -> Any:
    reply = server.http.post(path, json={"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("cache", ["true", "false"])
def test_the_answer_is_what_the_model_says_behind_the_end_of_its_reasoning(tiny_stories: Path, cache: str) -> None:
    options = {"OPTION_REASONING_PARSER": "deepseek_r1", "OPTION_ENABLE_KV_CACHE_REUSE": cache}
    with serving(tiny_stories, **options) as server:
        fields: dict[str, Any] = {"messages": MESSAGES, "return_token_ids": True}
        answered = ask(server, "/v1/chat/completions", thinking_token_budget=BUDGET, n=2, **fields)
        unbound = ask(server, "/v1/chat/completions", **fields)
        one, other = answered["choices"]
        ids, prompt = one["token_ids"], answered["prompt_token_ids"]
        closing = server.http.post("/tokenize", json={"prompt": CLOSING, "add_special_tokens": False}).json()["tokens"]
        end = BUDGET + len(closing)
        assert ids[:BUDGET] == unbound["choices"][0]["token_ids"][:BUDGET] and ids[BUDGET:end] == closing
        assert other["token_ids"] == ids and len(ids) == TOKENS
        rest = ask(server, "/v1/completions", prompt=prompt + ids[:end], max_tokens=TOKENS - end, return_token_ids=True)
        assert rest["choices"][0]["token_ids"] == ids[end:]
        text = rest["choices"][0]["text"]
        assert one["message"]["content"].strip() == text.strip() != ""
        assert (
            one["message"]["reasoning_content"]
            == unbound["choices"][0]["message"]["reasoning_content"][: len(one["message"]["reasoning_content"])]
        )
        usage = answered["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 2 * TOKENS)


def test_streams_and_messages_have_it_too(tmp_path: Path) -> None:
    model, environ = tensorrt_llm_model(tmp_path / "model", **{"option.reasoning_parser": "deepseek_r1"})
    with serving(model, **environ) as server:
        body: dict[str, Any] = {"model": "scripted", "messages": MESSAGES, "max_tokens": TOKENS, "stream": True}
        budget = {"type": "enabled", "budget_tokens": BUDGET}
        reply = server.http.post("/v1/messages", json={**body, "thinking": budget})
        assert reply.status_code == 200 and kinds(reply) == ["thinking", "text"]
        refused = {**body, "min_tokens": TOKENS}  # what a budget cannot be with
        reply = server.http.post("/v1/messages", json={**refused, "thinking": budget})
        assert reply.status_code == 200 and kinds(reply) == ["thinking"]
        reply = server.http.post("/v1/messages", json={**body, "thinking": {"type": "enabled"}})
        assert kinds(reply) == ["thinking"]


def kinds(reply: httpx.Response) -> list[str]:
    """The kinds of the blocks of a streamed message."""
    return [
        line.split('"content_block":{"type":"')[1].split('"')[0]
        for line in reply.text.splitlines()
        if 'content_block":{' in line
    ]
