"""GPUs by name."""

from __future__ import annotations

import pytest

from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.engines.gpu_models import gpus_named
from djl_trtllm.errors import SizingError

H100 = Gpu("NVIDIA H100", (9, 0), 81559 << 20)


@pytest.mark.parametrize(
    ("text", "count"),
    [("h100", 1), ("H100:8", 8), ("8xh100", 8)],
)
def test_gpus_are_named_with_their_number(text: str, count: int) -> None:
    assert gpus_named(text) == (H100,) * count


@pytest.mark.parametrize(("text", "architecture"), [("l40s", "sm_89"), ("rtx-4090", "sm_89"), ("gb300", "sm_103")])
def test_a_name_stands_for_an_architecture(text: str, architecture: str) -> None:
    assert gpus_named(text)[0].architecture == architecture


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1000", "^--gpu h1000: expected a GPU: did you mean h100"),
        ("h100:0", "^--gpu h100:0: 0 is no number of GPUs, expected 1 to 1024, as H100:8"),
    ],
)
def test_other_text_is_refused_with_what_to_write(text: str, expected: str) -> None:
    with pytest.raises(SizingError, match=expected):
        gpus_named(text)
