"""The prefix cache of the bundled model, among clients with keys of their own; and log-probabilities of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import scripted_model
from tests.support.processes import PATIENCE
from tests.support.server import Server, running, serving
from tests.support.vision import data_url, encoded, image_part, picture, seeing_model_on_tensorrt_llm

pytestmark = pytest.mark.slow

KEYS = [{"name": name, "key": f"{name}-key", "roles": ["infer", "metrics", "manage"]} for name in ("ada", "bob")]
STORY = "Once upon a time there was a little wolf who lived in the dark wood, and he was always hungry. " * 4


class KeyedServer(Server):
    """A server that wants a key."""

    def client(self, name: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {name}-key"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, trust_env=False)

    def _client(self) -> httpx.Client:
        return self.client("ada")

    def reused(self, client: str, messages: list[dict[str, Any]], **body: Any) -> tuple[float, str]:
        """How many tokens of a chat's prompt came from the cache, and its answer."""
        before = self.metric("reused_prompt_tokens_total")
        with self.client(client) as http:
            body |= {"messages": messages, "temperature": 0, "max_tokens": 40}
            reply = http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        reused = self.metric("reused_prompt_tokens_total") - before
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == reused
        return reused, reply.json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def server(tiny_stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(json.dumps(KEYS))  # which is YAML too
    server = KeyedServer(tiny_stories, {"SERVING_API_KEYS_FILE": str(keys)})
    with running(server):
        yield server


def test_a_prompt_is_reused_by_its_key_and_its_group_only(server: KeyedServer) -> None:
    messages = [{"role": "user", "content": STORY}]
    first, answer = server.reused("ada", messages)
    again, _ = server.reused("ada", messages)
    assert first == 0 < again
    assert server.reused("bob", messages) == (0, answer)
    assert server.reused("bob", messages) == (again, answer)
    # A group is none of the keys, whatever it is called.
    assert server.reused("bob", messages, cache_salt="key ada") == (0, answer)
    assert server.reused("ada", messages, cache_salt="key ada") == (again, answer)


def test_the_second_turn_of_a_chat_begins_with_the_cache_of_the_first(server: KeyedServer) -> None:
    messages = [{"role": "user", "content": f"A pig and a bear. {STORY}"}]
    first, answer = server.reused("ada", messages)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    second, _ = server.reused("ada", messages)
    assert first == 0
    assert second > 100


def test_a_penalised_prompt_is_served_and_is_no_hit_of_another_key(server: KeyedServer) -> None:
    messages = [{"role": "user", "content": f"A cat. {STORY}"}]
    first, answer = server.reused("ada", messages, repetition_penalty=1.2)
    again, same = server.reused("ada", messages, repetition_penalty=1.2)
    assert first == 0 < again and same == answer
    assert server.reused("bob", messages, repetition_penalty=1.2) == (0, answer)


# -- log-probabilities of prompts, as lm-eval asks for them, from servers whose engine may be lost meanwhile ----------


PROMPTS = ["the little red riding hood", [7, 8, 9]]
MORTAL, DOOMED = 6, 7
"""Numbers of tokens: of requests whose engine process dies at their third token, and whenever they begin."""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    faults = [
        {"action": "die", "at_token": 2, "max_new_tokens": MORTAL},
        {"action": "die", "at_token": 0, "max_new_tokens": DOOMED},
    ]
    options = {"option.max_input_len": 40_000, "option.max_seq_len": 50_000}
    with serving(scripted_model(tmp_path_factory.mktemp("lost") / "model", {"faults": faults}, **options)) as server:
        yield server


def choices(server: Server, **body: Any) -> list[dict[str, Any]]:
    reply = server.http.post("/v1/completions", json={"prompt": PROMPTS, "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["choices"]
    return found


def test_echo_has_the_prompts_tokens_and_then_those_of_the_output(scripted: Server) -> None:
    plain = choices(scripted, max_tokens=4)
    first, second = choices(scripted, max_tokens=4, echo=True, logprobs=0)
    assert first["text"] == PROMPTS[0] + plain[0]["text"]
    logprobs = second["logprobs"]
    assert {len(values) for values in logprobs.values()} == {3 + 4}
    assert logprobs["token_logprobs"] == [None, *[-0.5] * 6]
    starts = [first["text"].find(token, at) for token, at in zip(*tokens_of(first), strict=True)]
    assert starts == first["logprobs"]["text_offset"][1:]  # the first token has no text


def tokens_of(choice: dict[str, Any]) -> tuple[list[str], list[int]]:
    logprobs = choice["logprobs"]
    return logprobs["tokens"][1:], logprobs["text_offset"][1:]


def test_without_tokens_there_is_the_prompt_alone(scripted: Server) -> None:
    for choice, prompt in zip(choices(scripted, max_tokens=0, echo=True, logprobs=1), PROMPTS, strict=True):
        assert choice["finish_reason"] == "length"
        assert choice["text"] == prompt or isinstance(prompt, list)
        assert choice["logprobs"]["token_logprobs"][0] is None
    reply = scripted.http.post("/v1/completions", json={"prompt": PROMPTS[1], "max_tokens": 0, "prompt_logprobs": 0})
    assert [len(score or ()) for score in reply.json()["choices"][0]["prompt_logprobs"]] == [0, 1, 1]
    assert reply.json()["usage"]["completion_tokens"] == 0


def test_chat_has_those_of_its_prompt_beside_the_choices(scripted: Server) -> None:
    messages = [{"role": "user", "content": "a wolf"}]
    body = {"messages": messages, "n": 2, "prompt_logprobs": 0}
    reply = scripted.http.post("/v1/chat/completions", json=body).json()
    first, *others = reply["prompt_logprobs"]
    assert first is None
    assert len(others) == reply["usage"]["prompt_tokens"] - 1
    assert all(entry["logprob"] == -0.5 for score in others for entry in score.values())


def test_a_lost_engine_process_changes_nothing(scripted: Server) -> None:
    expected = choices(scripted, max_tokens=5, echo=True, logprobs=0)[1]["logprobs"]["token_logprobs"]
    body = {"prompt": PROMPTS[1], "temperature": 0, "echo": True, "logprobs": 0, "cache_salt": "a"}
    body["logit_bias"] = {"1": 1}
    lost = scripted.http.post("/v1/completions", json=body | {"max_tokens": MORTAL})
    (choice,) = lost.json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [*expected, -0.5]
    assert scripted.http.post("/v1/completions", json=body | {"max_tokens": DOOMED}).status_code >= 500
    scripted.wait_for_ping()


def test_more_log_probabilities_than_are_made_are_refused(scripted: Server) -> None:
    body = {"prompt": [7] * 20_000, "max_tokens": 1, "echo": True, "logprobs": 1}
    refused = scripted.http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "'prompt_logprobs'" in refused.json()["error"]["message"]
    assert scripted.http.post("/v1/completions", json=body | {"logprobs": 0}).status_code == 200


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0rc1"])
def test_prompts_on_tensorrt_llm_are_reused_with_the_same_images_and_the_same_key_only(
    tmp_path: Path, version: str
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps(KEYS))
    options = {"option.tokens_per_block": 8}
    model, environ = seeing_model_on_tensorrt_llm(tmp_path / "model", version=version, **options)
    parts = [image_part(data_url(encoded(picture(84, 56, colour)))) for colour in (1, 2)]
    text = {"type": "text", "text": "the wolf"}
    messages = [{"role": "user", "content": [*parts, text]}]
    with running(KeyedServer(model, {**environ, "SERVING_API_KEYS_FILE": str(keys)})) as server:
        assert isinstance(server, KeyedServer)
        assert server.reused("ada", messages)[0] == 0 < server.reused("ada", messages)[0]
        assert server.reused("bob", messages)[0] == 0
        assert server.reused("ada", [{"role": "user", "content": [*reversed(parts), text]}])[0] == 0
