"""The model of the tests on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speculation import make_copier

FILE = """\
option.rolling_batch=vllm
option.dtype=bf16
option.enforce_eager=true
option.max_model_len=2048
option.max_rolling_batch_size=256
option.gpu_memory_utilization=0.5
"""


@pytest.fixture(scope="package")
def copier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose likeliest token is so by far, so that no batch and no division of sums changes it."""
    directory = make_copier(tmp_path_factory.mktemp("gpu") / "copier", 4)
    (directory / "serving.properties").write_text(FILE)
    return directory
