from __future__ import annotations

import asyncio
import random
from typing import Any

import orjson
import pytest

from djl_trtllm.bench.apis import APIS, Requests, tokens_per_word
from djl_trtllm.bench.client import Client, Target
from djl_trtllm.bench.prompts import Prompt, synthetic
from djl_trtllm.bench.streams import EventReader, Reader, TokenReader
from djl_trtllm.errors import BenchmarkError
from tests.support.stub_http import Asked, streamed, stub_server, usage_events, whole

TARGET = Target("localhost", 8080)
MESSAGES = [{"role": "user", "content": "hello"}]


def made(
    api: str, prompt: Prompt, parameters: dict[str, Any] | None = None, ignore_end: bool = True
) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    requests = Requests(Client(TARGET, 1.0), api, "m", parameters or {}, ignore_end=ignore_end)
    head, _, body = requests.make(prompt).partition(b"\r\n\r\n")
    return head.split(b" ")[1].decode(), orjson.loads(body)


USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("api", "path", "body"),
    [
        (
            "chat",
            "/v1/chat/completions",
            {
                "model": "m",
                "messages": MESSAGES,
                "max_tokens": 5,
                "stream": True,
                "ignore_eos": True,
                "stream_options": USAGE,
                "top_k": 3,
            },
        ),
        (
            "completions",
            "/v1/completions",
            {
                "model": "m",
                "prompt": "hello",
                "max_tokens": 5,
                "stream": True,
                "ignore_eos": True,
                "stream_options": USAGE,
                "top_k": 3,
            },
        ),
        (
            "lmi",
            "/invocations",
            {
                "inputs": "hello",
                "parameters": {"max_new_tokens": 5, "ignore_eos_token": True, "top_k": 3},
                "stream": True,
            },
        ),
        (
            "tgi",
            "/generate_stream",
            {"inputs": "hello", "parameters": {"max_new_tokens": 5, "ignore_eos": True, "top_k": 3}},
        ),
        (
            "triton",
            "/v2/models/m/generate_stream",
            {"text_input": "hello", "max_tokens": 5, "stream": True, "end_id": -1, "top_k": 3},
        ),
    ],
)
def test_a_request_of_each_api(api: str, path: str, body: dict[str, Any]) -> None:
    assert made(api, Prompt(5, "hello"), {"top_k": 3}) == (path, body)


def test_the_name_of_a_model_is_quoted_in_a_path() -> None:
    requests = Requests(Client(TARGET, 1.0), "triton", "acme/a b", {}, ignore_end=True)
    assert requests.make(Prompt(5, "hello")).startswith(b"POST /v2/models/acme%2Fa%20b/generate_stream HTTP/1.1\r\n")


@pytest.mark.parametrize("api", APIS)
def test_outputs_may_end_by_themselves(api: str) -> None:
    _, body = made(api, Prompt(5, "hello"), ignore_end=False)
    assert not {"ignore_eos", "ignore_eos_token", "end_id"} & (body.keys() | body.get("parameters", {}).keys())


def test_parameters_of_the_command_override() -> None:
    assert made("chat", Prompt(5, "a"), {"ignore_eos": False, "max_tokens": 9})[1]["ignore_eos"] is False
    assert made("chat", Prompt(5, "a"), {"max_tokens": 9})[1]["max_tokens"] == 9


def test_messages_go_to_chat_as_they_are() -> None:
    prompt = Prompt(5, messages=MESSAGES)
    assert made("chat", prompt)[1]["messages"] == MESSAGES
    lmi = made("lmi", prompt, {"top_k": 3})[1]
    assert lmi == {"messages": MESSAGES, "max_tokens": 5, "stream": True, "ignore_eos_token": True, "top_k": 3}
    assert made("completions", prompt)[1]["prompt"] == "hello"


@pytest.mark.parametrize(
    ("api", "text", "chat"),
    [("chat", EventReader, EventReader), ("lmi", TokenReader, EventReader), ("tgi", TokenReader, TokenReader)],
)
def test_the_reader_follows_what_is_asked(api: str, text: type[Reader], chat: type[Reader]) -> None:
    requests = Requests(Client(TARGET, 1.0), api, "m", {}, ignore_end=True)
    assert type(requests.reader(Prompt(5, "hello"), 1.0)) is text
    assert type(requests.reader(Prompt(5, messages=MESSAGES), 1.0)) is chat


def prepared(refuses: set[str], **options: Any) -> tuple[Requests, list[Asked]]:
    """Requests for a server that refuses bodies with these words."""
    seen: list[Asked] = []

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        seen.append(asked)
        if asked.path == "/v1/models":
            writer.write(whole(200, b'{"data":[{"id":"first"},{"id":"second"}]}'))
        elif asked.path == "/tokenize":
            writer.write(whole(200, b'{"count":30}') if "tokenize" not in refuses else whole(404, b""))
        elif found := [word for word in refuses if word in orjson.dumps(asked.body).decode()]:
            writer.write(whole(400, f"unknown {found[0]}".encode()))
        else:
            writer.write(streamed(*usage_events(2)))

    async def main() -> Requests:
        async with stub_server(answer) as port:
            client = Client(Target("127.0.0.1", port), 30.0)
            requests = Requests(client, options.get("api", "chat"), options.get("model"), {}, ignore_end=True)
            await requests.prepare(synthetic(random.Random(1), 10, 50, 1.3))
            return requests

    return asyncio.run(main()), seen


def test_the_model_is_the_first_of_the_server() -> None:
    requests, seen = prepared(set())
    assert requests.model == "first"
    assert seen[-1].body["model"] == "first"
    assert seen[-1].body["max_tokens"] < 10, "a first request is small"
    assert requests.notes == []


def test_a_given_model_is_not_looked_up() -> None:
    requests, seen = prepared(set(), model="mine")
    assert (requests.model, len(seen)) == ("mine", 1)


def test_what_a_server_refuses_is_left_out_and_noted() -> None:
    requests, seen = prepared({"ignore_eos", "continuous_usage_stats"}, model="m")
    assert seen[-1].body["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in seen[-1].body
    assert not requests.ignores_end
    assert requests.notes == [
        "the server refuses to be asked for output of the requested length",
        "the server refuses to be asked for usage in each event",
    ]


def test_a_server_that_refuses_everything_is_an_error_with_its_message() -> None:
    with pytest.raises(BenchmarkError, match=r"chat/completions does not answer a first request: HTTP 400: unknown m"):
        prepared({"messages"}, model="m")


@pytest.mark.parametrize(
    ("status", "advice"), [(404, "--api is one of chat"), (401, "--api-key"), (403, "--api-key"), (503, "busy")]
)
def test_a_refusal_says_what_to_do(status: int, advice: str) -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(status, b"busy"))

    async def main() -> None:
        async with stub_server(answer) as port:
            requests = Requests(Client(Target("127.0.0.1", port), 30.0), "lmi", None, {}, ignore_end=True)
            with pytest.raises(BenchmarkError, match=advice):
                await requests.prepare(synthetic(random.Random(1), 10, 50, 1.3))

    asyncio.run(main())


def test_only_a_known_length_is_the_count_of_a_server_that_reports_none() -> None:
    for ignore, expected in ((True, 5), (False, 0)):
        requests = Requests(Client(TARGET, 1.0), "triton", None, {}, ignore_end=ignore)
        assert requests.reader(Prompt(5, "a"), 1.5).stream.requested == expected
        assert requests.model == "ensemble"


def test_the_servers_tokenizer_counts_the_tokens_of_a_word() -> None:
    async def main(answer: bytes) -> float | None:
        async def reply(asked: Asked, writer: asyncio.StreamWriter) -> None:
            assert (asked.path, asked.body) == ("/tokenize", {"prompt": "a b c d"})
            writer.write(answer)

        async with stub_server(reply) as port:
            return await tokens_per_word(Client(Target("127.0.0.1", port), 30.0), "a b c d")

    assert asyncio.run(main(whole(200, b'{"count":6}'))) == 1.5
    for answer in (whole(404, b"{}"), whole(200, b"{}"), whole(200, b"nonsense"), whole(200, b"[]")):
        assert asyncio.run(main(answer)) is None
