"""A model that takes images, on TensorRT-LLM's PyTorch backend; and a cross-encoder, where a release encodes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.tensorrt_llm.names import has
from tests.support.encoders import QUERY, TEXTS, scores, write_encoder
from tests.support.server import Server
from tests.support.vision import data_url, encoded, image_part, picture, write_vision_checkpoint
from tests.trtllm.conftest import START_SECONDS, Installation, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_SECONDS)]

QUESTION = {"type": "text", "text": "what is in this picture"}
FILE = """\
option.backend=pytorch
option.max_rolling_batch_size=8
option.max_input_len=512
option.max_output_len=512
option.enforce_eager=true
"""


@pytest.fixture(scope="module")
def seeing(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = write_vision_checkpoint(tmp_path_factory.mktemp("vision") / "qwen2-vl")
    (path / "serving.properties").write_text(FILE)
    with serving(installation, path) as server:
        yield server


def asked(server: Server, *colours: int, tokens: int = 16) -> dict[str, Any]:
    parts = [image_part(data_url(encoded(picture(112, 84, colour)))) for colour in colours]
    message = {"role": "user", "content": [*parts, QUESTION]}
    body = {"messages": [message], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/chat/completions", json=body, timeout=START_SECONDS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_usage_counts_the_tokens_of_images(seeing: Server) -> None:
    plain = asked(seeing)["usage"]["prompt_tokens"]
    for count in (1, 2):
        # Two marks are around each image of twelve tokens.
        assert asked(seeing, *range(count))["usage"]["prompt_tokens"] == plain + 14 * count


def test_prompts_with_and_without_images_run_side_by_side(seeing: Server) -> None:
    cases = [(), (1,), (2, 3), (), (4,), (5,), (6, 1), ()] * 2
    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(lambda colours: asked(seeing, *colours, tokens=64), cases))
    assert [each["usage"]["completion_tokens"] for each in found] == [64] * len(cases)
    assert seeing.metric("executor_restarts_total") == 0


def test_the_images_of_a_prompt_decide_what_it_shares(seeing: Server) -> None:
    def cached(*colours: int) -> int:
        details = asked(seeing, *colours)["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens", 0))

    images = (7, 8, 9, 10, 11, 12)
    cached(*images)
    assert cached(*images) > 0
    # Before the first image there is less than a block.
    assert cached(*reversed(images)) == 0


@pytest.mark.trtllm
def test_scores_of_a_cross_encoder_are_those_of_transformers(installation: Installation, tmp_path: Path) -> None:
    if installation.is_fake or not has("LLM", "encode", installation.version):
        pytest.skip(f"TensorRT-LLM {installation.version} does not encode, or is the fake")
    checkpoint: Path = write_encoder(tmp_path / "model", labels=1)
    (checkpoint / "serving.properties").write_text("option.backend=pytorch\n")
    with serving(installation, checkpoint) as server:
        body = {"text_1": QUERY, "text_2": list(TEXTS)}
        found = [each["score"] for each in server.http.post("/score", json=body).json()["data"]]
    assert found == pytest.approx(scores(checkpoint, QUERY, TEXTS), abs=5e-3)  # it computes in 16 bits
