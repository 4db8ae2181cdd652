"""Deriving the plan: what is refused before anything is compiled or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.errors import EngineError, EngineMismatchError
from tests.backends.tensorrt_llm.plans import planned, problems
from tests.engines.helpers import write_tensorrt_engine


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return write_tensorrt_engine(tmp_path / "engine")


def test_an_engine_of_another_release_fails_before_loading(engine: Path) -> None:
    with pytest.raises(EngineMismatchError, match=r"TensorRT-LLM 1\.2\.1 compiled it and 1\.2\.0 is installed"):
        planned(engine, "1.2.0")


def test_an_engine_on_a_release_without_the_engine_backend_is_explained(engine: Path) -> None:
    with pytest.raises(EngineError) as caught:
        planned(engine, "1.3.0")
    assert "1.3.0rc21 removed the backend that compiles and runs TensorRT engines" in str(caught.value)
    assert "Serve it with TensorRT-LLM 1.2.1, which compiled it" in str(caught.value)


def test_all_problems_are_reported_at_once(roomy: Path) -> None:
    assert (
        len(problems(roomy, backend="pytorch", quantize="fp8", kv_cache_dtype="int8", tensor_parallel_degree=99)) == 4
    )
