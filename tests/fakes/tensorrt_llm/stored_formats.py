"""Which quantised Hugging Face checkpoints are loaded: `_update_from_hf_quant_config` of `llmapi/llm_utils.py` (37,826
characters, about 1.2; 28,262 characters, about 1.4). Both backends go through it (`CachedModelLoader.__call__`)."""

from __future__ import annotations

from typing import Any

from .settings import SINCE_1_3


def algorithm_of(stored: dict[str, Any], args: Any) -> str:
    """The algorithm of config.json's `quantization_config`."""
    method = stored.get("quant_method")
    if method == "fp8" and stored.get("weight_block_size"):
        return "FP8_BLOCK_SCALES"
    if method == "fp8" and SINCE_1_3:
        return "FP8"
    if method == "mxfp4":
        # TrtLlmArgs has no such field: AttributeError.
        assert args.moe_config is not None
        return "W4A16_MXFP4"
    if method == "compressed-tensors" and SINCE_1_3:
        return "FP8_PER_CHANNEL_PER_TOKEN"
    raise NotImplementedError(f"Unsupported quantization_config: {stored}.")
