"""A model that takes images, on the installed vLLM: what tests/integration/test_images.py holds of OpenVINO."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.vllm.names import installed_version
from tests.integration.test_images import (
    MARKS,
    answer,
    asked,
    require_refused,
    test_a_client_that_leaves_takes_nothing_of_others,
    test_every_chat_takes_images,
    test_greedy_output_equals_transformers_with_one_and_two_images,
    test_many_streams_at_once_get_what_each_gets_alone,
    test_usage_and_log_count_the_tokens_of_images,
    texts_across_a_kill,
)
from tests.support.server import Server, running
from tests.support.vision import write_vision_checkpoint
from tests.vllm.conftest import ON_CPU, START_SECONDS

__all__ = [
    "asked",
    "test_a_client_that_leaves_takes_nothing_of_others",
    "test_every_chat_takes_images",
    "test_greedy_output_equals_transformers_with_one_and_two_images",
    "test_many_streams_at_once_get_what_each_gets_alone",
    "test_usage_and_log_count_the_tokens_of_images",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FILE = """\
option.backend=vllm
option.dtype=fp32
option.enforce_eager=true
option.max_rolling_batch_size=16
option.max_input_len=512
option.max_output_len=1024
option.limit_mm_per_prompt={"image": 4}
option.model_name=seeing
option.executor_hang_timeout=300
option.model_loading_timeout=1800
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if installed_version() is None:
        pytest.skip("vLLM is not installed: scripts/test-vllm has it")
    path = write_vision_checkpoint(tmp_path_factory.mktemp("vision") / "qwen2-vl")
    (path / "serving.properties").write_text(FILE)
    return path


@pytest.fixture(scope="module")
def seeing(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(Server(checkpoint, ON_CPU, tmp_path_factory.mktemp("scratch")), START_SECONDS) as started:
        yield started


def test_streams_go_on_byte_for_byte_after_the_engine_process_is_killed(
    seeing: Server, asked: list[tuple[dict[str, Any], list[int]]]
) -> None:
    bodies = [{**body, "max_tokens": 400} for body, _ in asked[:8]]
    expected = [answer(seeing, body)["choices"][0]["message"]["content"] for body in bodies]
    assert texts_across_a_kill(seeing, bodies) == expected


@pytest.mark.parametrize("text", MARKS)
def test_the_models_own_marks_in_texts_are_refused(seeing: Server, text: str) -> None:
    require_refused(seeing, text, 1)


def test_a_request_that_vllm_refuses_leaves_the_next_one_its_images(
    seeing: Server, asked: list[tuple[dict[str, Any], list[int]]]
) -> None:
    body, expected = asked[-1]
    refused = seeing.http.post("/v1/chat/completions", json={**body, "logit_bias": {"100000": 1}})
    assert refused.status_code == 400
    found = answer(seeing, body)
    assert found["choices"][0]["token_ids"] == expected
