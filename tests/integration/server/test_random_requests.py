"""Nothing that one client sends costs another client anything: random requests beside plain streams.

Each server runs the fake TensorRT-LLM, whose tokens are known. RANDOM_REQUESTS is how many requests each gets,
RANDOM_SEED another series of them, RANDOM_FORM the only kind of body (`FORMS`). With RANDOM_REQUESTS there are more
versions of TensorRT-LLM.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
from pathlib import Path

import pytest

from djl_trtllm.api.base import RawRequest
from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.model import Tokenizer
from tests.fakes.installation import fake_tensorrt_llm, worker_processes
from tests.support.client import Answer, exchange
from tests.support.dialects import Way, ways
from tests.support.encoders import scripted_encoder
from tests.support.in_process import played_model
from tests.support.models import PROMPT, tensorrt_llm_model, write_adapter
from tests.support.processes import wait_until
from tests.support.random_requests import ADAPTER, FORMS, MOST_TOKENS, POOLED, RandomRequest, random_request
from tests.support.server import Server, serving

STREAMS = 16
AT_ONCE = 96
PLACES = 128
QUEUE = 16 * AT_ONCE
"""Nothing is refused for want of room: a request has 16 sequences at most."""

FORM = os.environ.get("RANDOM_FORM", "")
SEED = int(os.environ.get("RANDOM_SEED", "0"))
_BEAMS = {"max_beam_width": "4"}
CASES = [
    # Each version is the only one between two changes of what a sampler takes (`backends/tensorrt_llm/sampling.py`).
    *(("pytorch", version, {}) for version in ("1.0.0", "1.2.1", "1.4.0rc1")),
    ("tensorrt", "1.2.1", _BEAMS),
    # Log-probabilities come another way, and an engine of the server's own process takes the requests.
    ("tensorrt", "1.2.1", _BEAMS | {"gather_generation_logits": "true"}),
    # Here every request is one of beams.
    ("pytorch", "1.2.0", _BEAMS),
    ("pytorch", "1.3.0", _BEAMS),
]
if "RANDOM_REQUESTS" in os.environ:  # the versions between the other changes
    CASES += [("pytorch", version, {}) for version in ("1.1.0", "1.3.0")]
    CASES += [("tensorrt", version, _BEAMS) for version in ("1.0.0", "1.3.0rc20")]
COUNT = int(os.environ.get("RANDOM_REQUESTS", "200"))
REFUSED = {400, 404, 422, 424}
"""Statuses of the dialects for requests that are wrong."""
MEGABYTES_MORE = 32
"""What a process may hold at the end more than the most that it held in the second third of the requests."""

LOOK_AFTER = 16
"""Requests between two looks at all processes, which stop the clients for a while."""
PATIENT = {"SERVING_KEEP_ALIVE_TIMEOUT": "75"}
"""The default. On a busy machine the clients, a hundred in one process, may take longer between connecting and sending
than the 5 seconds of the tests' servers, which then close the connection."""


PLAIN: list[Way] = [way for way in ways() if way.streams and not way.row.chat]


class Clients:
    """Of one server: some read plain streams, one after another, and the others send random requests."""

    def __init__(self, server: Server, tokenizer: Tokenizer) -> None:
        self._server = server
        self._tokenizer = tokenizer
        self._source = random.Random(SEED)
        self._sending = False
        self.streams = 0
        self.statuses: collections.Counter[int] = collections.Counter()
        """Of random requests that were answered; 0 is a client that left."""
        self.guides_refused = 0
        """Answers to guides that cannot be used, which only the engine process finds."""
        self.wrong: list[str] = []

    async def send(self, count: int) -> tuple[dict[int, int], dict[int, int]]:
        """Random requests, and plain streams until they have ended.

        Returns the most that each process held in the second third, and what it holds at the end, of those that were
        loaded before: one that tries guides is replaced by another one after a guide that takes too long.
        """
        for way in PLAIN:  # what starts with a first request, runs and is loaded before
            await exchange(self._server.port, way.body(PROMPT, {"max_new_tokens": 1}), path=way.url("scripted"))
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1, "temperature": 0}
        for body in (chat, chat | {"guided_regex": "a+"}):  # the processes that render chats and try guides
            await exchange(self._server.port, body, path="/v1/chat/completions")
        self._sending = True
        loaded, before = megabytes(self._server).keys(), dict[int, int]()
        streams = [asyncio.create_task(self._read_streams(number)) for number in range(STREAMS)]
        places = asyncio.Semaphore(AT_ONCE)

        async def one(request: RandomRequest) -> None:
            async with places:
                answer = await exchange(
                    self._server.port,
                    request.body,
                    path=request.path,
                    leave_after=request.leave_after,
                    reset=request.reset,
                )
            done = self.statuses.total()
            if count // 3 <= done <= 2 * count // 3 and done % LOOK_AFTER == 0:
                for pid, held in megabytes(self._server).items():
                    before[pid] = max(held, before.get(pid, 0))
            left = request.leave_after is not None and not answer.complete
            self.statuses[0 if left else answer.status] += 1
            self.guides_refused += b"the guide cannot be used" in answer.body
            if not left and (problem := problem_of(answer)) is not None:
                self._note(problem, answer, request.body)

        await asyncio.gather(*(one(random_request(self._source, FORM)) for _ in range(count)))
        self._sending = False
        after = megabytes(self._server)
        await asyncio.gather(*streams)
        stayed = loaded & after.keys()
        return {pid: before[pid] for pid in stayed}, {pid: after[pid] for pid in stayed}

    async def _read_streams(self, number: int) -> None:
        words = PROMPT.split()
        first = number % len(words)
        prompt = " ".join([*words[first:], *words[:first], *(number // len(words) * ["wolf"])])
        ids = self._tokenizer.encode(prompt)
        expected = self._tokenizer.decode([ids[place % len(ids)] for place in range(MOST_TOKENS)])
        way = PLAIN[number % len(PLAIN)]
        while self._sending:
            body = way.body(prompt, {"max_new_tokens": MOST_TOKENS, "temperature": 0})
            answer = await exchange(self._server.port, body, path=way.url("scripted"))
            self.streams += 1
            if not answer.complete or answer.status != 200 or way.text(answer.body) != expected:
                self._note(f"not the whole stream of {way.name}", answer, prompt)

    def _note(self, problem: str, answer: Answer, sent: object) -> None:
        self.wrong.append(f"{problem}: {answer.status} {answer.body[-400:]!r} to {json.dumps(sent)[:800]}")


def problem_of(answer: Answer) -> str | None:
    """What is wrong with the answer to a random request."""
    if not answer.complete:
        return "it broke off"
    if answer.status != 200:
        return None if 400 <= answer.status < 500 and answer.json["error"] else "the server failed"
    if b'"error' in answer.body.replace(b'"error":null', b""):  # a member of each of OpenAI's responses
        return "the engine failed"
    if "json" in answer.headers["content-type"]:
        return None if answer.lines else "it is empty"
    return None


def megabytes(server: Server) -> dict[int, int]:
    """What each process of a server holds, by its id."""
    return {process.pid: process.memory_info().rss >> 20 for process in [server.process, *server.descendants()]}


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "version", "options"), CASES)
def test_random_requests_cost_no_other_client_anything(
    backend: str, version: str, options: dict[str, str], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    limits = {"max_rolling_batch_size": PLACES, "max_input_len": 400, "max_output_len": MOST_TOKENS, "max_seq_len": 700}
    adapters = {"enable_lora": "true", "lora_target_modules": "attn_q"}
    wanted = {"backend": backend, **limits, **adapters, **options}
    model, environ = tensorrt_llm_model(
        tmp_path / "model", **{f"option.{name}": value for name, value in wanted.items()}, job_queue_size=QUEUE
    )
    write_adapter(model / "adapters" / ADAPTER)
    environ |= PATIENT | fake_tensorrt_llm(tmp_path / "machine", version=version, script={"steps_per_second": 80})
    with serving(model, **environ) as server:
        workers = worker_processes(server.process.pid)
        clients = Clients(server, tokenizer)
        before, after = asyncio.run(clients.send(COUNT))
        print(f"{backend} {version}: {dict(clients.statuses)}, {clients.streams} streams, {before} MB -> {after} MB")
        assert clients.wrong == []
        assert clients.statuses.total() == COUNT
        # Many of each kind, or the requests are not what they should be.
        assert min(clients.statuses[200], sum(clients.statuses[status] for status in REFUSED)) > COUNT / 8
        assert clients.statuses.keys() <= {0, 200, 413, *REFUSED}
        # Of a client that left the answer was not seen.
        assert server.finished("error") <= clients.guides_refused + clients.statuses[0]
        assert server.metric("executor_restarts_total") == 0
        assert worker_processes(server.process.pid) == workers
        assert not server.says("Traceback")
        assert {server.process.pid, *(worker.pid for worker in workers)} <= before.keys()
        assert all(after[pid] < held + MEGABYTES_MORE for pid, held in before.items())
        wait_until(lambda: server.metric("kv_cache_used_blocks") == 0, what="an empty KV cache")
    # `serving` has seen that nothing waits or runs, and that no descriptor or thread is left.


@pytest.mark.parametrize("form", [*FORMS, *POOLED])
def test_each_parameter_is_in_requests_that_are_read_and_in_others_that_are_refused(
    form: str, tokenizer: Tokenizer
) -> None:
    source = random.Random(SEED)
    model = played_model(tokenizer)
    read: set[str] = set()
    refused: set[str] = set()
    for _ in range(4000):
        request = random_request(source, form)
        body = request.body
        given = (
            {*body, *(body["parameters"] if type(body.get("parameters")) is dict else ())} if type(body) is dict else ()
        )
        path = request.path.replace("ensemble", "{model}")
        (dialect,) = (each for each in DIALECTS if path in each.paths)
        try:
            dialect.parse(RawRequest(json.dumps(body).encode(), {}, path, {"model": "ensemble"}), model)
        except InvalidRequestError as error:
            refused |= {name for name in given if f"'{name}'" in str(error)}
        else:
            read |= {*given}
    names = {*(FORMS | POOLED)[form].names}
    assert (names - read, names - refused) == (set(), set())


@pytest.mark.slow
@pytest.mark.parametrize(("labels", "forms"), [(0, ["embeddings", "tei"]), (1, ["rerank", "texts", "score"])])
def test_random_requests_for_vectors_and_scores_are_answered_or_refused(
    labels: int, forms: list[str], tmp_path: Path
) -> None:
    """Some are of a model's other kind. A model with `labels` scores."""
    model = scripted_encoder(tmp_path / "model", labels=labels)
    source = random.Random(SEED)
    statuses: collections.Counter[int] = collections.Counter()
    with serving(model, **PATIENT) as server:

        async def send(form: str) -> None:
            places = asyncio.Semaphore(AT_ONCE)

            async def one(request: RandomRequest) -> None:
                async with places:
                    leaves = request.leave_after is not None
                    answer = await exchange(
                        server.port, request.body, path=request.path, leave_after=0 if leaves else None
                    )
                statuses[0 if leaves else answer.status] += 1
                assert leaves or answer.status == 200 or (400 <= answer.status < 500 and answer.json["error"]), answer

            await asyncio.gather(*(one(random_request(source, form)) for _ in range(COUNT // 2)))

        for form in POOLED:
            asyncio.run(send(form) if form in forms else send_few(server, form))
        held = megabytes(server)
        for form in forms:
            asyncio.run(send(form))
        assert all(after < held[pid] + MEGABYTES_MORE for pid, after in megabytes(server).items())
        assert min(statuses[200], sum(statuses[status] for status in REFUSED)) > statuses.total() / 8
        assert server.metric("executor_restarts_total") == 0
        assert not server.says("Traceback")


async def send_few(server: Server, form: str) -> None:
    """Requests of a kind that the model does not answer."""
    for _ in range(20):
        request = random_request(random.Random(SEED), form)
        answer = await exchange(server.port, request.body, path=request.path)
        assert 400 <= answer.status < 500
