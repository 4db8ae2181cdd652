"""Log-probabilities of prompts, as lm-eval asks for them, from servers whose engine may be lost meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.server.conftest import Start
from tests.support.server import Server

PROMPTS = ["the little red riding hood", [7, 8, 9]]


def choices(server: Server, **body: Any) -> list[dict[str, Any]]:
    reply = server.http.post("/v1/completions", json={"prompt": PROMPTS, "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["choices"]
    return found


def test_echo_has_the_prompts_tokens_and_then_those_of_the_output(start: Start) -> None:
    server = start()
    plain = choices(server, max_tokens=4)
    first, second = choices(server, max_tokens=4, echo=True, logprobs=0)
    assert first["text"] == PROMPTS[0] + plain[0]["text"]
    logprobs = second["logprobs"]
    assert {len(values) for values in logprobs.values()} == {3 + 4}
    assert logprobs["token_logprobs"] == [None, *[-0.5] * 6]
    starts = [first["text"].find(token, at) for token, at in zip(*tokens_of(first), strict=True)]
    assert starts == first["logprobs"]["text_offset"][1:]  # the first token has no text


def tokens_of(choice: dict[str, Any]) -> tuple[list[str], list[int]]:
    logprobs = choice["logprobs"]
    return logprobs["tokens"][1:], logprobs["text_offset"][1:]


def test_without_tokens_there_is_the_prompt_alone(start: Start) -> None:
    server = start()
    for choice, prompt in zip(choices(server, max_tokens=0, echo=True, logprobs=1), PROMPTS, strict=True):
        assert choice["finish_reason"] == "length"
        assert choice["text"] == prompt or isinstance(prompt, list)
        assert choice["logprobs"]["token_logprobs"][0] is None
    reply = server.http.post("/v1/completions", json={"prompt": PROMPTS[1], "max_tokens": 0, "prompt_logprobs": 0})
    assert [len(score or ()) for score in reply.json()["choices"][0]["prompt_logprobs"]] == [0, 1, 1]
    assert reply.json()["usage"]["completion_tokens"] == 0


def test_chat_has_those_of_its_prompt_beside_the_choices(start: Start) -> None:
    messages = [{"role": "user", "content": "a wolf"}]
    reply = start().http.post("/v1/chat/completions", json={"messages": messages, "n": 2, "prompt_logprobs": 0}).json()
    first, *others = reply["prompt_logprobs"]
    assert first is None
    assert len(others) == reply["usage"]["prompt_tokens"] - 1
    assert all(entry["logprob"] == -0.5 for score in others for entry in score.values())


@pytest.mark.parametrize("position", [0, 2])
def test_a_lost_engine_process_changes_nothing(start: Start, position: int) -> None:
    server = start({"faults": [{"action": "die", "at_token": position, "max_new_tokens": 6}]})
    expected = choices(server, max_tokens=5, echo=True, logprobs=0)
    server.note_rest()
    lost = server.http.post(
        "/v1/completions",
        json={
            "prompt": PROMPTS[1],
            "max_tokens": 6,
            "temperature": 0,
            "echo": True,
            "logprobs": 0,
            "cache_salt": "a",
            "logit_bias": {"1": 1},
        },
    )
    if position == 0:  # it dies each time that the request begins
        assert lost.status_code >= 500
        return
    (choice,) = lost.json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [*expected[1]["logprobs"]["token_logprobs"], -0.5]


def test_more_log_probabilities_than_are_made_are_refused(start: Start) -> None:
    server = start(**{"option.max_input_len": 40_000, "option.max_seq_len": 50_000})
    body = {"prompt": [7] * 20_000, "max_tokens": 1, "echo": True, "logprobs": 1}
    refused = server.http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "'prompt_logprobs'" in refused.json()["error"]["message"]
    assert server.http.post("/v1/completions", json=body | {"logprobs": 0}).status_code == 200
