"""The limits that a TensorRT-LLM engine was compiled with, as options of this server."""

from __future__ import annotations

from collections.abc import Mapping

from djl_trtllm.backends.as_built import Bound, Built
from djl_trtllm.backends.tensorrt_llm.built_engine import BuiltEngine
from djl_trtllm.config import Config


def built_limits(config: Config, engine: BuiltEngine) -> Built:
    """The limits in an engine's config.json.

    As in TensorRT-LLM's own runtime, a smaller value of the user counts and a larger one is lowered to the engine's
    (`TrtLlmArgs.validate_build_config_with_runtime_params` in llmapi/llm_args.py of about 1.2). Only a beam width or a
    rank of adapters above the engine's is an error (`check_built_engine`): the C++ runtime refuses to load the engine
    with it (batch_manager/trtGptModel.h: "Runtime configured max beam width must not exceed engine max beam width").
    """
    options = config.options
    asked = {
        name: value
        for name in ("max_num_sequences", "max_seq_len", "max_num_tokens")
        if config.is_set(name) and (value := getattr(options, name))
    }
    chunked = _chunked(config, engine)
    longest = _least(engine.max_seq_len, asked.get("max_seq_len"))
    longest_prompt = engine.longest_prompt(chunked_prefill=chunked, max_num_tokens=asked.get("max_num_tokens"))
    longest_output = None if longest is None else longest - 1
    sequences = engine.max_batch_size
    if sequences is not None:
        sequences = _least(sequences, asked.get("max_num_sequences"))
    defaults = {
        "max_rolling_batch_size": sequences,
        # One that the presets of another server set: the batch is the engine's.
        "max_num_sequences": None if options.max_num_sequences is None else engine.max_batch_size,
        "max_input_len": _least(longest_prompt, longest_output),
        "max_output_len": _least(engine.max_output_len, longest_output),
        "max_seq_len": engine.max_seq_len,
        "max_num_tokens": engine.max_num_tokens,
        "max_beam_width": engine.max_beam_width,
        "max_lora_rank": engine.max_lora_rank if engine.lora else None,
        "enable_chunked_prefill": chunked or None,
    }
    # Of equal bounds the first one counts: the engine's.
    longest_prompts = {
        None: engine.longest_prompt(chunked_prefill=chunked),
        "max_num_tokens": longest_prompt if "max_num_tokens" in asked else None,
        "max_seq_len": longest_output if "max_seq_len" in asked else None,
    }
    longest_outputs = {
        None: None if engine.max_seq_len is None else engine.max_seq_len - 1,
        "max_seq_len": longest_output if "max_seq_len" in asked else None,
    }
    bounds = {
        "max_rolling_batch_size": _bound("max_batch_size", {None: engine.max_batch_size}),
        "max_num_sequences": _bound("max_batch_size", {None: engine.max_batch_size}),
        "max_num_tokens": _bound("max_num_tokens", {None: engine.max_num_tokens}),
        "max_seq_len": _bound("max_seq_len", {None: engine.max_seq_len}),
        "max_input_len": _bound("a longest prompt of", longest_prompts),
        "max_output_len": _bound("a longest output of", longest_outputs),
    }
    return Built(
        f"build_config in {engine.directory / 'config.json'}",
        {name: value for name, value in defaults.items() if value is not None},
        {name: bound for name, bound in bounds.items() if bound is not None},
    )


def _chunked(config: Config, engine: BuiltEngine) -> bool:
    """Whether prompts are split: where the engine was compiled for prompts longer than one of its iterations."""
    if config.is_set("enable_chunked_prefill"):
        return config.options.enable_chunked_prefill
    if not engine.use_paged_context_fmha or not engine.packed:
        return False
    return (engine.max_input_len or 0) > (engine.max_num_tokens or engine.max_input_len or 0)


def _bound(name: str, values: Mapping[str | None, int | None]) -> Bound | None:
    """The least of `values`, which are by the option that they follow from."""
    known = [Bound(value, name, option) for option, value in values.items() if value is not None]
    return min(known, key=lambda bound: bound.value, default=None)


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)
