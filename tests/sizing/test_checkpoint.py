from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.errors import LayoutError
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from tests.sizing.configs import llama

TINY = Path(__file__).parents[2] / "serving" / "models" / "tiny-stories"


def test_sizes_of_a_directory_are_those_of_its_file() -> None:
    sizes = CheckpointSizes.read(TINY)
    header = int.from_bytes((TINY / "model.safetensors").read_bytes()[:8], "little")
    assert sizes.bytes == (TINY / "model.safetensors").stat().st_size - 8 - header
    assert sizes.exact


def test_a_config_alone_gives_counted_sizes() -> None:
    sizes = CheckpointSizes.from_config(llama())
    assert (sizes.parameters, sizes.exact) == (8_030_261_248, False)
    assert len(sizes.layers) == 32


def test_a_directory_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"no config\.json"):
        CheckpointSizes.read(tmp_path)
