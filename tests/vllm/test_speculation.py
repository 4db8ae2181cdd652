"""vLLM with prompt lookup or a draft model answers as vLLM alone, and says what its drafts have proposed.

`python -m benchmarks.speculation equal --backend vllm` compares 200 outputs.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Answer, lmi
from tests.support.models import PROMPT, TINY_STORIES, link_checkpoint
from tests.support.processes import wait_until
from tests.support.reference import SHORT, check_that_a_client_may_leave, said
from tests.support.server import Server, running
from tests.vllm.conftest import ON_CPU, START_SECONDS
from tests.vllm.test_serving import STREAMS, kill_under

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ENVIRON = {
    "OPTION_BACKEND": "vllm",
    "OPTION_DTYPE": "fp32",
    "OPTION_ENFORCE_EAGER": "true",
    "OPTION_MAX_MODEL_LEN": "2560",
    "OPTION_MAX_ROLLING_BATCH_SIZE": "32",
    "OPTION_EXECUTOR_HANG_TIMEOUT": "300",
    "OPTION_MODEL_LOADING_TIMEOUT": str(START_SECONDS),
}
WAYS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_max": 3},
    "draft_model": {"model": str(TINY_STORIES)},
}
"""The draft is the model itself."""


@pytest.fixture(scope="module", params=list(WAYS))
def speculating(
    server: Server, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    way = {"method": request.param, "num_speculative_tokens": 3, **WAYS[request.param]}
    environ = ENVIRON | ON_CPU | {"OPTION_SPECULATIVE_CONFIG": json.dumps(way)}
    scratch: Path = tmp_path_factory.mktemp("scratch")
    with running(Server(link_checkpoint(scratch / "story"), environ, scratch), START_SECONDS) as started:
        yield started


def logprobs(answer: Answer) -> list[float]:
    return [token["log_prob"] for token in answer.json["details"]["tokens"]]


def test_answers_are_those_without_speculation_alone_and_together(server: Server, speculating: Server) -> None:
    asked = [
        lmi(text, max_new_tokens=40, details=True, stop_sequences=stop)
        for text in SHORT[:8]
        for stop in ([" the", "zzz"], ["er "])
    ]
    plain = server.together(asked)
    expected, scores = [said(answer) for answer in plain], [logprobs(answer) for answer in plain]
    assert {details["finish_reason"] for *_, details in expected} >= {"stop_sequence"}
    for count, at_once in ((16, 16), (4, 1)):
        answers = speculating.together(asked[:count], at_once=at_once)
        assert [said(answer) for answer in answers] == expected[:count]
        for answer, score in zip(answers, scores, strict=False):
            assert logprobs(answer) == pytest.approx(score, abs=1e-3)


def test_what_drafts_proposed_is_in_the_usage_the_log_and_the_metrics(speculating: Server) -> None:
    # vLLM counts the iteration, too, in which it ran on behind a stop string of the test before.
    wait_until(speculating.idle, what="an idle server")
    accepted_before = speculating.metric("accepted_draft_tokens_total")
    drafted_before = speculating.metric("draft_tokens_total")
    text = "Tom and Sue saw a dog. Tom and Sue saw a cat. Tom and Sue saw a"
    body: dict[str, Any] = {"prompt": text, "max_tokens": 30, "temperature": 0, "n": 2, "stop": ["zzz"]}
    answer = speculating.http.post("/v1/completions", json=body).json()
    accepted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert len({choice["text"] for choice in answer["choices"]}) == 1
    assert 0 < accepted < answer["usage"]["completion_tokens"]
    rejected = answer["usage"]["completion_tokens_details"]["rejected_prediction_tokens"]
    assert speculating.metric("accepted_draft_tokens_total") == accepted_before + accepted
    drafted = accepted + rejected
    wait_until(lambda: speculating.metric("draft_tokens_total") == drafted_before + drafted, what="drafted tokens")
    page = speculating.http.get("/metrics").text
    for name in ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"):
        assert re.search(rf"^{name}{{.*}} [1-9]", page, re.MULTILINE)
    wait_until(lambda: speculating.says(f"accepted_tokens={accepted} drafted_tokens={drafted} "))


def test_a_sampled_request_is_answered_or_refused_by_name_and_ends_no_engine(speculating: Server) -> None:
    restarts = speculating.metric("executor_restarts_total")
    text = "Tom and Sue saw a dog. Tom and Sue saw a cat. Tom and Sue saw a"
    answer = speculating.post(text, max_new_tokens=30, do_sample=True, top_k=5, temperature=0.1, seed=1)
    assert answer.status_code == 200 or "do_sample" in answer.text
    assert speculating.metric("executor_restarts_total") == restarts


def test_a_client_that_leaves_ends_its_sequence_and_no_other(server: Server, speculating: Server) -> None:
    check_that_a_client_may_leave(speculating, server)


def test_streams_go_on_in_another_engine_process_with_the_same_tokens(speculating: Server) -> None:
    asked = [
        lmi(f"{number} {PROMPT}", stream=True, max_new_tokens=48, details=True, ignore_eos=True)
        for number in range(STREAMS)
    ]
    quiet = speculating.together(asked)
    answers = asyncio.run(kill_under(speculating, asked, 8 * STREAMS))
    for before, after in zip(quiet, answers, strict=True):
        assert (after.status, after.complete, after.token_ids) == (200, True, before.token_ids)
