"""The arguments of vLLM's `EngineArgs` that follow from options, model and machine, as plain data.

For example `option.tensor_parallel_degree=max` on two GPUs is `tensor_parallel_size: 2`. What vLLM computes itself is
left out, so that its own default for the model and the GPU counts.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any

from djl_trtllm.backends.effects import Effects, Target, passed_values, read_effects, refusals
from djl_trtllm.backends.extra_options import OF_THE_SERVER, Library, kinds_of, not_of, options_of, read_arguments
from djl_trtllm.backends.vllm.names import OWNER, arguments_of, declared_objects, has_plugins, installed_package
from djl_trtllm.config import Config, DType, KvCacheDType, Quantization, Task
from djl_trtllm.config.options.choices import GuidedDecoding
from djl_trtllm.config.rules import most_images
from djl_trtllm.config.sources import Origin
from djl_trtllm.config.speculation import Speculation
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import planned_length, planned_sequences
from djl_trtllm.errors import ConfigError
from djl_trtllm.files import read_table
from djl_trtllm.model import Layout
from djl_trtllm.model.pooling import Head
from djl_trtllm.model.vision import Vision
from djl_trtllm.sizing.tensors import indivisible_heads

EFFECTS: Effects = read_effects(__package__, "vllm")
"""The option map of vLLM (`option.backend=vllm`)."""

_DTYPES = {DType.FP32: "float32", DType.FP16: "float16", DType.BF16: "bfloat16"}
_OBJECTS = ("speculative_config", "compilation_config", "hf_overrides", "kv_transfer_config", "limit_mm_per_prompt")
"""Options that are JSON objects."""
_OURS = {**OF_THE_SERVER, **read_table("options.toml", __package__)["ours"]}
"""Arguments that the server sets itself, with what to do instead."""
_DERIVED = {
    "dtype": "dtype",
    "max_model_len": "max_seq_len",
    "max_num_seqs": "max_rolling_batch_size",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "tensor_parallel_size": "tensor_parallel_degree",
}
"""Arguments that have an option of another name, where code derives the argument."""
_LIBRARIES: dict[GuidedDecoding | None, str] = {GuidedDecoding.LLGUIDANCE: "guidance"}
_OPTIONS = options_of(EFFECTS, {Target(OWNER, argument): option for argument, option in _DERIVED.items()})
_COUNTS_DRAFTS = "per_request_spec_decode_metrics"
"""The argument by which vLLM counts what drafts propose for each request."""
SEQUENCES = 256
"""Sequences at the same time where the user has set no number: LMI's default with vLLM."""
_POOLED_TOKENS = 2048
"""Tokens of texts in an iteration, unless the user says another number."""
_FITTED = -1
"""`max_model_len` of a model whose context vLLM lowers to what the KV cache holds."""


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
        most = max(SEQUENCES, options.max_rolling_batch_size)
        config = config.replace(Origin.derived("LMI's default with vLLM"), max_rolling_batch_size=most)
    if config.is_set("enable_chunked_prefill"):
        return config
    return config.replace(Origin.derived("vLLM's own default"), enable_chunked_prefill=True)


def with_speculation(config: Config, asked: Speculation | None, layout: Layout) -> Config:
    """The configuration with the speculation in vLLM's own names, whichever options ask for it."""
    if asked is None:
        return config.replace(Origin.derived("no speculation"), speculative_config=None)
    if asked.tree is not None:
        raise ConfigError([f"{asked.setting}: vLLM has no trees of draft tokens; leave it out"])
    own = {
        "method": None if asked.method is None else str(asked.method),
        "model": asked.model if layout.draft is None else str(layout.draft.path),
        "num_speculative_tokens": asked.tokens,
        "prompt_lookup_max": asked.ngram,
        "draft_tensor_parallel_size": asked.tensor_parallel,
        **asked.extra,
    }
    text = json.dumps({name: value for name, value in own.items() if value is not None})
    return config.replace(
        config.origins.get("speculative_config") or Origin.derived(asked.setting), speculative_config=text
    )


def settable(version: str) -> dict[str, str]:
    """The arguments that settings `option.NAME` may name, see `EngineBackend.arguments`."""
    return {name: _OURS.get(name, "") for name in arguments_of(version)}


def with_extra_arguments(config: Config, version: str, notes: list[str]) -> tuple[Config, dict[str, Any]]:
    """The configuration with the arguments of `extra_engine_args` that have options, and all others.

    Options that are JSON objects are read in the same way, and settings `option.NAME` that are no options. Raises
    ConfigError with every problem found.
    """
    package = installed_package()
    signatures = {
        **({} if package is None else declared_objects(package)),
        OWNER: {**arguments_of(version), "speculative_config": "SpeculativeConfig | None"},
    }
    library = Library(
        option="extra_engine_args",
        engine=f"vLLM {version}",
        owner=OWNER,
        root=OWNER,
        signatures=signatures,
        ours=_OURS,
        options={target: option for target, option in _OPTIONS.items() if option not in _OBJECTS},
    )
    known = settable(version)
    settings = [each for each in config.engine_settings if known.get(each.name_in_engine) == ""]
    config, found = read_arguments(config, library, notes, objects=_OBJECTS, settings=settings)
    return config, {each.target.name: each.value for each in found}


def engine_arguments(
    config: Config,
    layout: Layout,
    hardware: Hardware,
    version: str,
    extra: Mapping[str, Any],
    problems: list[str],
    notes: list[str],
) -> dict[str, Any]:
    """The arguments with `extra` ones; adds to `problems` and `notes`."""
    options = config.options
    problems += refusals(config, EFFECTS, "vLLM")
    arguments: dict[str, Any] = {
        "model": str(layout.path),
        "tokenizer": str(layout.tokenizer_dir or layout.path),
        "max_num_seqs": planned_sequences(config),
        "max_model_len": _longest(config, layout, notes),
        "tensor_parallel_size": _tensor_parallel(config, layout, hardware, problems, notes),
        "structured_outputs_config": {"backend": _LIBRARIES.get(options.guided_decoding_backend, "xgrammar")},
        **passed_values(config, EFFECTS, without=_OBJECTS),
        **extra,
    }
    if options.dtype in _DTYPES:
        arguments["dtype"] = _DTYPES[options.dtype]
    if (tokens := _batched_tokens(config, problems)) is not None:
        arguments["max_num_batched_tokens"] = tokens
    if options.kv_cache_dtype is KvCacheDType.FP8:
        arguments["kv_cache_dtype"] = "fp8"
    if options.quantize is not None and config.is_set("quantization"):
        notes.append(f"{config.format_setting('quantize')}: {config.format_setting('quantization')} applies")
    elif options.quantize is not None:
        arguments |= _quantized(config, layout, problems)
    most = most_images(options.limit_mm_per_prompt)
    if Vision.find(layout.path, layout.config) is not None:
        arguments["limit_mm_per_prompt"] = {"image": most, "video": 0, **arguments.get("limit_mm_per_prompt", {})}
    elif options.limit_mm_per_prompt is not None and most:
        setting = config.format_setting("limit_mm_per_prompt")
        problems.append(f"{setting}: only text is served with this model, no images, videos or sounds; leave it out")
    known = arguments_of(version)
    if "speculative_config" in arguments and _COUNTS_DRAFTS in known:
        arguments.setdefault(_COUNTS_DRAFTS, "summary")
    written = {each.name_in_engine: str(each) for each in config.engine_settings}
    for name, value in arguments.items():
        option = None if name in extra else _OPTIONS.get(Target(OWNER, name))
        setting = written.get(name) or (name if option is None else config.format_setting(option))
        if name not in known:
            problems.append(f"{setting}: vLLM {version} has no {OWNER}.{name}; leave it out")
        elif problem := not_of(kinds := kinds_of(known[name], {}), value):
            problems.append(f"{setting}: {problem}")
        else:
            _check_listed(setting, kinds, value, version, problems, notes)
    return arguments


_UNLISTED = {"marlin", "auto-round", "deepseek_v41", "kimi_audio"}
"""Values that vLLM takes and its lists lack: other names of a checkpoint's quantisation
(`override_quantization_method` in `model_executor/layers/quantization`), and modes in `tokenizers/registry.py`."""


def _check_listed(
    setting: str, kinds: list[str] | None, value: Any, version: str, problems: list[str], notes: list[str]
) -> None:
    """Add a text to `problems` or `notes` about a value that vLLM's list lacks: `awqq`, where it has `awq` and `fp8`.

    vLLM ignores case in such a list. Plug-ins add values: where some are installed, or might be because vLLM itself is
    elsewhere and no value is similar, vLLM decides.
    """
    listed = {kind.strip("'").lower(): kind.strip("'") for kind in kinds or () if kind.startswith("'")}
    if not listed or not isinstance(value, str) or "." in value or value.lower() in {*listed, *_UNLISTED}:
        return  # a.B is a class
    near = [listed[name] for name in difflib.get_close_matches(value.lower(), listed)]
    advice = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(listed.values())}"
    if has_plugins() or not (near or installed_package()):
        notes.append(f"{setting}: vLLM {version} has no {value!r} unless a plug-in adds it; {advice}")
    else:
        problems.append(f"{setting}: vLLM {version} has no {value!r}; {advice}")


def pooling_arguments(arguments: Mapping[str, Any], head: Head, length: int) -> dict[str, Any]:
    """The arguments of a model that embeds or scores, made from the arguments of a model that generates.

    An iteration takes a text of `length` tokens as a whole.
    """
    tokens = max(length, arguments.get("max_num_batched_tokens", _POOLED_TOKENS))
    pooling: dict[str, Any] = {"runner": "pooling", "max_model_len": length, "max_num_batched_tokens": tokens}
    if head.task is Task.EMBED:
        pooling["pooler_config"] = {"seq_pooling_type": head.pooled.name}
    return {name: value for name, value in arguments.items() if name != "structured_outputs_config"} | pooling


def _longest(config: Config, layout: Layout, notes: list[str]) -> int:
    if not any(config.is_set(name) for name in ("max_seq_len", "max_input_len", "max_output_len")):
        return _FITTED
    return planned_length(config, layout.shape, notes)


def _tensor_parallel(config: Config, layout: Layout, hardware: Hardware, problems: list[str], notes: list[str]) -> int:
    asked, here = config.options.tensor_parallel_degree, len(hardware.gpus)
    pipeline = config.options.pipeline_parallel_degree
    degree = max(1, here // pipeline) if asked == "max" else asked
    named = [name for name in ("tensor_parallel_degree", "pipeline_parallel_degree") if config.is_set(name)]
    setting = " and ".join(map(config.format_setting, named))
    if hardware.gpus and degree * pipeline > here:
        problems.append(f"{setting}: {degree * pipeline} GPUs are needed, and {here} can be used here")
    elif problem := indivisible_heads(layout.shape.num_heads, layout.shape.num_kv_heads, degree):
        problems.append(f"{config.format_setting('tensor_parallel_degree')}: {problem}")
    elif degree * pipeline > max(here, 1):
        processes = f"{degree * pipeline} processes on a CPU, each of which needs a NUMA node"
        notes.append(f"{setting}: {processes}, unless VLLM_CPU_OMP_THREADS_BIND says where they run")
    return degree


def _batched_tokens(config: Config, problems: list[str]) -> int | None:
    own, ours = config.options.max_num_batched_tokens, config.options.max_num_tokens
    if own is not None and ours is not None and own != ours:
        both = " and ".join(config.format_setting(name) for name in ("max_num_batched_tokens", "max_num_tokens"))
        problems.append(f"{both} are the same argument of vLLM: keep one")
    tokens = ours if own is None else own
    if tokens is None or tokens >= (sequences := planned_sequences(config)):
        return tokens
    if config.is_set("max_rolling_batch_size") or config.is_set("max_num_sequences"):
        setting = config.format_setting("max_num_tokens" if own is None else "max_num_batched_tokens")
        problems.append(
            f"{setting}: an iteration takes a token of each of {sequences} sequences; raise it, or run fewer"
        )
    return tokens


def _quantized(config: Config, layout: Layout, problems: list[str]) -> Mapping[str, Any]:
    """`quantization`: vLLM reads a quantised checkpoint's own; it makes FP8 of other checkpoints."""
    asked = config.options.quantize
    stored = (layout.quantization or "").lower()
    if asked is Quantization.FP8 and not stored:
        return {"quantization": "fp8"}
    if asked is None or asked.value in stored:
        return {}
    has = f"the checkpoint is quantised by {layout.quantization}" if stored else "the checkpoint is not quantised"
    advice = "serve a checkpoint that is quantised, or set option.quantize=fp8"
    problems.append(f"{config.format_setting('quantize')}: {has}, and vLLM does not quantise so; {advice}")
    return {}
