"""GPUs by name."""

from __future__ import annotations

import pytest

from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.engines.gpu_models import gpus_named
from djl_trtllm.errors import EngineError

H100 = Gpu("NVIDIA H100", (9, 0), 81559 << 20)


@pytest.mark.parametrize(
    ("text", "count"),
    [("h100", 1), ("H100:8", 8), ("8xh100", 8), ("h100x2", 2), ("NVIDIA-H100:4", 4), ("1024xH100", 1024)],
)
def test_gpus_are_named_with_their_number(text: str, count: int) -> None:
    assert gpus_named(text) == (H100,) * count


@pytest.mark.parametrize(("text", "architecture"), [("l40s", "sm_89"), ("rtx-4090", "sm_89"), ("gb300", "sm_103")])
def test_a_name_stands_for_an_architecture(text: str, architecture: str) -> None:
    assert gpus_named(text)[0].architecture == architecture


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1000", "did you mean h100"),
        ("", "known are t4, a100-40gb"),
        ("h100:many", "as h100:8"),
        ("h100:0", "a number of GPUs from 1 to 1024"),
        ("h100:1025", "a number of GPUs from 1 to 1024"),
    ],
)
def test_other_text_is_refused_with_what_to_write(text: str, expected: str) -> None:
    with pytest.raises(EngineError, match=expected):
        gpus_named(text)
