"""The prefix cache of the bundled model, among clients with keys of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server import Server, running

KEYS = [{"name": name, "key": f"{name}-key", "roles": ["infer", "metrics", "manage"]} for name in ("ada", "bob")]
STORY = "Once upon a time there was a little wolf who lived in the dark wood, and he was always hungry. " * 4


class KeyedServer(Server):
    """A server that wants a key."""

    def client(self, name: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {name}-key"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def _client(self) -> httpx.Client:
        return self.client("ada")

    def reused(self, client: str, messages: list[dict[str, str]], **body: Any) -> tuple[float, str]:
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
