"""Guided decoding over HTTP with the bundled model: OpenAI's client and LMI's parameters, beside plain requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.server import Server, serving

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["wolf", "cat"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 20},
    },
    "required": ["animal", "age", "name"],
    "additionalProperties": False,
}
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story"}]


@pytest.fixture(scope="module")
def server(tiny_stories: Path) -> Iterator[Server]:
    with serving(tiny_stories) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def generate(server: Server, **parameters: Any) -> httpx.Response:
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 100, **parameters}}
    return httpx.post(f"{server.url}/invocations", json=body, timeout=60)


def fits(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["animal", "age", "name"]
        and value["animal"] in ("wolf", "cat")
        and 0 <= value["age"] <= 99
        and len(value["name"]) <= 20
    )


def test_response_format_gives_json_of_the_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    for seed in range(4):
        arguments: dict[str, Any] = {
            "model": "",
            "messages": MESSAGES,
            "max_tokens": 400,
            "seed": seed,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA},
            },
        }
        whole = client.chat.completions.create(**arguments).choices[0]
        assert whole.finish_reason == "stop"
        assert fits(whole.message.content)
        chunks = client.chat.completions.create(**arguments, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content


def test_json_object_gives_an_object(client: openai.OpenAI) -> None:
    choices = client.chat.completions.create(
        model="", messages=MESSAGES, max_tokens=500, n=8, seed=3, response_format={"type": "json_object"}
    ).choices
    complete = [choice.message.content or "" for choice in choices if choice.finish_reason == "stop"]
    assert complete
    assert all(type(json.loads(text)) is dict for text in complete)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"guided_regex": "(yes|no)"}, ("yes", "no")),
        ({"guided_choice": ["a wolf", "a cat"]}, ("a wolf", "a cat")),
        ({"guided_grammar": 'root ::= "x" | "y"'}, ("x", "y")),
        ({"guided_json": {"enum": [1, 2]}}, ("1", "2")),
        ({"grammar": {"type": "regex", "value": "[0-3]"}}, ("0", "1", "2", "3")),
        ({"guided_decoding": {"regex": "[0-3]"}}, ("0", "1", "2", "3")),
    ],
)
def test_the_guides_of_lmi_work(server: Server, parameters: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert generate(server, **parameters).json()["generated_text"] in expected


def test_an_unusable_guide_is_the_error_of_its_request(server: Server, client: openai.OpenAI) -> None:
    refused = generate(server, guided_regex="(?=a)b")
    assert refused.status_code == 424
    assert "the guide cannot be used" in refused.json()["error"]
    with pytest.raises(openai.BadRequestError, match="the guide cannot be used: Type should be a string"):
        client.chat.completions.create(
            model="",
            messages=MESSAGES,
            stream=True,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}},
        )
    assert generate(server, guided_regex="(" * 65 + ")" * 65).status_code == 424


def test_plain_requests_beside_guides_are_the_same_and_no_engine_ends(server: Server) -> None:
    plain = generate(server).json()
    guides = ["(", "[z-a]", "(a|b){3}", "(?<=a)b", "x{1,400}", "a\0b", "beside (this|that)"]
    with ThreadPoolExecutor(8) as pool:
        guided = [pool.submit(generate, server, guided_regex=text) for text in guides * 3]
        beside = [pool.submit(generate, server) for _ in range(12)]
        assert all(answer.result().json() == plain for answer in beside)
        assert {answer.result().status_code for answer in guided} == {200, 424}
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'djl_trtllm_executor_restarts_total{model="tiny-stories"} 0' in metrics
