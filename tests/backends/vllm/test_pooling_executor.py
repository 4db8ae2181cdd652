"""Models that embed or score on a fake vLLM: each text gets its own vector, without vLLM's activation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from djl_trtllm.executor.protocol import Submit
from djl_trtllm.request import FinishReason, Pooling, Sampling
from tests.backends.vllm import FAKE, IS_INSTALLED

pytestmark = pytest.mark.skipif(IS_INSTALLED, reason="a vLLM is installed: tests/vllm/test_embeddings.py runs it")


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    sys.path.insert(0, str(FAKE))
    yield
    sys.path.remove(str(FAKE))
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def make(task: str, **given: Any) -> Any:
    from djl_trtllm.backends.vllm.executor import VllmPoolingExecutor

    return VllmPoolingExecutor(
        arguments={"max_num_seqs": 8, "max_model_len": 64, "runner": "pooling"},
        environment={},
        **{"task": task, "activates": False, "max_sequences": 8, "max_seq_len": 64, "max_num_tokens": 64, **given},
    )


def text(number: int, ids: list[int], **pooling: Any) -> Submit:
    return Submit(number, ids, Sampling(1), pooling=Pooling(**pooling))


def finish(executor: Any) -> tuple[dict[int, Any], dict[int, FinishReason]]:
    vectors: dict[int, Any] = {}
    ends: dict[int, FinishReason] = {}
    while executor.busy:
        step = executor.step()
        vectors |= {number: np.frombuffer(data, np.float32).tolist() for number, data in step.vectors.items()}
        ends |= {end.request_id: end.finish for end in step.ends}
    return vectors, ends


def test_each_text_gets_its_own_vector_whatever_order_they_come_in() -> None:
    executor = make("embed")
    assert (executor.limits.task, executor.limits.dimensions) == ("embed", 3)
    for number in range(1, 7):
        executor.submit(text(number, [number] * number))
    executor.cancel(3)
    vectors, ends = finish(executor)
    assert vectors == {number: [number * number, number, number] for number in (1, 2, 4, 5, 6)}
    assert ends[3] is FinishReason.CANCELLED


def test_a_pairs_second_text_is_where_the_request_says() -> None:
    executor = make("score")
    assert executor.limits.dimensions == 1
    executor.submit(text(1, [5] * 9, task="score", second=6))
    executor.submit(text(2, [5] * 9, task="score"))
    vectors, _ = finish(executor)
    assert vectors == {1: [3], 2: [0]}


def test_a_text_may_be_as_long_as_both_the_model_and_the_options_say() -> None:
    for asked, longest in ((32, 32), (64, 64), (100, 64)):
        assert make("embed", max_seq_len=asked).limits.max_seq_len == longest
