"""Derives the plan of a model that TensorRT-LLM runs."""

from __future__ import annotations

from dataclasses import replace

from djl_trtllm.backends.tensorrt_llm.arguments import LLM_OWNERS, Phase
from djl_trtllm.backends.tensorrt_llm.built_engine import read_built_engine
from djl_trtllm.backends.tensorrt_llm.converter_aliases import converter_alias
from djl_trtllm.backends.tensorrt_llm.gpu_limits import gpu_problems
from djl_trtllm.backends.tensorrt_llm.names import members
from djl_trtllm.backends.tensorrt_llm.plan import (
    CheckpointPlan,
    TensorRtEnginePlan,
    TensorRtLlmPlan,
    check_engine,
    collected,
)
from djl_trtllm.backends.tensorrt_llm.plan_inputs import plan_inputs
from djl_trtllm.backends.tensorrt_llm.stored_formats import check_stored_format
from djl_trtllm.config import Backend, Config
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.manifest import Manifest
from djl_trtllm.engines.plan import asked_options, common_facts
from djl_trtllm.errors import ConfigError, EngineError
from djl_trtllm.model import Layout


def plan_tensorrt_llm(
    config: Config, layout: Layout, hardware: Hardware, backend: Backend, reason: str, *, compile_only: bool
) -> TensorRtLlmPlan:
    """Derive the plan. Raises EngineError, ConfigError (all problems at once) and EngineMismatchError."""
    options = config.options
    problems: list[str] = []
    notes: list[str] = []
    inputs = plan_inputs(config, layout, hardware, backend, problems, notes)
    if not members(LLM_OWNERS[backend], inputs.version):
        raise EngineError(f"{reason}: TensorRT-LLM {inputs.version} has no such backend; set option.backend=auto")
    check_stored_format(layout, backend, inputs.version, notes)
    common = {
        **common_facts(config, layout),
        "backend": backend,
        "reason": reason,
        "config": config,
        "hardware": hardware,
        "inputs": inputs,
        "shape": layout.shape,
        "max_sequences": inputs.max_sequences,
        "max_seq_len": inputs.max_seq_len,
    }
    is_engine = layout.kind.is_engine
    builder = collected(config, inputs, Phase.RUN if is_engine else Phase.BUILD | Phase.RUN)
    problems += builder.problems
    if not is_engine:
        problems += gpu_problems(config, inputs, hardware, builder.arguments(Phase.BUILD))
    if problems:
        raise ConfigError(problems)
    notes += builder.notes
    if backend is not Backend.TENSORRT:
        longest_prompt = inputs.max_seq_len if options.enable_chunked_prefill else inputs.max_num_tokens
        return CheckpointPlan(**common, notes=tuple(notes), max_input_len=min(options.max_input_len, longest_prompt))
    plan = TensorRtEnginePlan(
        **common,
        notes=tuple(notes),
        max_input_len=options.max_input_len,
        asked=asked_options(config),
        converter_alias=converter_alias(layout.path.resolve(), layout.config or {}, config),
    )
    if layout.engine_dir is None or not is_engine:
        return plan
    found = read_built_engine(layout.engine_dir)
    notes += check_engine(config, found, hardware, Manifest.read(layout.engine_dir), inputs.max_seq_len)
    return replace(plan, notes=tuple(notes)).at(layout.engine_dir)
