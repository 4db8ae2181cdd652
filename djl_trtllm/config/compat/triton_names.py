"""What a Triton model repository for TensorRT-LLM can hold: the tables of `triton.toml`."""

from __future__ import annotations

from collections.abc import Mapping

from djl_trtllm.config.tables import read_table

ENGINE_MODEL = "tensorrt_llm"
MODELS = (ENGINE_MODEL, "tensorrt_llm_bls", "ensemble", "preprocessing", "postprocessing")
"""The models of a repository, in the order of precedence."""

_TABLE = read_table("triton.toml")
TO_FILL: Mapping[str, frozenset[str]] = {model: frozenset(names) for model, names in _TABLE["to_fill"].items()}
EXAMPLES: Mapping[str, str] = _TABLE["examples"]
STRUCTURE: frozenset[str] = frozenset(_TABLE["structure"])
TRITON_ONLY: frozenset[str] = frozenset(_TABLE["triton_only"])
OPTION_OF: Mapping[str, str] = {name: f"option.{name}" for name in _TABLE["same_name"]} | _TABLE["other_name"]
IGNORED: Mapping[str, str] = _TABLE["ignored"]
