"""OpenAI's own client, unmodified, on a server with known tokens."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from djl_trtllm.model import Tokenizer
from tests.support.models import PROMPT
from tests.support.server import Server

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_is_answered_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="", messages=MESSAGES, max_tokens=7, temperature=0, logprobs=True, n=2, seed=1
    )
    text = whole.choices[0].message.content
    assert text and whole.choices[0].finish_reason == "length"
    assert whole.usage and whole.usage.completion_tokens == 14
    assert whole.choices[1].logprobs and len(whole.choices[1].logprobs.content or []) == 7
    stream = client.chat.completions.create(
        model="scripted",
        messages=MESSAGES,
        max_completion_tokens=7,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert last.usage and last.usage.completion_tokens == 7


def test_a_completion_is_answered_whole_and_streamed(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    expected = tokenizer.decode(tokenizer.encode(PROMPT)[:7])
    prompts = [PROMPT, PROMPT]
    whole = client.completions.create(model="", prompt=prompts, max_tokens=7, temperature=0, echo=True)
    assert [choice.text for choice in whole.choices] == [PROMPT + expected] * 2
    stream = client.completions.create(
        model="", prompt=tokenizer.encode(PROMPT), max_tokens=7, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").object == "model"


def test_errors_raise_what_the_client_has_for_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="", messages=MESSAGES, temperature=1.5, logit_bias={"3": 1})
    assert (refused.value.param, refused.value.code) == ("logit_bias", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError, match="there is no model named 'gpt-5'"):
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="max_output_len"):
        client.completions.create(model="", prompt=PROMPT, max_tokens=10**9)
    with pytest.raises(openai.InternalServerError, match="scripted"):
        client.completions.create(model="", prompt=PROMPT, max_tokens=77)
    with pytest.raises(openai.APIError, match="scripted"):
        list(client.completions.create(model="", prompt=PROMPT, max_tokens=77, stream=True))


def test_the_most_likely_tokens_come_from_an_engine_that_has_them(client: openai.OpenAI, executor: str) -> None:
    def ask() -> openai.types.chat.ChatCompletion:
        return client.chat.completions.create(
            model="", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
        )

    if executor == "scripted":
        with pytest.raises(openai.BadRequestError, match=r"'top_logprobs'.* chosen token's log-probability only"):
            ask()
        return
    logprobs = ask().choices[0].logprobs
    assert logprobs and logprobs.content
    assert [len(token.top_logprobs) for token in logprobs.content] == [3] * 4
    assert all(token.top_logprobs[0].token == token.token for token in logprobs.content)
    completion = client.completions.create(model="", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2)
    shown = completion.choices[0].logprobs
    assert shown and [len(top) for top in shown.top_logprobs or []] == [2] * 4
