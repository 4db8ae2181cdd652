"""Beam search: every request of the PyTorch backend has max_beam_width beams; log-probabilities where there are any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server import Server
from tests.trtllm.conftest import START_SECONDS, Installation, KeptServer, MakeModel, ask, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_SECONDS)]

PROMPT = "once upon a time a little girl went into the dark wood to see her grandmother. there she met a wolf"
BEAMS = 3


@pytest.fixture(scope="module")
def kept(installation: Installation, backend: str, make_model: MakeModel) -> Iterator[KeptServer]:
    options: dict[str, object] = {"max_beam_width": BEAMS, "max_rolling_batch_size": 2 * BEAMS}
    if backend == "tensorrt":
        options["gather_generation_logits"] = "true"
    model = make_model(backend, **options)
    servers = KeptServer(lambda: serving(installation, model))
    yield servers
    servers.close()


@pytest.fixture
def beam_server(kept: KeptServer) -> Server:
    """A server of models with three beams."""
    return kept.get()


def refusal(beam_server: Server, **parameters: Any) -> str:
    refused = ask(beam_server, PROMPT, max_new_tokens=8, **parameters)
    assert refused.status_code == 424, refused.text
    assert ask(beam_server, PROMPT, max_new_tokens=8).status_code == 200  # it goes on
    message: str = refused.json()["error"]
    return message


def beams(beam_server: Server, **parameters: Any) -> dict[str, Any]:
    return beam_server.answer(PROMPT, max_new_tokens=16, num_beams=BEAMS, **parameters)


def test_a_plain_request_is_answered(beam_server: Server, backend: str) -> None:
    """On PyTorch with the best of all beams."""
    answer = beam_server.answer(PROMPT, max_new_tokens=16)
    assert 0 < answer["details"]["generated_tokens"] <= 16
    if backend != "tensorrt":
        assert answer["generated_text"] == beams(beam_server)["generated_text"]


def test_a_plain_stream_is_whole(beam_server: Server) -> None:
    lines = ask(beam_server, PROMPT, stream=True, max_new_tokens=16, details=True).text.splitlines()
    whole = beam_server.answer(PROMPT, max_new_tokens=16)
    assert json.loads(lines[-1])["generated_text"] == whole["generated_text"]
    assert [json.loads(line)["token"]["id"] for line in lines] == [t["id"] for t in whole["details"]["tokens"]]


def test_several_of_the_beams_are_returned(beam_server: Server) -> None:
    details = beams(beam_server, n=2)["details"]
    assert len(details["best_of_sequences"]) == 1


def test_beams_have_details(beam_server: Server, backend: str) -> None:
    """On a compiled engine their log-probabilities would end it."""
    logprobs = [token["log_prob"] for token in beams(beam_server)["details"]["tokens"]]
    if backend == "tensorrt":
        assert logprobs and set(logprobs) == {None}
        plain = beam_server.answer(PROMPT, max_new_tokens=16)["details"]["tokens"]
        assert all(token["log_prob"] <= 0 for token in plain)
    else:
        assert all(logprob is None or logprob <= 0 for logprob in logprobs)


def test_log_probabilities_of_beams_are_refused_where_there_are_none(beam_server: Server, backend: str) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "num_beams": BEAMS, "logprobs": True}
    answer = beam_server.http.post("/invocations", json=chat)
    if backend == "tensorrt":
        assert answer.status_code == 424
        assert (
            "'logprobs' with 'num_beams' ('beam_width'): this engine has no log-probabilities of beams" in answer.text
        )
    else:
        assert answer.status_code == 200, answer.text
    assert ask(beam_server, PROMPT, max_new_tokens=8).status_code == 200


def test_other_numbers_of_beams_are_refused_on_pytorch(beam_server: Server, backend: str) -> None:
    if backend == "tensorrt":
        assert ask(beam_server, PROMPT, max_new_tokens=8, num_beams=2).status_code == 200
        return
    told = f"this engine runs every request with {BEAMS} beams (option.max_beam_width): "
    assert refusal(beam_server, num_beams=2) == f"{told}'num_beams' ('beam_width') is 2, expected 3, or none"
    assert refusal(beam_server, do_sample=True).startswith(f"{told}beams are not sampled")
    assert refusal(beam_server, n=5).startswith(f"{told}'n' or 'best_of' is 5, expected at most 3")


def test_what_the_runtime_checks_is_refused_before(beam_server: Server) -> None:
    assert "'length_penalty' is -0.5: expected a number from 0 to 10" in refusal(
        beam_server, num_beams=BEAMS, length_penalty=-0.5
    )
    assert "'top_p' is 0" in refusal(beam_server, do_sample=True, top_p=0)
    assert refusal(beam_server, num_beams=BEAMS, guided_regex="a+").startswith("a guide with beams")
