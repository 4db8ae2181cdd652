"""Output of both backends through HTTP, and its end when the client leaves."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.model import Tokenizer
from tests.support.client import lmi, raw_post, read_until
from tests.support.processes import wait_until
from tests.support.server import Server
from tests.trtllm.conftest import START_SECONDS, Installation, ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_SECONDS)]

PROMPT = "once upon a time a little girl went into the dark wood to see her grandmother. there she met a wolf"
ROUNDING = 0.25
"""How far below the best logit of float32 a token may lie that float16 has chosen."""


def greedy(server: Server, prompt: str = PROMPT, tokens: int = 32, **parameters: Any) -> dict[str, Any]:
    """The answer with details."""
    answer = ask(server, prompt, max_new_tokens=tokens, details=True, **parameters)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def ids_of(answer: dict[str, Any]) -> list[int]:
    return [token["id"] for token in answer["details"]["tokens"]]


def test_the_ids_are_of_the_vocabulary_and_the_text_is_theirs(server: Server, tokenizer: Tokenizer) -> None:
    answer = greedy(server)
    ids = ids_of(answer)
    assert answer["details"]["generated_tokens"] == len(ids) <= 32
    assert all(0 <= token_id < 2048 for token_id in ids)
    assert "".join(token["text"] for token in answer["details"]["tokens"]) == answer["generated_text"]
    assert len(answer["generated_text"].split()) > 5


def test_greedy_is_the_same_each_time_and_streamed(server: Server) -> None:
    whole = greedy(server)
    assert ids_of(greedy(server)) == ids_of(whole)
    lines = ask(server, PROMPT, stream=True, max_new_tokens=32, details=True).text.splitlines()
    assert [json.loads(line)["token"]["id"] for line in lines] == ids_of(whole)
    assert json.loads(lines[-1])["generated_text"] == whole["generated_text"]


def test_greedy_is_what_transformers_says(installation: Installation, server: Server, tiny_stories: Path) -> None:
    """Each token is the best one for float32, or as good up to rounding."""
    if installation.is_fake:
        pytest.skip("the fake repeats the prompt")
    from tests.support.reference import Reference

    reference = Reference(tiny_stories)
    ids = ids_of(greedy(server))
    logits = reference.logits((reference.ids(PROMPT) + ids)[:-1], last=len(ids))
    behind = [float(row.max() - row[token_id]) for row, token_id in zip(logits, ids, strict=True)]
    assert max(behind) < ROUNDING, behind


def test_the_end_token_is_reported_once_and_is_last(installation: Installation, server: Server) -> None:
    """Both backends' results are the same, whether the end token is in TensorRT-LLM's token_ids or not."""
    if installation.is_fake:
        pytest.skip("the fake ends where a test says, in tests/executor")
    answer = greedy(server, tokens=1000)
    if answer["details"]["finish_reason"] == "length":
        pytest.skip("the story did not end within 1000 tokens")
    assert answer["details"]["finish_reason"] == "eos_token"
    assert ids_of(answer).count(2) == 1 and ids_of(answer)[-1] == 2


def test_log_probabilities_come_where_the_backend_has_them(server: Server, backend: str) -> None:
    tokens = greedy(server)["details"]["tokens"]
    if backend == "tensorrt":  # without option.gather_generation_logits
        assert all(token["log_prob"] is None for token in tokens)
    else:
        assert all(token["log_prob"] <= 0 for token in tokens)


def test_a_stop_string_ends_the_text_before_it(server: Server) -> None:
    full = greedy(server)["generated_text"]
    word = full.split()[4]
    answer = greedy(server, stop=[word])
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert answer["generated_text"] == full[: full.index(word)]


def test_a_sampled_answer_has_details(server: Server) -> None:
    """On PyTorch of 1.2 a sampled token need not be among those whose log-probabilities come."""
    for _ in range(4):
        tokens = greedy(server, do_sample=True, temperature=1.5)["details"]["tokens"]
        assert all(token["log_prob"] is None or token["log_prob"] <= 0 for token in tokens)
    assert len(greedy(server)["details"]["tokens"]) > 0


def test_more_requests_than_places_are_all_answered(server: Server) -> None:
    alone = ids_of(greedy(server, tokens=24))
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: ids_of(greedy(server, tokens=24)), range(6)))
    assert all(len(ids) == len(alone) for ids in answers)
    assert server.metric("running") == server.metric("waiting") == 0


LONG = 1000


@pytest.fixture(autouse=True)
def _places_are_free_again(server: Server) -> Iterator[None]:
    yield
    wait_until(lambda: server.metric("running") == server.metric("waiting") == 0, what="all places free")
    assert ask(server, "the wolf", max_new_tokens=4).status_code == 200
    assert server.ping() == 200


def send(server: Server, tokens: int = LONG, *, stream: bool = True) -> socket.socket:
    """A request on a connection of its own."""
    connection = server.connect()
    parameters = {"max_new_tokens": tokens, "ignore_eos_token": True}
    connection.sendall(raw_post(json.dumps(lmi("once upon a time", stream=stream, **parameters)).encode()))
    return connection


def cancelled(server: Server) -> float:
    return server.finished("cancelled")


def leave(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


@pytest.mark.parametrize("lines", [1, 2, 50])
def test_in_the_first_and_in_a_middle_token(server: Server, lines: int) -> None:
    """Streams carry log-probabilities: aborting one can crash the engine backend (TensorRT-LLM #10810)."""
    before = cancelled(server)
    connection = send(server)
    for _ in range(lines):
        read_until(connection, b'{"token"')
    leave(connection)
    wait_until(lambda: cancelled(server) == before + 1, what="the request is cancelled")


def test_as_soon_as_it_is_sent(server: Server) -> None:
    """The request is in the queue, in the context phase, or not read yet."""
    for _ in range(5):
        leave(send(server))


def test_in_the_queue(server: Server) -> None:
    running = [send(server), send(server)]
    for connection in running:
        read_until(connection, b'{"token"')
    before = cancelled(server)
    queued = send(server)
    wait_until(lambda: server.metric("waiting") == 1, what="it waits")
    leave(queued)
    wait_until(lambda: cancelled(server) == before + 1, what="the request is cancelled")
    for connection in running:
        read_until(connection, b"generated_text")
        connection.close()


def test_after_the_end(server: Server) -> None:
    before = cancelled(server)
    connection = send(server, tokens=3)
    read_until(connection, b"generated_text")
    leave(connection)
    wait_until(lambda: server.metric("running") == 0, what="nothing runs")
    assert cancelled(server) == before


def test_a_whole_answer(server: Server) -> None:
    before = cancelled(server)
    connection = send(server, stream=False)
    wait_until(lambda: server.metric("running") == 1, what="it runs")
    leave(connection)
    wait_until(lambda: cancelled(server) == before + 1, what="the request is cancelled")


def test_others_go_on(server: Server) -> None:
    leaving, staying = send(server), send(server, tokens=400)
    read_until(leaving, b'{"token"')
    leave(leaving)
    read_until(staying, b"generated_text")
    staying.close()


def test_many_at_once(server: Server) -> None:
    connections = [send(server) for _ in range(16)]
    read_until(connections[0], b'{"token"')
    for connection in connections:
        leave(connection)
