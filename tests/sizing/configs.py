"""config.json of well-known models, by their public values, reduced to what sizes need (`configs.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("configs.json").read_text(encoding="utf-8"))


def llama(**changes: Any) -> dict[str, Any]:
    """LLaMA 3 8B: https://huggingface.co/NousResearch/Meta-Llama-3-8B/blob/main/config.json"""
    return CONFIGS["llama"] | changes


def deepseek(**changes: Any) -> dict[str, Any]:
    """DeepSeek-V3, with its latent attention."""
    return CONFIGS["deepseek"] | changes


def qwen3_32b_fp8() -> dict[str, Any]:
    """https://huggingface.co/Qwen/Qwen3-32B-FP8/blob/main/config.json"""
    return dict(CONFIGS["qwen3_32b_fp8"])


def nemotron_h(**changes: Any) -> dict[str, Any]:
    """https://huggingface.co/nvidia/Nemotron-H-8B-Base-8K/blob/main/config.json"""
    return CONFIGS["nemotron_h"] | changes


def gemma3(**changes: Any) -> dict[str, Any]:
    """Gemma 3 12B's text part: five layers of six look back 1,024 tokens."""
    return CONFIGS["gemma3"] | {"text_config": CONFIGS["gemma3"]["text_config"] | changes}


def gpt_oss() -> dict[str, Any]:
    """gpt-oss-20b: every other layer looks back 128 tokens."""
    return dict(CONFIGS["gpt_oss"])
