"""A compiled TensorRT-LLM engine: what its config.json says, and whether it fits machine and options.

`built_limits` are the limits that the engine was compiled with, as options of this server.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from djl_trtllm.backends.base import Bound, Built
from djl_trtllm.backends.tensorrt_llm.arguments import is_of_build
from djl_trtllm.backends.tensorrt_llm.engine_watch import LAUNCHED
from djl_trtllm.config import Config
from djl_trtllm.config.options.choices import BatchingType
from djl_trtllm.config.options.option import as_text
from djl_trtllm.config.speculation import Method, speculation_of
from djl_trtllm.engines.cache import Manifest, raise_unfit
from djl_trtllm.engines.hardware import Hardware, release_of
from djl_trtllm.errors import EngineMismatchError, LayoutError
from djl_trtllm.model.checkpoint import first_positive, part, read_object
from djl_trtllm.model.layout import old_engine

_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_DEGREES = {
    "tensor_parallel_degree": "tp_size",
    "pipeline_parallel_degree": "pp_size",
    "context_parallel_size": "cp_size",
    "moe_tensor_parallel_size": "moe_tp_size",
    "moe_expert_parallel_size": "moe_ep_size",
}
_LIMITS = ("max_num_tokens", "max_seq_len", "max_beam_width", "max_lora_rank")
_PAGED_CONTEXT = ("enable_kv_cache_reuse", "enable_chunked_prefill")
_CONTEXT_LOGITS = ("gather_context_logits", "gather_all_token_logits")
# Not build flags any more: the executor turns generation logits on by itself (commands/build.py of TensorRT-LLM 1.0).
_RUNTIME = ("gather_generation_logits",)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine directory's config.json, as TensorRT-LLM 0.8 to 1.2 write it; None for what is not in it.

    `version` is the TensorRT-LLM that compiled it, `dtype` float16, bfloat16 or float32, the algorithms are names of
    QuantAlgo. Lengths are in tokens, `max_batch_size` in sequences, sizes of the mapping in GPUs. `built_with` are all
    flags of BuildConfig and PluginConfig by name.
    """

    directory: Path
    version: str | None = None
    dtype: str | None = None
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    world_size: int = 1
    moe_tp_size: int | None = None
    moe_ep_size: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    max_input_len: int | None = None
    max_output_len: int | None = None
    max_beam_width: int | None = None
    kv_cache_type: str | None = None
    tokens_per_block: int | None = None
    remove_input_padding: bool | None = None
    context_fmha: bool | None = None
    use_paged_context_fmha: bool | None = None
    gather_context_logits: bool = False
    lora: bool = False
    max_lora_rank: int | None = None
    built_with: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def packed(self) -> bool:
        """True if the prompts of a batch follow each other without padding."""
        return self.remove_input_padding is not False and self.context_fmha is not False

    def longest_prompt(self, *, chunked_prefill: bool, max_num_tokens: int | None = None) -> int | None:
        """Tokens of the longest prompt the engine takes, where an iteration has at most `max_num_tokens`.

        `max_input_len` applies only if prompts are padded (TensorRT-LLM, batch_manager/trtGptModel.h).
        """
        bounds = [None if self.max_seq_len is None else self.max_seq_len - 1]
        if not chunked_prefill:
            bounds += [self.max_num_tokens, max_num_tokens] if self.packed else [self.max_input_len]
        return min((bound for bound in bounds if bound is not None), default=None)


def read_built_engine(directory: Path) -> BuiltEngine:
    """Read an engine directory's config.json; looks at no engine file.

    Raises EngineMismatchError where it is missing, damaged, not that of an engine, or that of one from before
    TensorRT-LLM 0.8.
    """
    path = directory / "config.json"
    try:
        config = read_object(path, LayoutError)
    except LayoutError as error:
        raise EngineMismatchError(str(error)) from error
    if config is None:
        raise EngineMismatchError(f"{path} is missing; copy the whole engine directory")
    if "build_config" not in config:
        damaged = f"{path} is not that of a compiled engine: it has no `build_config`"
        raise EngineMismatchError(old_engine(directory) or damaged)
    pretrained, build = part(config, "pretrained_config"), part(config, "build_config")
    mapping, quantization = part(pretrained, "mapping"), part(pretrained, "quantization")
    plugins, lora = part(build, "plugin_config"), part(build, "lora_config")
    tp_size, pp_size, cp_size = (_size(mapping, name) or 1 for name in ("tp_size", "pp_size", "cp_size"))
    return BuiltEngine(
        directory=directory,
        **_read(config, _text, "version"),
        **_read(pretrained, _text, "dtype"),
        **_read(quantization, _algorithm, "quant_algo", "kv_cache_quant_algo"),
        tp_size=tp_size,
        pp_size=pp_size,
        cp_size=cp_size,
        world_size=_size(mapping, "world_size") or tp_size * pp_size * cp_size,
        **_read(mapping, _size, "moe_tp_size", "moe_ep_size"),
        **_read(build, _size, "max_batch_size", "max_num_tokens", "max_input_len", "max_output_len", "max_beam_width"),
        max_seq_len=_longest(build),
        **_read(build, _text, "kv_cache_type"),
        **_read(plugins, _size, "tokens_per_block"),
        **_read(plugins, _flag, "remove_input_padding", "context_fmha", "use_paged_context_fmha"),
        gather_context_logits=bool(_flag(build, "gather_context_logits")),
        lora=plugins.get("lora_plugin") not in (None, False, "disable"),
        **_read(lora, _size, "max_lora_rank"),
        built_with={**_scalars(build), **_scalars(plugins)},
    )


def check_built_engine(
    config: Config,
    engine: BuiltEngine,
    hardware: Hardware,
    manifest: Manifest | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Compare an engine with the machine and the options before it is loaded; nothing unknown is a mismatch.

    Returns notes, one line each, about flags without effect. Limits that nobody set are the engine's (`built_limits`).
    Raises EngineMismatchError with every mismatch, one line each. `environ` shows whether other machines take part.
    """
    found = _Findings(config)
    found.mismatches += _version(engine, hardware)
    found.mismatches += _gpu_architecture(manifest, hardware)
    found.mismatches += _gpus(config, engine, hardware, environ)
    for compare in (_same, _limits, _lengths, _features):
        compare(engine, found)
    raise_unfit(engine.directory, found.mismatches)
    return list(_flags_without_effect(engine, found))


@dataclass
class _Findings:
    """Mismatches so far. An option is compared once."""

    config: Config
    mismatches: list[str] = field(default_factory=list)
    compared: set[str] = field(default_factory=set)

    def value(self, name: str) -> Any:
        """Return the option's value, and mark it as compared."""
        self.compared.add(name)
        return getattr(self.config.options, name)

    def asked(self, name: str) -> bool:
        """Return whether the user set the value, and not a default or a rule."""
        return self.config.origin(name).is_user

    def above(self, name: str, bound: int | None, of_engine: str) -> None:
        """Add a mismatch for an option that the user set above the engine's `bound`."""
        value = self.value(name)
        if value is not None and bound is not None and value > bound and self.asked(name):
            self.mismatches.append(f"{self.config.format_setting(name)}: the engine's {of_engine} is {bound}")


def _version(engine: BuiltEngine, hardware: Hardware) -> Iterator[str]:
    installed, compiled = release_of(hardware.tensorrt_llm), release_of(engine.version)
    if installed is not None and compiled is not None and installed != compiled:
        yield (
            f"TensorRT-LLM {engine.version} compiled it and {hardware.tensorrt_llm} is installed: an engine is read "
            f"by its own release only; install tensorrt-llm=={compiled}, or use its container"
        )


def _gpu_architecture(manifest: Manifest | None, hardware: Hardware) -> Iterator[str]:
    if manifest is None or not manifest.platform.startswith("sm_"):
        return
    for gpu in dict.fromkeys(hardware.gpus):
        if gpu.architecture not in (None, manifest.platform):
            yield f"it was compiled for {manifest.platform}, and {gpu.name} is {gpu.architecture}"


def _gpus(config: Config, engine: BuiltEngine, hardware: Hardware, environ: Mapping[str, str]) -> Iterator[str]:
    # Triton and DJL Serving have a name each for the number of machines.
    machines = max(("num_nodes", "cluster_size"), key=lambda name: int(getattr(config.options, name)))
    needed, here, nodes = engine.world_size, len(hardware.gpus), getattr(config.options, machines)
    launched = environ.get(LAUNCHED) == "1"
    if needed <= here or (launched and nodes == 1):
        return  # how many GPUs the other machines have is known to their own ranks only
    degrees = f"tensor parallel {engine.tp_size} x pipeline parallel {engine.pp_size}"
    if engine.cp_size > 1:
        degrees += f" x context parallel {engine.cp_size}"
    needs = f"it was compiled for {_gpus_shown(needed)} ({degrees})"
    if not launched:
        yield (
            f"{needs}, and {_visible(here)}; with GPUs of several machines, start the server with trtllm-llmapi-launch"
        )
    elif needed > here * nodes:
        yield f"{needs}, and {_visible(here)} on this machine with {config.format_setting(machines)}"


def _gpus_shown(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _visible(count: int) -> str:
    return f"{_gpus_shown(count)} {'is' if count == 1 else 'are'} visible"


def _same(engine: BuiltEngine, found: _Findings) -> None:
    """Compare options that have to equal the engine's: `max` and `auto` stand for the engine's value."""
    dtype = _DTYPES.get(engine.dtype or "", engine.dtype)
    cache = dtype if engine.kv_cache_quant_algo is None else engine.kv_cache_quant_algo.lower()
    degrees = [(option, getattr(engine, name), f"{name} ") for option, name in _DEGREES.items()]
    for option, compiled, name in (
        *degrees,
        ("dtype", dtype, ""),
        ("kv_cache_dtype", cache, ""),
        ("quant_algo", engine.quant_algo or "NO_QUANT", ""),
        ("kv_cache_quant_algo", engine.kv_cache_quant_algo or "none", ""),
        ("tokens_per_block", engine.tokens_per_block, ""),
    ):
        value = found.value(option)
        if compiled is not None and value not in (None, "max", "auto", compiled) and found.asked(option):
            found.mismatches.append(
                f"{found.config.format_setting(option)}: the engine was compiled with {name}{compiled}"
            )


def _limits(engine: BuiltEngine, found: _Findings) -> None:
    for name in _LIMITS:
        if name != "max_lora_rank" or found.config.options.enable_lora:
            found.above(name, getattr(engine, name), name)
    sequences = "max_num_sequences" if found.value("max_num_sequences") is not None else "max_rolling_batch_size"
    found.above(sequences, engine.max_batch_size, "max_batch_size")


def _lengths(engine: BuiltEngine, found: _Findings) -> None:
    prompt, output = "max_input_len", "max_output_len"
    before = len(found.mismatches)
    longest_prompt = engine.longest_prompt(chunked_prefill=found.config.options.enable_chunked_prefill)
    found.above(prompt, longest_prompt, "longest prompt")
    if engine.max_seq_len is None:
        return
    found.above(output, engine.max_seq_len - 1, "longest output")
    total = found.value(prompt) + found.value(output)
    both = found.asked(prompt) and found.asked(output) and found.value("max_seq_len") is None
    if both and total > engine.max_seq_len and before == len(found.mismatches):
        found.mismatches.append(
            f"{found.config.format_setting(prompt)} and {found.config.format_setting(output)} are {total} tokens "
            f"together: the engine's max_seq_len is {engine.max_seq_len}; lower one of them, or set "
            f"option.max_seq_len={engine.max_seq_len}"
        )


def _features(engine: BuiltEngine, found: _Findings) -> None:
    config = found.config
    for flag, compiled, names in (
        ("use_paged_context_fmha", engine.use_paged_context_fmha is not False, _PAGED_CONTEXT),
        ("gather_context_logits", engine.gather_context_logits, _CONTEXT_LOGITS),
        ("lora_plugin", engine.lora, ("enable_lora",)),
    ):
        found.mismatches += [
            f"{config.format_setting(name)} needs an engine with {flag}, and this one was compiled without"
            for name in names
            if not compiled and found.value(name)
        ]
    if (asked := speculation_of(config)) is not None:
        # 0 for an engine without speculation; it is in no file of early engines.
        drafts = engine.built_with.get("max_draft_len")
        found.compared.add("speculative_decoding_mode")
        if isinstance(drafts, int) and (
            drafts == 0 or (asked.method is not Method.LOOKAHEAD and asked.tokens > drafts)
        ):
            found.mismatches.append(
                f"{asked.setting} needs an engine for {asked.tokens} draft tokens: this one was compiled with "
                f"max_draft_len {drafts}"
            )
    cache = (engine.kv_cache_type or "PAGED").upper()
    found.compared |= {"max_lora_rank", "kv_cache_type", "paged_kv_cache", *_CONTEXT_LOGITS}
    if cache != "PAGED" and config.options.batching_type is not BatchingType.STATIC:
        found.mismatches.append(f"its KV cache is {cache}, and in-flight batching needs a paged one")


def _flags_without_effect(engine: BuiltEngine, found: _Findings) -> Iterator[str]:
    """Yield a note for each option of the build whose value is another than the engine was compiled with."""
    config = found.config
    for name in sorted(config.user_set - found.compared - {*_RUNTIME}):
        if name not in engine.built_with:
            if is_of_build(name):
                yield f"{config.format_setting(name)} has no effect: the engine is compiled already"
            continue
        asked, compiled = _flag_text(getattr(config.options, name)), _flag_text(engine.built_with[name])
        if asked.lower() != compiled.lower():
            yield f"{config.format_setting(name)} has no effect: the engine was compiled with {name}={compiled}"


def _flag_text(value: Any) -> str:
    text = as_text(value)
    return "none" if text in ("", "disable") else text


def _read(config: Mapping[str, Any], read: Callable[[Mapping[str, Any], str], Any], *names: str) -> dict[str, Any]:
    return {name: read(config, name) for name in names}


def _text(config: Mapping[str, Any], name: str) -> str | None:
    value = config.get(name)
    return None if value is None else str(value)


def _algorithm(config: Mapping[str, Any], name: str) -> str | None:
    value = _text(config, name)
    return None if value in (None, "", "NO_QUANT") else value


def _size(config: Mapping[str, Any], name: str) -> int | None:
    return first_positive(config, (name,))


def _longest(build: Mapping[str, Any]) -> int | None:
    """The tokens of the longest sequence. TensorRT-LLM before 0.11 writes the longest prompt and the longest output."""
    prompt, output = _size(build, "max_input_len"), _size(build, "max_output_len")
    total = None if prompt is None or output is None else prompt + output
    return _size(build, "max_seq_len") or total


def _flag(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    return None if value is None else value in (True, 1, "enable")


def _scalars(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not isinstance(value, dict | list)}


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
    """Return whether prompts are split, as they are for an engine whose longest prompt exceeds an iteration."""
    if config.is_set("enable_chunked_prefill"):
        return config.options.enable_chunked_prefill
    if not engine.use_paged_context_fmha or not engine.packed:
        return False
    return (engine.max_input_len or 0) > (engine.max_num_tokens or engine.max_input_len or 0)


def _bound(name: str, values: Mapping[str | None, int | None]) -> Bound | None:
    """The least of `values`, keyed by the option that each follows from."""
    known = [Bound(value, name, option) for option, value in values.items() if value is not None]
    return min(known, key=lambda bound: bound.value, default=None)


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)
