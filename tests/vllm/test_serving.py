"""vLLM behind every dialect, its engine process killed under streams, and requests of any kind."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from typing import Any

import pytest

from djl_trtllm.model import Tokenizer
from tests.support import reference as golden
from tests.support.client import Answer, exchange, lmi
from tests.support.dialects import Way, ways
from tests.support.models import PROMPT
from tests.support.processes import wait_until
from tests.support.random_requests import ADAPTER, random_request
from tests.support.reference import SIXTEEN
from tests.support.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 12, "temperature": 0},
    "penalised": {"max_new_tokens": 12, "temperature": 0, "repetition_penalty": 2.0, "frequency_penalty": 1.5},
    "sampled": {"max_new_tokens": 12, "temperature": 2.0, "top_k": 200, "top_p": 0.96875, "seed": 11},
}
STREAMS = 32
COUNT = int(os.environ.get("RANDOM_REQUESTS", "1000"))


@pytest.fixture(scope="module")
def expected(server: Server, tokenizer: Tokenizer) -> dict[tuple[str, bool], str]:
    """What LMI's schema answers, by sampling and whether it is a chat's."""
    chat = tokenizer.render_chat([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    begin = tokenizer.decode([1], skip_special_tokens=False)
    prompts = ((False, PROMPT), (True, chat.removeprefix(begin)))
    return {
        (name, is_chat): server.answer(prompt, **sampling)["generated_text"]
        for name, sampling in SAMPLING.items()
        for is_chat, prompt in prompts
    }


@pytest.mark.parametrize("way", ways(), ids=lambda way: way.name)
def test_each_dialect_answers_alike(server: Server, expected: dict[tuple[str, bool], str], way: Way) -> None:
    for name, sampling in SAMPLING.items():
        answer = asyncio.run(exchange(server.port, way.body(PROMPT, sampling), path=way.url("story")))
        assert answer.status == 200, answer.body
        assert way.text(answer.body) == expected[name, way.row.chat], name


def test_greedy_among_sixteen_is_what_transformers_says(server: Server, tiny_stories: Any) -> None:
    tokens = golden.tokens_for(tiny_stories)[golden.GREEDY]
    answers = server.together([lmi(each, stream=True, max_new_tokens=golden.NEW_TOKENS) for each in SIXTEEN])
    for prompt, ids, answer in zip(SIXTEEN, tokens, answers, strict=True):
        assert answer.token_ids == ids, prompt


def test_an_engine_killed_under_greedy_streams_is_a_pause(server: Server) -> None:
    asked = [
        lmi(f"{number} {PROMPT}", stream=True, max_new_tokens=48, details=True, ignore_eos=True)
        for number in range(STREAMS)
    ]
    quiet = server.together(asked)
    restarts, failed = server.metric("executor_restarts_total"), server.finished("error")
    answers = asyncio.run(kill_under(server, asked, 8 * STREAMS))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in quiet]
    assert all(answer.complete and answer.status == 200 for answer in answers)
    assert server.metric("executor_restarts_total") == restarts + 1
    assert server.finished("error") == failed and server.metric("resumed_total") >= STREAMS


async def kill_under(server: Server, asked: list[dict[str, Any]], tokens: int) -> list[Answer]:
    begun = server.metric("generated_tokens_total")
    answers = asyncio.gather(*(exchange(server.port, request) for request in asked))

    def kill() -> None:
        wait_until(lambda: server.metric("generated_tokens_total") >= begun + tokens, what="tokens")
        # Chats are rendered in another process of the server.
        (host,) = (each for each in server.hosts() if "djl_trtllm.executor.process" in each.cmdline())
        host.kill()

    await asyncio.to_thread(kill)
    return await answers


def test_bad_words_are_not_generated(server: Server) -> None:
    def words(**given: Any) -> list[str]:
        answer = server.answer(PROMPT, max_new_tokens=24, details=True, **given)
        return [token["text"] for token in answer["details"]["tokens"]]

    # One token, and no part of a word: vLLM forbids the tokens of a word, and its letters may be those of others.
    plain = words()
    word = next(
        text.strip()
        for text, following in itertools.pairwise(plain)
        if len(text.strip()) > 2 and text.strip().isalpha() and not following[:1].isalpha()
    )
    assert word not in [text.strip() for text in words(bad_words=[word])]


@pytest.mark.parametrize(
    ("guide", "texts"),
    [({"guided_regex": "(yes|no)"}, ("yes", "no")), ({"guided_choice": ["wolf", "fox"]}, ("wolf", "fox"))],
    ids=["regex", "choice"],
)
def test_a_guide_holds_the_output(server: Server, guide: dict[str, Any], texts: tuple[str, ...]) -> None:
    assert server.answer(PROMPT, max_new_tokens=16, **guide)["generated_text"] in texts


def test_beams_are_refused_by_name(server: Server) -> None:
    answer = server.post(PROMPT, max_new_tokens=4, num_beams=2)
    assert answer.status_code == 424 and "num_beams" in answer.text


def test_an_adapter_is_registered_used_and_unregistered(server: Server) -> None:
    plain = server.token_ids(PROMPT, max_new_tokens=8, details=True)
    given = {"name": "again", "src": ADAPTER}
    assert server.http.post("/adapters", params=given).status_code == 200
    answer = server.post(PROMPT, max_new_tokens=8, details=True, adapters="again").json()
    assert [token["id"] for token in answer["details"]["tokens"]] == plain, "its weights are zeros"
    assert server.http.delete("/adapters/again").status_code == 200
    assert server.post(PROMPT, max_new_tokens=8, adapters="again").status_code >= 400


def test_random_requests_break_nothing(server: Server) -> None:
    source, before = random.Random(os.environ.get("RANDOM_SEED", "0")), server.metric("executor_restarts_total")
    wrong: list[str] = []

    async def send() -> None:
        places = asyncio.Semaphore(64)

        async def one() -> None:
            async with places:
                asked = random_request(source)
                answer = await exchange(
                    server.port, asked.body, path=asked.path, leave_after=asked.leave_after, reset=asked.reset
                )
            if asked.leave_after is None and (not answer.complete or answer.status >= 500):
                wrong.append(f"{answer.status} {answer.body[-300:]!r} to {str(asked.body)[:500]}")

        await asyncio.gather(*(one() for _ in range(COUNT)))

    asyncio.run(send())
    assert wrong == []
    assert server.metric("executor_restarts_total") == before
    wait_until(server.idle, what="an idle server")
