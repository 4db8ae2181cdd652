from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.model.quantization import stored_quantization


@pytest.mark.parametrize(
    ("config", "algorithm"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": None}}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, "FP8"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "FP8_BLOCK_SCALES"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "W4A16_MXFP4"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "W4A16_AWQ"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "W8A16_GPTQ"),
        ({"quantization_config": {"quant_method": "gptq"}}, "W4A16_GPTQ"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "NVFP4"),
        ({"quantization_config": {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}}, "FP8"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "W4A16_MXFP4"),
        ({"quantization": {"quant_algo": "W8A16"}}, "W8A16"),
        ({"quantization": {"quant_algo": None}}, None),
        ({"quantization": {"quant_algo": "NO_QUANT"}}, None),
        ({"pretrained_config": {"quantization": {"quant_algo": "FP8"}}, "build_config": {}}, "FP8"),
    ],
)
def test_each_way_of_saying_it_is_one_name(tmp_path: Path, config: dict[str, Any], algorithm: str | None) -> None:
    assert stored_quantization(tmp_path, config) == algorithm
