"""Servers that speculate answer as one that does not, and say how many tokens drafts proposed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.test_load import kill_under, requests
from tests.support.client import Answer, lmi, raw_post, read_until
from tests.support.processes import wait_until
from tests.support.reference import SHORT
from tests.support.server import Server, serving

WAYS = {
    "prompt lookup": {"OPTION_SPECULATIVE_CONFIG": '{"method": "ngram", "num_speculative_tokens": 3}'},
    "draft model": {"OPTION_SPECULATIVE_DRAFT_MODEL": "engine", "OPTION_SPECULATIVE_LENGTH": "3"},
}


@pytest.fixture(scope="module", params=["prompt lookup", pytest.param("draft model", marks=pytest.mark.slow)])
def speculating(request: pytest.FixtureRequest, model: Path, scratch: Path) -> Iterator[Server]:
    # The checkpoint is as large as its engine.
    with serving(model, scratch, OPTION_MAX_ROLLING_BATCH_SIZE="16", **WAYS[request.param]) as started:
        yield started


def said(answer: Answer) -> tuple[int, list[int], str, dict[str, Any]]:
    """All that a response says, but for figures of drafts and the last digits of log-probabilities."""
    found = answer.json
    details = found["details"]
    tokens = details.pop("tokens")
    accepted = details.pop("accepted_tokens", None)
    details.pop("drafted_tokens", None)
    assert accepted is None or 0 <= accepted < len(tokens)
    assert all(token["log_prob"] is not None for token in tokens)
    return answer.status, [token["id"] for token in tokens], found["generated_text"], details


def test_answers_are_those_without_speculation_alone_and_together(server: Server, speculating: Server) -> None:
    asked = [
        lmi(text, max_new_tokens=40, details=True, stop_sequences=stop)
        for text in SHORT[:8]
        for stop in ([" the", "zzz"], ["er "])
    ]
    expected = [said(answer) for answer in server.together(asked)]
    assert {details["finish_reason"] for *_, details in expected} >= {"stop_sequence"}
    assert [said(answer) for answer in speculating.together(asked)] == expected
    assert [said(answer) for answer in speculating.together(asked[:4], at_once=1)] == expected[:4]


def test_what_drafts_proposed_is_in_the_usage_the_log_and_the_metrics(speculating: Server) -> None:
    before = speculating.metric("accepted_draft_tokens_total")
    text = "Tom and Sue saw a dog. Tom and Sue saw a cat. Tom and Sue saw a"
    body = {"prompt": text, "max_tokens": 30, "temperature": 0, "n": 2, "stop": ["zzz"]}
    answer = httpx.post(f"http://127.0.0.1:{speculating.port}/v1/completions", json=body, timeout=60).json()
    accepted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert len({choice["text"] for choice in answer["choices"]}) == 1
    assert 0 < accepted < answer["usage"]["completion_tokens"]
    assert speculating.metric("accepted_draft_tokens_total") == before + accepted
    page = httpx.get(f"http://127.0.0.1:{speculating.port}/metrics").text
    for name in ("trtllm_spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"):
        assert re.search(rf"^{name}{{.*}} {before + accepted:.1f}$", page, re.MULTILINE)
    # OpenVINO does not say what was proposed.
    assert "num_draft_tokens" not in page
    wait_until(lambda: speculating.says(f"accepted_tokens={accepted} "))


def test_a_client_that_leaves_ends_its_sequence_and_no_other(server: Server, speculating: Server) -> None:
    with speculating.connect() as leaving:
        endless = lmi(SHORT[0], stream=True, max_new_tokens=400, ignore_eos=True)
        leaving.sendall(raw_post(json.dumps(endless).encode()))
        read_until(leaving, b'"token"')
    asked = [lmi(text, max_new_tokens=60, details=True) for text in SHORT[:6]]
    assert [said(each) for each in speculating.together(asked)] == [said(each) for each in server.together(asked)]
    wait_until(lambda: speculating.metric("running") == 0)


def test_streams_go_on_in_another_engine_process_with_the_same_tokens(speculating: Server) -> None:
    asked = requests("openvino", 8)
    quiet = speculating.together(asked)
    answers = asyncio.run(kill_under(speculating, asked, 1))
    for before, after in zip(quiet, answers, strict=True):
        assert (after.status, after.complete, after.token_ids) == (200, True, before.token_ids)
