"""What is asked of the two kinds of sides, and how their answers are read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from djl_trtllm.bench.apis import Prompt
from djl_trtllm.errors import BenchmarkError, UnsupportedParameterError
from djl_trtllm.offline.llm import OfflineResult
from djl_trtllm.quality import sides
from djl_trtllm.quality.figures import Continuation, Position
from djl_trtllm.quality.sides import Asked, open_side
from djl_trtllm.request import FinishReason, GenerationRequest, OutputChunk, SequenceResult, Token
from tests.support.models import scripted_model
from tests.support.stub_http import Asked as Arrived, stub_server, whole

TEXT = Prompt(1, "Once upon a time")
MESSAGES = [{"role": "user", "content": "Hello"}]


def completion(*tokens: str, ended: str = "length", text: str | None = None) -> dict[str, Any]:
    """A body of `/v1/completions` with the log-probability -1 for each token, and another likely one."""
    logprobs = {
        "tokens": list(tokens),
        "token_logprobs": [-1.0] * len(tokens),
        "top_logprobs": [{token: -1.0, "other": -2.0} for token in tokens],
    }
    return {
        "choices": [{"text": "".join(tokens) if text is None else text, "logprobs": logprobs, "finish_reason": ended}]
    }


def chat(*tokens: str) -> dict[str, Any]:
    content = [{"token": token, "logprob": -1.0, "top_logprobs": [{"token": "?", "logprob": -2.0}]} for token in tokens]
    choice = {"message": {"content": "".join(tokens)}, "logprobs": {"content": content}, "finish_reason": "length"}
    return {"choices": [choice]}


def asked_of(
    *prompts: Prompt, refuses: str = "-", **replies: dict[str, Any]
) -> tuple[list[Continuation], list[Arrived]]:
    """The answers of a server, and what it was asked. It refuses bodies in which `refuses` stands."""
    seen: list[Arrived] = []

    async def answer(arrived: Arrived, writer: asyncio.StreamWriter) -> None:
        if arrived.path == "/v1/models":
            writer.write(whole(200, b'{"data":[{"id":"m"}]}'))
            return
        seen.append(arrived)
        if refuses in orjson.dumps(arrived.body).decode():
            writer.write(whole(400, b'{"error":"no such field"}'))
            return
        kind = "echo" if arrived.body.get("echo") else "chat" if "messages" in arrived.body else "text"
        writer.write(whole(200, orjson.dumps(replies.get(kind, completion("a", "b")))))

    async def run() -> list[Continuation]:
        async with stub_server(answer) as port:
            side = open_side(f"http://127.0.0.1:{port}/v1", {}, None, 10.0)
            return await asyncio.to_thread(side.answer, Asked(prompts, 7))

    return asyncio.run(run()), seen


def test_a_server_is_asked_for_greedy_tokens_and_the_likeliest_at_each_position() -> None:
    (found,), seen = asked_of(TEXT)
    assert [position.token for position in found.positions] == ["a", "b"]
    assert found.positions[0].logprobs == {"a": -1.0, "other": -2.0}
    assert (seen[0].body["prompt"], seen[0].body["max_tokens"]) == ("Hello there", 1)
    body = {"model": "m", "prompt": TEXT.text, "max_tokens": 7, "temperature": 0, "logprobs": 5}
    assert (seen[-2].path, seen[-2].body) == ("/v1/completions", body)


def test_a_server_that_refuses_so_many_is_asked_for_the_chosen_token_alone() -> None:
    (found,), seen = asked_of(TEXT, refuses='"logprobs":5')
    assert len(found.positions) == 2
    assert [each.body["logprobs"] for each in seen if each.body["max_tokens"] == 7] == [1]


def test_a_server_without_log_probabilities_cannot_be_compared() -> None:
    with pytest.raises(BenchmarkError, match=r"log-probabilities, which name the tokens: HTTP 400: .*no such field"):
        asked_of(TEXT, refuses="logprobs")


def test_messages_go_to_chat_and_ids_to_completions() -> None:
    found, seen = asked_of(Prompt(1, messages=MESSAGES), Prompt(1, messages=MESSAGES, ids=[3, 4]), chat=chat("x", "y"))
    assert [[position.token for position in each.positions] for each in found] == [["x", "y"], ["a", "b"]]
    assert found[0].positions[0].logprobs == {"x": -1.0, "?": -2.0}
    bodies = [each.body for each in seen if each.body["max_tokens"] == 7]
    first, second = sorted(bodies, key=lambda body: "prompt" in body)
    assert (first["messages"], first["logprobs"], first["top_logprobs"]) == (MESSAGES, True, 5)
    assert second["prompt"] == [3, 4]


def test_the_log_probabilities_of_a_prompt_are_those_after_its_first_token() -> None:
    echo = completion("Once", " upon", " a")
    echo["choices"][0]["logprobs"] |= {"token_logprobs": [None, -2.0, -4.0], "top_logprobs": [None, {"x": -1.0}, {}]}
    (found,), seen = asked_of(TEXT, echo=echo)
    assert found.prompt == [Position(" upon", {"x": -1.0, " upon": -2.0}), Position(" a", {" a": -4.0})]
    assert {"echo": True, "logprobs": 5, "max_tokens": 0}.items() <= seen[-1].body.items()


def test_a_server_that_gives_fewer_of_a_prompt_is_asked_for_those() -> None:
    echo = completion("Once", " upon")
    (found,), seen = asked_of(TEXT, refuses='"echo":true,"prompt":"Hello there","logprobs":5', echo=echo)
    assert found.prompt is not None and len(found.prompt) == 1
    assert seen[-1].body["logprobs"] == 1


@pytest.mark.parametrize("logprobs", [None, [None, None, -1.0], [None]])
def test_a_server_that_gives_none_of_a_prompt_has_no_perplexity(logprobs: list[float | None] | None) -> None:
    echo = completion("Once", " upon", " a")
    echo["choices"][0]["logprobs"]["token_logprobs"] = logprobs
    echo["choices"][0]["logprobs"]["top_logprobs"] = None
    assert asked_of(TEXT, echo=echo)[0][0].prompt is None
    (found,), seen = asked_of(TEXT, refuses='"echo"')
    assert found.prompt is None
    # It is asked once for each number of likeliest tokens, and for no other prompt.
    assert [each.body["logprobs"] for each in seen if "echo" in each.body] == [5, 1]


@pytest.mark.parametrize(
    ("tokens", "logprobs"),
    [
        (("a", "b", ""), {"": -1.0, "other": -2.0}),
        (("a", "b", "</s>"), {"</s>": -1.0, "other": -2.0}),
        (("a", "b"), {}),
    ],
    ids=["as an empty text", "as a token of its own", "not at all"],
)
def test_the_end_of_an_answer_is_one_token_however_a_server_shows_it(
    tokens: tuple[str, ...], logprobs: dict[str, float]
) -> None:
    (found,), _ = asked_of(TEXT, text=completion(*tokens, ended="stop", text="ab"))
    assert [position.token for position in found.positions] == ["a", "b", ""]
    assert found.positions[-1] == Position("", logprobs)


def test_a_failing_prompt_does_not_fail_the_others() -> None:
    found, _ = asked_of(Prompt(1, "too long"), TEXT, refuses="too long")
    assert found[0] == Continuation(error='HTTP 400: {"error":"no such field"}')
    assert (len(found[1].positions), found[1].error, found[1].prompt is None) == (2, "", False)


def test_an_answer_without_tokens_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="a response without tokens and log-probabilities"):
        asked_of(TEXT, text={"choices": [{"text": "a", "logprobs": None}]})


def test_numbers_that_are_no_log_probabilities_harm_nothing() -> None:
    odd = completion("a")
    odd["choices"][0]["logprobs"] |= {"token_logprobs": [1e300], "top_logprobs": [{"b": "-2"}]}
    assert asked_of(TEXT, text=odd)[0][0].positions == [Position("a", {"b": -2.0, "a": 0.0})]


def test_a_model_that_is_loaded_answers_texts_messages_and_ids(tmp_path: Path) -> None:
    """The scripted engine repeats the prompt, with one log-probability for all tokens."""
    side = open_side(str(scripted_model(tmp_path / "model")), {}, None, 1.0)
    texts, ids = side.answer(Asked([TEXT, Prompt(1, ids=[1, 504, 563])], 6))
    assert "".join(position.token for position in ids.positions) == "Once uponOnce upon"
    assert (len(texts.positions), texts.positions[1].logprobs) == (6, {"Once": -0.5})
    assert texts.prompt is not None
    assert [(each.token, each.logprobs[each.token]) for each in texts.prompt[:2]] == [("Once", -0.5), (" upon", -0.5)]
    assert side.notes == ["the engine gives fewer than 5 likeliest tokens"]


def test_a_prompt_that_the_engine_refuses_is_an_error_of_that_prompt(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", **{"option.max_input_len": 8, "option.max_seq_len": 32})
    found = open_side(str(model), {}, None, 1.0).answer(Asked([Prompt(1, "a wolf " * 20), TEXT], 6))
    assert "8" in found[0].error and not found[0].positions
    assert (found[1].error, len(found[1].positions), bool(found[1].prompt)) == ("", 6, True)


class WithoutPrompts:
    """An engine that answers "a" and its end to everything, and has no log-probabilities of prompts."""

    def __init__(self, model: object) -> None:
        del model

    def run(self, requests: Iterable[GenerationRequest]) -> Iterator[OfflineResult]:
        for number, request in enumerate(requests):
            result = OfflineResult(number, request, wants_prompt_tokens=False)
            end = SequenceResult(FinishReason.END_TOKEN, 2, None, None)
            logprobs = (-0.5, -1.0) if request.asks_logprobs else (None, None)
            result.encode(OutputChunk(0, [Token(5, "a", logprobs[0], False), Token(0, "", logprobs[1], True)], end))
            if request.prompt_logprobs is not None:
                result.fail(UnsupportedParameterError("this engine has none"))
            yield result

    def close(self) -> None:
        pass


def test_an_engine_without_log_probabilities_of_prompts_is_compared_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sides, "Runner", WithoutPrompts)
    monkeypatch.setattr(sides, "open_offline_model", lambda *_: None)
    side = open_side("model", {}, None, 1.0)
    assert side.answer(Asked([TEXT], 6)) == [Continuation([Position("a", {"a": -0.5}), Position("", {"": -1.0})])]
    assert side.notes == ["no log-probabilities of prompts: this engine has none"]


def test_a_conversation_that_the_model_ends_has_an_end() -> None:
    ended = chat("x", "y")
    ended["choices"][0]["finish_reason"] = "stop"
    (found,), seen = asked_of(Prompt(1, messages=MESSAGES), chat=ended)
    assert [position.token for position in found.positions] == ["x", "y", ""]
    probe = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 1, "top_logprobs": 5}
    assert seen[0].path == "/v1/chat/completions" and probe.items() <= seen[0].body.items()
