"""Derived values: what configuration, model files and machine come to."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from djl_trtllm.config import Backend, Config, DType, Quantization
from djl_trtllm.engine.backend import choose_backend
from djl_trtllm.engine.cache import cache_key
from djl_trtllm.engine.citing import cited
from djl_trtllm.engine.file_hashes import FileHashes
from djl_trtllm.engine.hardware import Hardware
from djl_trtllm.engine.identity import checkpoint_identity
from djl_trtllm.engine.kv_cache import BLOCK_TOKENS, KvCachePlan, plan_kv_cache, shown_bytes
from djl_trtllm.engine.manifest import OptionValue, compiler_versions
from djl_trtllm.engine.spec import CompileSpec
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import Kind, Layout, ModelShape
from djl_trtllm.model.weights import read_header

_MANY_SEQUENCES = 256
_BATCHED_TOKENS = 256
_BATCHED_TOKENS_OF_MANY = 512
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_NO_COUNTERPART = {
    Quantization.SMOOTHQUANT: "OpenVINO has no 8-bit activations for this; option.quantize=int8 (weights only) is "
    "its nearest, or serve with TensorRT-LLM on a GPU",
    Quantization.FP8: "CPUs have no 8-bit floating point arithmetic; option.quantize=int8 takes the same memory, or "
    "serve with TensorRT-LLM on a GPU",
}


@dataclass(frozen=True)
class EnginePlan:
    """How one model is compiled and run. Made by `plan_engine`.

    `source` is the checkpoint or engine directory. `dtype` (fp32, fp16, bf16) and `quantize` (none, int8, int4, awq)
    are what its weights become, `asked` those of them that the user set. `max_seq_len`, `max_num_batched_tokens` are in
    tokens. `notes` tell what was changed and why, one line each, for the log. `kv_cache` is None where the engine has
    none of ours to size, and in a plan for compiling only. `hash_store` is a folder for remembered file hashes.
    """

    backend: Backend
    reason: str
    source: Path
    tokenizer_dir: Path
    dtype: str
    quantize: str
    asked: Mapping[str, OptionValue]
    trust_remote_code: bool
    max_sequences: int
    max_seq_len: int
    max_num_batched_tokens: int
    kv_cache: KvCachePlan | None
    enable_prefix_caching: bool
    num_threads: int | None
    notes: tuple[str, ...] = ()
    engine_dir: Path | None = None
    hash_store: Path | None = None

    @property
    def build_options(self) -> dict[str, OptionValue]:
        """Every option that changes the compiled engine."""
        return {"dtype": self.dtype, "quantize": self.quantize, "trust_remote_code": self.trust_remote_code}

    @cached_property
    def checkpoint_identity(self) -> str:
        """Content identity of the checkpoint; reads all of it the first time (see `FileHashes`). Raises ModelError."""
        return checkpoint_identity(self.source, self.tokenizer_dir, FileHashes(self.hash_store))

    @property
    def cache_key(self) -> str:
        """Name of this plan's engine in a cache. Raises ModelError."""
        return cache_key(
            backend=self.backend.value,
            checkpoint=self.checkpoint_identity,
            options=self.build_options,
            versions=compiler_versions(),
            platform=platform.machine(),
        )

    def compile_spec(self, out: Path) -> CompileSpec:
        """What the compiler subprocess is told."""
        return CompileSpec(
            checkpoint=str(self.source.resolve()),
            tokenizer_dir=str(self.tokenizer_dir.resolve()),
            out=str(out.resolve()),
            dtype=self.dtype,
            quantize=self.quantize,
            trust_remote_code=self.trust_remote_code,
        )

    def at(self, engine_dir: Path) -> EnginePlan:
        """This plan with the engine that `prepare` made or found."""
        return replace(self, engine_dir=engine_dir)

    def executor_options(self) -> dict[str, Any]:
        """What the OpenVINO executor is started with. Raises ValueError before `at()` gave the engine's place."""
        if self.engine_dir is None or self.kv_cache is None:
            raise ValueError("the plan has no engine yet: use plan.at(engine.path)")
        return {
            "engine_dir": str(self.engine_dir),
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_kv_blocks": self.kv_cache.blocks,
            "enable_prefix_caching": self.enable_prefix_caching,
            "kv_cache_precision": self.kv_cache.precision,
            # With the plugin's own choice (bf16 on some CPUs) greedy output is no longer that of transformers.
            "inference_precision": "f32",
            "num_threads": self.num_threads,
            "max_sequences": self.max_sequences,
            "max_seq_len": self.max_seq_len,
        }

    def describe(self) -> str:
        """One line for the log: the backend, why, and the sizes."""
        line = f"backend {self.backend}: {self.reason}"
        if self.kv_cache is None:
            return line
        size = self.kv_cache.block_bytes
        memory = "" if size is None else f", {shown_bytes(self.kv_cache.blocks * size)}"
        return (
            f"{line}; KV cache {self.kv_cache.blocks} blocks of {BLOCK_TOKENS} tokens in {self.kv_cache.precision}"
            f"{memory} ({self.kv_cache.reason}); up to {self.max_sequences} sequences of {self.max_seq_len} tokens, "
            f"{self.max_num_batched_tokens} tokens per step"
        )


def plan_engine(
    config: Config, layout: Layout, hardware: Hardware | None = None, *, compile_only: bool = False
) -> EnginePlan:
    """Derive the plan; reads headers of weight files, never weights. `hardware` defaults to this machine.

    With `compile_only` the KV cache is not planned, because the engine may run on another machine. Raises EngineError
    where the backend cannot run here, ConfigError (all problems at once) for options that it cannot honour, and
    LayoutError for damaged weight files.
    """
    hardware = Hardware.probe() if hardware is None else hardware
    backend, reason = choose_backend(config, layout, hardware)
    options = config.options
    shape = layout.shape
    problems: list[str] = []
    notes: list[str] = []
    dtype, quantize = _weight_format(config, layout, shape, backend, problems)
    max_seq_len = _max_seq_len(config, shape, notes)
    max_sequences = min(options.max_rolling_batch_size, options.max_num_sequences or options.max_rolling_batch_size)
    batched_tokens, max_sequences = _batched_tokens(config, max_sequences, notes)
    kv_cache = None
    if backend is Backend.OPENVINO and not compile_only:
        try:
            kv_cache = plan_kv_cache(
                config,
                shape,
                max_seq_len=max_seq_len,
                max_sequences=max_sequences,
                available_memory=max(0, hardware.available_memory - _weight_bytes(layout, shape)),
            )
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    if kv_cache is not None and kv_cache.longest_sequence < max_seq_len:
        notes.append(
            f"the longest sequence is {kv_cache.longest_sequence} tokens and not {max_seq_len}: more does not fit in "
            f"the KV cache of {kv_cache.blocks} blocks ({kv_cache.reason})"
        )
        max_seq_len = kv_cache.longest_sequence
    return EnginePlan(
        backend=backend,
        reason=reason,
        source=layout.path,
        tokenizer_dir=layout.tokenizer_dir or layout.path,
        dtype=dtype,
        quantize=quantize,
        asked=_asked(config, dtype, quantize),
        trust_remote_code=options.trust_remote_code,
        max_sequences=max_sequences,
        max_seq_len=max_seq_len,
        max_num_batched_tokens=batched_tokens,
        kv_cache=kv_cache,
        enable_prefix_caching=options.enable_kv_cache_reuse,
        num_threads=options.inference_num_threads,
        notes=tuple(notes),
        engine_dir=layout.engine_dir if layout.kind.is_engine else None,
        hash_store=config.engine_cache_dir / "hashes",
    )


def _weight_format(
    config: Config, layout: Layout, shape: ModelShape, backend: Backend, problems: list[str]
) -> tuple[str, str]:
    options = config.options
    if backend is Backend.OPENVINO and options.quantize in _NO_COUNTERPART:
        problems.append(
            f"{cited(config, 'quantize')} is not available with OpenVINO: {_NO_COUNTERPART[options.quantize]}"
        )
    if options.dtype is not DType.AUTO:
        dtype = options.dtype.value
    else:
        dtype = _DTYPES.get(shape.dtype or "") or _stored_dtype(layout) or "fp16"
    return dtype, "none" if options.quantize is None else options.quantize.value


def _stored_dtype(layout: Layout) -> str | None:
    if layout.kind is not Kind.HF_CHECKPOINT or layout.weight_files[0].suffix != ".safetensors":
        return None
    stored = (entry.get("dtype") for entry in read_header(layout.weight_files[0]).values() if "dtype" in entry)
    return next((_DTYPES[name] for name in stored if name in _DTYPES), None)


def _weight_bytes(layout: Layout, shape: ModelShape) -> int:
    if shape.parameter_bytes is not None:
        return shape.parameter_bytes
    return sum(path.stat().st_size for path in layout.weight_files)


def _asked(config: Config, dtype: str, quantize: str) -> dict[str, OptionValue]:
    asked: dict[str, OptionValue] = {}
    if config.options.dtype is not DType.AUTO:
        asked["dtype"] = dtype
    if config.is_set("quantize"):
        asked["quantize"] = quantize
    return asked


def _max_seq_len(config: Config, shape: ModelShape, notes: list[str]) -> int:
    options = config.options
    wanted = options.max_seq_len or options.max_input_len + options.max_output_len
    context = shape.max_position_embeddings
    if context is None or wanted <= context:
        return wanted
    name = "max_seq_len" if options.max_seq_len else "max_input_len"
    if config.is_set(name) or config.is_set("max_output_len"):
        notes.append(
            f"the longest sequence is {context} tokens, the model's context, and not {wanted} as from "
            + (
                cited(config, name)
                if options.max_seq_len
                else f"{cited(config, name)} and {cited(config, 'max_output_len')}"
            )
        )
    return context


def _batched_tokens(config: Config, max_sequences: int, notes: list[str]) -> tuple[int, int]:
    """Tokens per step, and sequences: a decoding step takes a token of each, so the first is never below the second."""
    asked = config.options.max_num_tokens
    if asked is None:
        floor = _BATCHED_TOKENS_OF_MANY if max_sequences > _MANY_SEQUENCES else _BATCHED_TOKENS
        return max(floor, max_sequences), max_sequences
    if max_sequences > asked:
        notes.append(
            f"{asked} sequences run at once and not {max_sequences}: {cited(config, 'max_num_tokens')} is the most "
            "tokens of a step, and a step takes one of each sequence"
        )
    return asked, min(max_sequences, asked)
