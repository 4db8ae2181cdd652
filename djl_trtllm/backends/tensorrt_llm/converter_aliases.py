"""Names of checkpoints from which TensorRT-LLM's converters read versions.

They recognise ChatGLM's versions and the variants of GPT-2 by the path of the checkpoint only
(`tensorrt_llm/models/{chatglm,gpt}/config.py`, 1.2), and SageMaker's path is always `/opt/ml/model`. So the compiler
reads these checkpoints through a link that has the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from djl_trtllm.config import Config

_GLM = ("glm4", "chatglm3", "chatglm2", "chatglm", "glm")
_GPT = ("starcoder", "santacoder")
_LARGE_VOCABULARY = 100_000
"""GLM-4 has 151,552 tokens, ChatGLM 2 and 3 have 65,024."""


def converter_alias(checkpoint: Path, raw: Mapping[str, Any], config: Config) -> str | None:
    """The name for a link to the checkpoint, whose config.json is `raw`; None for families that need none.

    `option.chatglm_model_version` and `option.gpt_model_version` come first, then the path, then config.json.
    """
    path = str(checkpoint).replace("glm_4", "glm4").replace("glm-4", "glm4")
    model_type = str(raw.get("model_type"))
    if model_type.startswith("chatglm"):
        if config.is_set("chatglm_model_version"):
            return config.options.chatglm_model_version.value
        return next((version for version in _GLM if version in path), None) or _glm(raw)
    if model_type in ("gpt2", "gpt_bigcode"):
        if config.is_set("gpt_model_version"):
            return config.options.gpt_model_version.value
        return next((version for version in _GPT if version in path), None) or _gpt(model_type, raw)
    return None


def _glm(raw: Mapping[str, Any]) -> str:
    if "inner_hidden_size" in raw:
        return "chatglm"
    if int(raw.get("padded_vocab_size") or 0) > _LARGE_VOCABULARY:
        return "glm4"
    # Versions 2 and 3 are built alike, but for how they stretch over long contexts.
    return "chatglm3"


def _gpt(model_type: str, raw: Mapping[str, Any]) -> str:
    if "GPT2LMHeadCustomModel" in (raw.get("architectures") or ()):
        return "santacoder"
    return "starcoder" if model_type == "gpt_bigcode" else "gpt2"
