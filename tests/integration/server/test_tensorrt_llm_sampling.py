"""What the PyTorch backends of TensorRT-LLM's versions want of requests with beams and seeds, on the fake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.installation import fake_tensorrt_llm
from tests.support.in_process import PROMPT
from tests.support.models import tensorrt_llm_model
from tests.support.server import Server, serving

pytestmark = pytest.mark.slow


def details(server: Server, **parameters: object) -> list[float | None]:
    tokens = server.answer(PROMPT, max_new_tokens=4, **parameters)["details"]["tokens"]
    return [token["log_prob"] for token in tokens]


@pytest.mark.parametrize("version", ["1.1.0", "1.2.0", "1.3.0", "1.4.0rc0"])
def test_beams(tmp_path: Path, version: str) -> None:
    """Another number of beams ends the engine's loop up to 1.2.0, and `logprobs` other than 0 is refused by 1.3."""
    model, _ = tensorrt_llm_model(tmp_path / "model", **{"option.max_beam_width": 2})
    with serving(model, **fake_tensorrt_llm(tmp_path / "fake", version=version)) as server:
        plain = server.answer(PROMPT, max_new_tokens=4)
        beams = server.answer(PROMPT, max_new_tokens=4, num_beams=2)
        assert plain["generated_text"] == beams["generated_text"]
        assert details(server) == details(server, num_beams=2) == 4 * [-0.5]
        stream = server.post(PROMPT, stream=True, max_new_tokens=4).text.splitlines()
        assert json.loads(stream[-1])["generated_text"] == plain["generated_text"]
        for refused in ({"do_sample": True}, {"num_beams": 3}, {"n": 3}):
            answer = server.post(PROMPT, max_new_tokens=4, **refused)
            assert answer.status_code == 424 and "this engine runs every request with 2 beams" in answer.text
        assert server.answer(PROMPT, max_new_tokens=4) == plain
        assert server.metric("executor_restarts_total") == 0


@pytest.mark.parametrize(("version", "status"), [("1.2.1", 424), ("1.3.0", 424), ("1.4.0rc0", 200)])
def test_seeds(tmp_path: Path, version: str, status: int) -> None:
    """The package is asked for its module of seeds."""
    model, _ = tensorrt_llm_model(tmp_path / "model")
    environ = fake_tensorrt_llm(tmp_path / "fake", version=version, script={"sampled": True})
    with serving(model, **environ) as server:
        answers = [server.post(PROMPT, do_sample=True, seed=seed, max_new_tokens=4) for seed in (1, 2, 1)]
        assert {answer.status_code for answer in answers} == {status}
        if status == 200:
            assert answers[0].text == answers[2].text != answers[1].text
