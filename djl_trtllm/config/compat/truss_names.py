"""What a Truss `config.yaml` for TensorRT-LLM can hold: the tables of `truss.toml`."""

from __future__ import annotations

from collections.abc import Mapping

from djl_trtllm.config.tables import read_table

_TABLE = read_table("truss.toml")
ENGINE_SECTIONS: tuple[str, ...] = tuple(_TABLE["engine_sections"])
MARKS: tuple[str, ...] = tuple(_TABLE["marks"])
OPTION_OF: Mapping[str, str] = {
    **{f"{section}.{name}": option for section in ENGINE_SECTIONS for name, option in _TABLE["engine"].items()},
    **{f"trt_llm.build.{name}": option for name, option in _TABLE["build"].items()},
    **{f"trt_llm.runtime.{name}": option for name, option in _TABLE["runtime"].items()},
    "model_name": "option.model_name",
}
QUANTIZATION: Mapping[str, Mapping[str, str]] = _TABLE["quantization"]
IGNORED: Mapping[str, str] = {name: row["reason"] for row in _TABLE["ignored"] for name in row["names"]}
TO_ACT_ON: frozenset[str] = frozenset(row["reason"] for row in _TABLE["ignored"] if row.get("act", False))
ENGINE_PRESETS: Mapping[str, str] = _TABLE["presets"]["engine"]
BUILD_PRESETS: Mapping[str, str] = _TABLE["presets"]["build"]
STACK_PRESETS: Mapping[str, str] = _TABLE["presets"]["stack"]
