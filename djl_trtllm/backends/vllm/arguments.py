"""The arguments of vLLM's `EngineArgs` that follow from options, model and machine, as plain data.

For example `option.tensor_parallel_degree=max` on two GPUs is `tensor_parallel_size: 2`. What vLLM computes itself is
left out, so that its own default for the model and the GPU counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from djl_trtllm.backends.effects import Effects, Passed, read_effects
from djl_trtllm.backends.vllm.names import OWNER, arguments_of
from djl_trtllm.config import Config, DType, KvCacheDType, Quantization
from djl_trtllm.config.configuration import format_setting
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.options.choices import GuidedDecoding
from djl_trtllm.config.sources import Origin
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import planned_length, planned_sequences
from djl_trtllm.model import Layout

EFFECTS: Effects = read_effects(__package__, "vllm")
"""On vLLM (`option.backend=vllm`)."""

_DTYPES = {DType.FP32: "float32", DType.FP16: "float16", DType.BF16: "bfloat16"}
_OBJECTS = ("speculative_config", "compilation_config", "hf_overrides", "kv_transfer_config", "limit_mm_per_prompt")
"""Options that are JSON objects."""
_LIBRARIES = {GuidedDecoding.LLGUIDANCE: "guidance"}
_SEQUENCES = 256
_FITTED = -1
"""`max_model_len` of a model whose context vLLM lowers to what the KV cache holds."""
_NO_COUNTERPART = "vLLM does not quantise so; serve a checkpoint that is quantised, or set option.quantize=fp8"


def with_own_defaults(config: Config, layout: Layout) -> Config:
    """The configuration with defaults of vLLM and of LMI with vLLM, where the user set nothing.

    vLLM splits prompts and pages its KV cache, so a long context costs nothing until it is used.
    """
    options, context = config.options, layout.shape.max_position_embeddings
    lengths = ("max_seq_len", "max_input_len", "max_output_len")
    unset = {name for name in lengths if not config.is_set(name)}
    if options.max_seq_len is None and context is not None and not {"max_input_len", "max_output_len"} - unset:
        config = config.replace(Origin.derived("the model's context"), max_seq_len=context)
    longest = planned_length(config, layout.shape, [])
    room = dict.fromkeys(unset - {"max_seq_len"}, longest - 1)
    if config.options.max_seq_len is not None:
        config = config.replace(Origin.derived("option.max_seq_len, less one token"), **room)
    if not config.is_set("max_rolling_batch_size") and options.max_num_sequences is None:
        most = max(_SEQUENCES, options.max_rolling_batch_size)
        config = config.replace(Origin.derived("LMI's default with vLLM"), max_rolling_batch_size=most)
    own = {name: True for name in ("enable_kv_cache_reuse", "enable_chunked_prefill") if not config.is_set(name)}
    return config.replace(Origin.derived("vLLM's own default"), **own)


def engine_arguments(
    config: Config, layout: Layout, hardware: Hardware, version: str, problems: list[str], notes: list[str]
) -> dict[str, Any]:
    """The arguments, without those of `extra_engine_args`; adds to `problems` and `notes`."""
    options = config.options
    arguments: dict[str, Any] = {
        "model": str(layout.path),
        "tokenizer": str(layout.tokenizer_dir or layout.path),
        "max_num_seqs": planned_sequences(config),
        "max_model_len": _longest(config, layout, notes),
        "tensor_parallel_size": _tensor_parallel(config, hardware, problems),
        "structured_outputs_config": {"backend": _LIBRARIES.get(options.guided_decoding_backend, "xgrammar")},
        **_passed(config, problems),
    }
    if options.dtype in _DTYPES:
        arguments["dtype"] = _DTYPES[options.dtype]
    if options.enable_lora:
        arguments["enable_lora"] = True
    if (tokens := _batched_tokens(config, problems)) is not None:
        arguments["max_num_batched_tokens"] = tokens
    if options.kv_cache_dtype is KvCacheDType.FP8:
        arguments["kv_cache_dtype"] = "fp8"
    elif options.kv_cache_dtype in (KvCacheDType.INT8, KvCacheDType.FP32):
        setting = format_setting(config, "kv_cache_dtype")
        problems.append(f"{setting} is not available with vLLM: option.kv_cache_dtype=fp8, or auto")
    if options.quantize is not None and not config.is_set("quantization"):
        arguments |= _quantized(config, layout, problems)
    known = arguments_of(version)
    for name in [name for name in arguments if name not in known]:
        del arguments[name]
        problems.append(f"{_origin_of(config, name)}: vLLM {version} has no {OWNER}.{name}; leave it out")
    return arguments


def _passed(config: Config, problems: list[str]) -> dict[str, Any]:
    """The values of options that are passed as they are."""
    found: dict[str, Any] = {}
    for name, effect in EFFECTS.items():
        value = getattr(config.options, name)
        if not isinstance(effect, Passed) or value is None or (effect.needs and not effect.needs.met(config)):
            continue
        if effect.when_set and not config.is_set(name):
            continue
        if name in _OBJECTS:
            value = _object(config, name, problems)
        found |= {target.name: list(value) if isinstance(value, tuple) else value for target in effect.targets}
    return found


def _object(config: Config, name: str, problems: list[str]) -> Any:
    setting, example = format_setting(config, name), OPTIONS[name].option.example
    try:
        value = json.loads(getattr(config.options, name))
    except ValueError as error:
        problems.append(f"{setting}: expected a JSON object ({error}), such as {example}")
        return None
    if not isinstance(value, dict):
        problems.append(f"{setting}: expected a JSON object, such as {example}")
    elif name == "limit_mm_per_prompt" and any(value.values()):
        problems.append(f"{setting}: only text is served, no images, videos or sounds; leave it out, or set {example}")
    return value


def _origin_of(config: Config, argument: str) -> str:
    """The setting that an argument comes from, else the argument's name."""
    names = [
        name
        for name, effect in EFFECTS.items()
        if argument in (target.name for target in getattr(effect, "targets", ())) and config.is_set(name)
    ]
    return format_setting(config, names[0]) if names else argument


def _longest(config: Config, layout: Layout, notes: list[str]) -> int:
    if not any(config.is_set(name) for name in ("max_seq_len", "max_input_len", "max_output_len")):
        return _FITTED
    return planned_length(config, layout.shape, notes)


def _tensor_parallel(config: Config, hardware: Hardware, problems: list[str]) -> int:
    asked, here = config.options.tensor_parallel_degree, len(hardware.gpus)
    pipeline = config.options.pipeline_parallel_degree
    if asked == "max":
        return max(1, here // pipeline)
    if hardware.gpus and asked * pipeline > here:
        named = [n for n in ("tensor_parallel_degree", "pipeline_parallel_degree") if config.is_set(n)]
        setting = " and ".join(format_setting(config, name) for name in named)
        problems.append(f"{setting}: {asked * pipeline} GPUs are needed, and {here} can be used here")
    return asked


def _batched_tokens(config: Config, problems: list[str]) -> int | None:
    own, ours = config.options.max_num_batched_tokens, config.options.max_num_tokens
    if own is not None and ours is not None and own != ours:
        both = " and ".join(format_setting(config, name) for name in ("max_num_batched_tokens", "max_num_tokens"))
        problems.append(f"{both} are the same argument of vLLM: keep one")
    tokens = ours if own is None else own
    if tokens is None or tokens >= (sequences := planned_sequences(config)):
        return tokens
    if config.is_set("max_rolling_batch_size") or config.is_set("max_num_sequences"):
        setting = format_setting(config, "max_num_tokens" if own is None else "max_num_batched_tokens")
        problems.append(
            f"{setting}: an iteration takes a token of each of {sequences} sequences; raise it, or run fewer"
        )
    return tokens


def _quantized(config: Config, layout: Layout, problems: list[str]) -> Mapping[str, Any]:
    """A checkpoint that is quantised says how itself; of others vLLM makes FP8."""
    asked = config.options.quantize
    stored = (layout.quantization or "").lower()
    if asked is Quantization.FP8 and not stored:
        return {"quantization": "fp8"}
    if asked is None or asked.value in stored:
        return {}
    has = f"the checkpoint is quantised by {layout.quantization}" if stored else "the checkpoint is not quantised"
    problems.append(f"{format_setting(config, 'quantize')}: {has}, and {_NO_COUNTERPART}")
    return {}
