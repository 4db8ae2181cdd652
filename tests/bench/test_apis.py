from __future__ import annotations

import asyncio
import random
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pytest

from djl_trtllm.bench import apis
from djl_trtllm.bench.apis import (
    APIS,
    Prompt,
    Requests,
    of_file,
    sample_text,
    synthetic,
    tokens_per_word,
)
from djl_trtllm.bench.client import Client, EventReader, Reader, Target, TokenReader
from djl_trtllm.errors import BenchmarkError
from tests.support.stub_http import Asked, streamed, stub_server, usage_events, whole
from tests.support.tables import by_rows, by_table

MESSAGES = [{"role": "user", "content": "hello"}]


HELLO = Prompt(5, "hello")


def requests_of(
    api: str, parameters: dict[str, Any] | None = None, *, ignore_end: bool = True, model: str | None = "m"
) -> Requests:
    return Requests(Client(Target("localhost", 8080), 1.0), api, model, parameters or {}, ignore_end=ignore_end)


def made(requests: Requests, prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    head, _, body = requests.make(prompt).partition(b"\r\n\r\n")
    return head.split(b" ")[1].decode(), orjson.loads(body)


USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
OPENAI = {"model": "m", "max_tokens": 5, "stream": True, "ignore_eos": True, "top_k": 3, **USAGE}
CHAT = Prompt(5, messages=MESSAGES)


@by_rows(
    ("api", "prompt", "path", "body", "reader"),
    [
        ("chat", HELLO, "/v1/chat/completions", {**OPENAI, "messages": MESSAGES}, EventReader),
        ("chat", CHAT, "/v1/chat/completions", {**OPENAI, "messages": MESSAGES}, EventReader),
        ("completions", HELLO, "/v1/completions", {**OPENAI, "prompt": "hello"}, EventReader),
        ("completions", CHAT, "/v1/completions", {**OPENAI, "prompt": "hello"}, EventReader),
        (
            "lmi",
            HELLO,
            "/invocations",
            {
                "inputs": "hello",
                "parameters": {"max_new_tokens": 5, "ignore_eos_token": True, "top_k": 3},
                "stream": True,
            },
            TokenReader,
        ),
        (
            "lmi",
            CHAT,
            "/invocations",
            {"messages": MESSAGES, "max_tokens": 5, "stream": True, "ignore_eos_token": True, "top_k": 3},
            EventReader,
        ),
        (
            "tgi",
            CHAT,
            "/generate_stream",
            {"inputs": "hello", "parameters": {"max_new_tokens": 5, "ignore_eos": True, "top_k": 3}},
            TokenReader,
        ),
        (
            "triton",
            HELLO,
            "/v2/models/m/generate_stream",
            {"text_input": "hello", "max_tokens": 5, "stream": True, "end_id": -1, "top_k": 3},
            EventReader,
        ),
    ],
)
def test_a_request_of_each_api(api: str, prompt: Prompt, path: str, body: dict[str, Any], reader: type[Reader]) -> None:
    requests = requests_of(api, {"top_k": 3})
    assert made(requests, prompt) == (path, body)
    assert type(requests.reader(prompt, 1.0)) is reader


@by_rows("api", APIS)
def test_outputs_may_end_by_themselves(api: str) -> None:
    _, body = made(requests_of(api, ignore_end=False), HELLO)
    assert not {"ignore_eos", "ignore_eos_token", "end_id"} & (body.keys() | body.get("parameters", {}).keys())


def test_parameters_of_the_command_override_and_a_model_is_quoted_in_a_path() -> None:
    body = made(requests_of("chat", {"ignore_eos": False, "max_tokens": 9}), HELLO)[1]
    assert (body["ignore_eos"], body["max_tokens"]) == (False, 9)
    assert made(requests_of("triton", model="acme/a b"), HELLO)[0] == "/v2/models/acme%2Fa%20b/generate_stream"


@pytest.mark.parametrize(("ignore_end", "expected"), [(True, 5), (False, 0)])
def test_only_a_known_length_is_the_count_of_a_server_that_reports_none(ignore_end: bool, expected: int) -> None:
    requests = requests_of("triton", ignore_end=ignore_end, model=None)
    stream = requests.reader(HELLO, 1.5).stream
    assert (stream.requested, stream.intended, requests.model) == (expected, 1.5, "ensemble")


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


def test_the_model_is_the_first_of_the_server_unless_one_is_given() -> None:
    requests, seen = prepared(set())
    assert (requests.model, seen[-1].body["model"], requests.notes) == ("first", "first", [])
    assert seen[-1].body["max_tokens"] < 10, "a first request is small"
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


@by_table("status", "advice")
def test_a_server_that_refuses_everything_is_an_error_that_says_what_to_do(status: int, advice: str) -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(status, b"busy"))

    async def main() -> None:
        async with stub_server(answer) as port:
            requests = Requests(Client(Target("127.0.0.1", port), 30.0), "lmi", None, {}, ignore_end=True)
            with pytest.raises(BenchmarkError, match=advice):
                await requests.prepare(synthetic(random.Random(1), 10, 50, 1.3))

    asyncio.run(main())


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


def test_a_synthetic_prompt_has_the_words_of_its_tokens_and_follows_from_the_seed() -> None:
    first, second = islice(synthetic(random.Random(1), 130, 7, 1.3), 2)
    assert (len(first.text.split()), first.output_tokens, first.messages) == (100, 7, None)
    assert first.text.split()[:5] != second.text.split()[:5], "a common beginning would be reused from the KV cache"
    assert [first, second] == list(islice(synthetic(random.Random(1), 130, 7, 1.3), 2))
    assert next(synthetic(random.Random(1), 1, 1, 4.0)).text, "even the shortest has a word"


def test_messages_are_one_text_for_apis_without_chat() -> None:
    assert Prompt(1, messages=[{"content": "a"}, {"content": "b"}]).plain() == "a\nb"


def test_a_file_has_texts_and_messages_and_is_read_again_and_again(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "one", "max_tokens": 3}\n\n{"inputs": "two"}\n'
        '{"messages": [{"role": "user", "content": "three"}]}\n',
        encoding="utf-8-sig",
    )
    prompts = list(islice(of_file(file, 9, random.Random(1)), 6))
    expected = {("one", 3), ("two", 9), ("three", 9)}
    assert {(prompt.plain(), prompt.output_tokens) for prompt in prompts[:3]} == expected
    assert {(prompt.plain(), prompt.output_tokens) for prompt in prompts[3:]} == expected
    firsts = {next(of_file(file, 9, random.Random(seed))).plain() for seed in range(20)}
    assert firsts == {"one", "two", "three"}, "in random order"


def test_a_line_may_have_ids_a_length_and_parameters_of_its_request(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt_ids": [0, 4], "parameters": {"seed": 1}}\n{"prompt_tokens": 26}\n'
        '{"prompt_ids": [5], "prompt": "five", "prompt_tokens": 1}\n'
    )
    found = list(islice(of_file(file, 9, random.Random(1), 1.3), 3))
    ids, both, length = sorted(found, key=lambda prompt: len(prompt.text))
    assert (ids.ids, ids.parameters) == ([0, 4], {"seed": 1})
    assert len(length.text.split()) == 20
    assert (both.ids, both.text, both.tokens) == ([5], "five", 0)
    file.write_text('{"prompt_tokens": 1}\n')
    (one,) = islice(of_file(file, 9, random.Random(1)), 1)
    assert one.text


@pytest.mark.parametrize(("api", "field"), [("completions", "prompt"), ("lmi", "inputs"), ("chat", "messages")])
def test_ids_go_to_completions_and_their_text_elsewhere(api: str, field: str) -> None:
    requests = requests_of(api, {"top_k": 2}, ignore_end=False)
    _, body = made(requests, Prompt(1, "five", ids=[5], parameters={"top_k": 1, "seed": 7}))
    assert body[field] == {"prompt": [5], "inputs": "five", "messages": [{"role": "user", "content": "five"}]}[field]
    assert {"top_k": 2, "seed": 7}.items() <= body.get("parameters", body).items()
    if api != "completions":
        with pytest.raises(BenchmarkError, match="--api completions"):
            requests.make(Prompt(1, ids=[5]))


def test_the_size_of_a_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apis, "MOST_PROMPTS_BYTES", 10)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}')
    with pytest.raises(BenchmarkError, match="more than 10 bytes"):
        next(of_file(tmp_path / "prompts.jsonl", 1, random.Random(1)))


@by_table("content", "error")
def test_a_wrong_file_is_an_error_with_its_line(content: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(BenchmarkError, match=error):
        next(of_file(file, 1, random.Random(1)))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"--dataset .*nowhere: cannot read it"):
        next(of_file(tmp_path / "nowhere", 1, random.Random(1)))


def test_the_sample_has_every_word() -> None:
    assert len(set(sample_text().split())) > 90
    assert len(sample_text(10).split()) == 10
