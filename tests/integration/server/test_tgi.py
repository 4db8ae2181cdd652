"""Hugging Face's InferenceClient, unmodified, on the base URL."""

from __future__ import annotations

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import GenerationError, ValidationError

from djl_trtllm.model import Tokenizer
from tests.support.models import PROMPT
from tests.support.server import Server


@pytest.fixture
def client(server: Server) -> InferenceClient:
    return InferenceClient(server.url)


def test_text_is_generated_whole_and_streamed(client: InferenceClient, tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(tokenizer.encode(PROMPT)[:7])
    assert client.text_generation(PROMPT, max_new_tokens=7) == text
    whole = client.text_generation(PROMPT, max_new_tokens=7, details=True)
    assert whole.details and (whole.details.generated_tokens, whole.details.finish_reason) == (7, "length")
    assert "".join(client.text_generation(PROMPT, max_new_tokens=7, stream=True)) == text
    *_, last = client.text_generation(PROMPT, max_new_tokens=7, stream=True, details=True)
    assert last.details and last.details.generated_tokens == 7


def test_a_chat_is_answered_whole_and_streamed(client: InferenceClient) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    whole = client.chat_completion(messages, max_tokens=7, temperature=0)
    streamed = client.chat_completion(messages, max_tokens=7, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert whole.choices[0].message.content == text != ""


def test_errors_raise_what_the_client_has_for_them(client: InferenceClient) -> None:
    with pytest.raises(ValidationError):
        client.text_generation(PROMPT, max_new_tokens=7, repetition_penalty=-1)
    with pytest.raises(GenerationError, match="scripted error"):
        client.text_generation(PROMPT, max_new_tokens=77)
