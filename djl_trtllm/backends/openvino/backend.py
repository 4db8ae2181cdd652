"""OpenVINO as a backend: on the CPU, for Hugging Face checkpoints and its own compiled engines.

A model that embeds or scores has a plan of its own.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import structs

from djl_trtllm.backends.base import Built, EngineBackend, Offer, PrefixCache
from djl_trtllm.backends.effects import Effects, read_effects, refusals
from djl_trtllm.backends.openvino.compile import COMPILER, OpenVinoSpec, check_engine, takes_images
from djl_trtllm.backends.openvino.kv_cache import BLOCK_TOKENS, KvCachePlan, plan_kv_cache
from djl_trtllm.backends.speculation import planned_speculation
from djl_trtllm.config import Backend, Config, DType, KvCacheDType, Task
from djl_trtllm.config.rules import most_images
from djl_trtllm.config.sources import OriginKind
from djl_trtllm.config.speculation import Method, Speculation
from djl_trtllm.engines.cache import MANIFEST_FILE, Manifest, OptionValue, installed_versions
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import (
    DRAFT_FOLDER,
    EnginePlan,
    asked_options,
    planned_length,
    planned_sequences,
    planned_text_length,
    shared_fields,
)
from djl_trtllm.errors import ConfigError, EngineError
from djl_trtllm.model import Layout, ModelKind, ModelShape
from djl_trtllm.model.checkpoint import read_header
from djl_trtllm.model.pooling import Head, find_head, find_task
from djl_trtllm.model.vision import Vision
from djl_trtllm.progress import format_bytes

_VERSIONS = ("openvino", "openvino-genai", "optimum-intel", "nncf", "djl-trtllm")
_RUNTIME = ("openvino", "openvino-genai")
_LOOKUP_NGRAM = 3
# With the plugin's own choice (bf16 on some CPUs) greedy output is no longer that of transformers.
_PRECISION = "f32"


@dataclass(frozen=True, kw_only=True)
class CompiledPlan(EnginePlan):
    """The base of all plans of OpenVINO.

    `dtype` (fp32, fp16, bf16) and `quantize` (none, int8, int4, awq) are the format and the compression of its weights.
    An iteration takes at most `max_num_batched_tokens` tokens.
    """

    dtype: str
    quantize: str
    max_num_batched_tokens: int = 0
    num_threads: int | None = None

    compiler = COMPILER

    @property
    def build_options(self) -> dict[str, OptionValue]:
        options: dict[str, OptionValue] = {
            "dtype": self.dtype,
            "quantize": self.quantize,
            "trust_remote_code": self.trust_remote_code,
        }
        return options if self.task is Task.GENERATE else options | {"task": self.task.value}

    @property
    def recipe(self) -> str:
        return f"weights {self.dtype if self.quantize == 'none' else f'{self.quantize} (the rest {self.dtype})'}"

    @property
    def served_with(self) -> dict[str, OptionValue]:
        served: dict[str, OptionValue] = {"dtype": self.dtype}
        return served if self.quantize == "none" else served | {"quantize": self.quantize}

    @property
    def versions(self) -> dict[str, str]:
        return installed_versions(_VERSIONS)

    @property
    def platform(self) -> str:
        return platform.machine()

    def compile_spec(self, out: Path) -> OpenVinoSpec:
        return OpenVinoSpec(
            checkpoint=str(self.source.resolve()),
            tokenizer_dir=str(self.tokenizer_dir.resolve()),
            out=str(out.resolve()),
            dtype=self.dtype,
            quantize=self.quantize,
            trust_remote_code=self.trust_remote_code,
            purpose=self.task.value,
        )

    def check_whole(self, directory: Path) -> Manifest | None:
        return check_engine(directory)

    def check_fit(self, directory: Path, manifest: Manifest | None) -> None:
        if manifest is not None:
            # The machine's architecture is not compared: OpenVINO's IR is the same on all of them.
            manifest.require_fit(
                directory, backend=self.backend.value, options=self.asked, versions=installed_versions(_RUNTIME)
            )

    def require_runtime(self) -> None:
        """Raise EngineError where OpenVINO is not installed."""
        if find_spec("openvino_genai") is None:
            raise EngineError(
                f"backend {self.backend} ({self.reason}): OpenVINO GenAI is not installed, which runs its engines; "
                "install it (pip install 'djl-trtllm[cpu]'), use the image for CPUs, or serve the Hugging Face "
                "checkpoint with TensorRT-LLM on a GPU"
            )


@dataclass(frozen=True, kw_only=True)
class PoolingPlan(CompiledPlan):
    """The plan of a model that embeds or scores."""

    executor = "djl_trtllm.backends.openvino.pooling_executor:OpenVinoPoolingExecutor"

    def executor_options(self) -> dict[str, Any]:
        if self.engine_dir is None or self.head is None:
            raise ValueError("the plan has no engine yet: use plan.at(directory)")
        self.require_runtime()
        return {
            "engine_dir": str(self.engine_dir),
            "pooled": self.head.pooled.value,
            "pad_id": self.head.pad_id,
            "inference_precision": _PRECISION,
            "num_threads": self.num_threads,
            **self.pooling_options(self.max_num_batched_tokens),
        }

    def describe(self) -> str:
        return f"{super().describe()}, {self.max_num_batched_tokens} tokens per iteration"


@dataclass(frozen=True, kw_only=True)
class OpenVinoPlan(CompiledPlan):
    """The plan of a model that generates.

    `kv_cache` is None in a plan for compiling only, as that of a draft model is. `limits` are the options that an
    engine is served with if it is copied without its serving.properties. With `keeps_keys_apart`, prompts of several
    API keys share nothing in the prefix cache.
    """

    kv_cache: KvCachePlan | None = None
    enable_prefix_caching: bool = False
    scores_prompts: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)
    keeps_keys_apart: bool = False
    speculation: Speculation | None = None
    images: bool = False
    """Whether it is compiled with the parts that read images."""

    executor = "djl_trtllm.backends.openvino.executor:OpenVinoExecutor"

    @property
    def build_options(self) -> dict[str, OptionValue]:
        return super().build_options | ({"images": True} if self.images else {})

    @property
    def served_with(self) -> dict[str, OptionValue]:
        served = super().served_with
        if self.draft is not None and self.speculation is not None:
            served |= {"speculative_draft_model": DRAFT_FOLDER, "speculative_length": self.speculation.tokens}
        return served

    def compile_spec(self, out: Path) -> OpenVinoSpec:
        return structs.replace(super().compile_spec(out), images=self.images)

    @property
    def built_limits(self) -> dict[str, int]:
        return dict(self.limits)

    def executor_options(self) -> dict[str, Any]:
        if self.engine_dir is None or self.kv_cache is None:
            raise ValueError("the plan has no engine yet: use plan.at(directory)")
        self.require_runtime()
        return {
            "engine_dir": str(self.engine_dir),
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_kv_blocks": self.kv_cache.blocks,
            "enable_prefix_caching": self.enable_prefix_caching,
            "keeps_keys_apart": self.keeps_keys_apart,
            "scores_prompts": self.scores_prompts,
            "kv_cache_precision": self.kv_cache.precision,
            "inference_precision": _PRECISION,
            "num_threads": self.num_threads,
            "max_sequences": self.max_sequences,
            "max_seq_len": self.max_seq_len,
            **self._speculating(),
        }

    def _speculating(self) -> dict[str, Any]:
        """The executor's options of speculation."""
        if self.speculation is None:
            return {}
        if self.draft is None:
            return {"draft_tokens": self.speculation.tokens, "lookup_ngram": self.speculation.ngram or _LOOKUP_NGRAM}
        return {"draft_tokens": self.speculation.tokens, "draft_dir": str(self.draft.engine_dir)}

    def describe(self) -> str:
        line = super().describe()
        if self.kv_cache is None:
            return line
        size = self.kv_cache.block_bytes
        memory = "" if size is None else f", {format_bytes(self.kv_cache.blocks * size)}"
        return (
            f"{line}; KV cache {self.kv_cache.blocks} blocks of {BLOCK_TOKENS} tokens in {self.kv_cache.precision}"
            f"{memory} ({self.kv_cache.reason}); up to {self.max_sequences} sequences of {self.max_seq_len} tokens, "
            f"{self.max_num_batched_tokens} tokens per step"
        )


_LOADED = (ModelKind.HF_CHECKPOINT, ModelKind.OPENVINO_ENGINE)
_SPECULATES = (Method.NGRAM, Method.DRAFT)
_REUSE = "OpenVINO GenAI may end then"
_NO_REUSE = "the prompts of different keys cannot be kept apart where OpenVINO GenAI tokenises them"
_MANY_SEQUENCES = 256
_BATCHED_TOKENS = 256
_BATCHED_TOKENS_OF_MANY = 512
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_WITHOUT_ATTENTION = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"})
_POOLED_TOKENS = 1024
_SEND_SECONDS = 0.004
"""The seconds for which output is collected: a message costs the server as much as several tokens, on a core that the
engine's threads wait for."""

EFFECTS: Effects = read_effects(__package__, "openvino")
"""The option map of OpenVINO GenAI's continuous batching pipeline (`option.backend=openvino`)."""


class OpenVinoBackend(EngineBackend):
    """The `EngineBackend` of OpenVINO."""

    effects: Mapping[str, Effects] = MappingProxyType({Backend.OPENVINO.value: EFFECTS})
    automatic = (Backend.OPENVINO.value,)
    tasks = frozenset({Task.GENERATE, Task.EMBED, Task.SCORE})
    has_gpus = False

    def inspect(self, hardware: Hardware) -> Hardware:
        return replace(hardware, openvino=find_spec("openvino_genai") is not None)

    def accept(self, backend: Backend, setting: str, layout: Layout, hardware: Hardware) -> str:
        if layout.kind not in _LOADED:
            raise EngineError(
                f"{setting}: {layout.path} is a {layout.kind.value}, and OpenVINO cannot load it; serve the Hugging "
                "Face checkpoint it was made from"
            )
        return _own_engine(layout) or setting

    def offer(self, layout: Layout, hardware: Hardware) -> Offer:
        if layout.kind not in _LOADED:
            return Offer(None, f"OpenVINO cannot load a {layout.kind.value}")
        return Offer(Backend.OPENVINO, _own_engine(layout))

    def usual(self, hardware: Hardware) -> Backend:
        return Backend.OPENVINO

    def prefix_cache(self, backend: Backend, hardware: Hardware) -> PrefixCache | None:
        return PrefixCache("OpenVINO", separate=True)

    def built(self, config: Config, layout: Layout) -> Built | None:
        return built_limits(config, layout.path) if layout.kind is ModelKind.OPENVINO_ENGINE else None

    def plan(
        self, config: Config, layout: Layout, hardware: Hardware, backend: Backend, reason: str, *, compile_only: bool
    ) -> CompiledPlan:
        """Derive the plan.

        Raises ConfigError (all problems at once), LayoutError for damaged weight files, and EngineError for models that
        compile and do not run.
        """
        options = config.options
        if (task := find_task(options.task, layout)) is not Task.GENERATE:
            return self._pooling_plan(config, layout, backend, reason, find_head(task, layout))
        shape = layout.shape
        if shape.model_type in _WITHOUT_ATTENTION:
            raise EngineError(
                f"{layout.path} is a {shape.model_type} model, which has no attention: OpenVINO compiles it, and its "
                "continuous batching, which pages the KV cache of attention layers, cannot run it; serve it with "
                "TensorRT-LLM on a GPU, if that has it"
            )
        problems = refusals(config, EFFECTS, "OpenVINO")
        notes: list[str] = []
        max_seq_len = planned_length(config, shape, notes)
        if options.rotary_scaling_type == "dynamic" and not layout.kind.is_engine:
            notes.append(
                f"{config.format_setting('rotary_scaling_type')} has no effect: the export has the frequencies of "
                "short texts, so texts beyond the checkpoint's own context lose quality; use "
                "option.rotary_scaling_type=linear, which an export can have"
            )
        batched_tokens, max_sequences = _batched_tokens(config, planned_sequences(config), notes)
        speculation, draft = self._speculation(config, layout, hardware, backend, problems)
        images = _planned_images(config, layout, speculation, problems, notes)
        reuse = options.enable_kv_cache_reuse and draft is None and not images
        if options.enable_kv_cache_reuse and not reuse and config.is_set("enable_kv_cache_reuse"):
            why = f"images: {_NO_REUSE}" if images else f"a draft model: {_REUSE}"
            notes.append(f"{config.format_setting('enable_kv_cache_reuse')} has no effect with {why}")
        batched_tokens = _speculated_tokens(config, speculation, batched_tokens, max_sequences, max_seq_len, problems)
        weights = sum(_weight_bytes(each, each.shape) for each in (layout, layout.draft) if each is not None)
        longest = max_seq_len + (0 if speculation is None else speculation.tokens)
        kv_cache = None
        if not compile_only and options.kv_cache_dtype is not KvCacheDType.FP8:
            try:
                kv_cache = plan_kv_cache(
                    config,
                    shape,
                    max_seq_len=longest,
                    max_sequences=max_sequences,
                    available_memory=max(0, hardware.available_memory - weights),
                    draft=None if layout.draft is None else layout.draft.shape,
                )
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        if kv_cache is not None and kv_cache.longest_sequence < longest:
            max_seq_len, asked = kv_cache.longest_sequence - (longest - max_seq_len), max_seq_len
            notes.append(
                f"the longest sequence is {max_seq_len} tokens and not {asked}: more does not fit "
                f"in the KV cache of {kv_cache.blocks} blocks ({kv_cache.reason})"
            )
        return OpenVinoPlan(
            **_compiled_fields(config, layout, backend, reason),
            max_sequences=max_sequences,
            max_seq_len=max_seq_len,
            max_input_len=options.max_input_len,
            max_num_batched_tokens=batched_tokens,
            kv_cache=kv_cache,
            enable_prefix_caching=reuse,
            keeps_keys_apart=options.api_keys_file is not None,
            scores_prompts=not images and _fits_twice(hardware, weights, kv_cache),
            send_interval=_SEND_SECONDS if options.stream_interval == "auto" else 0.0,
            limits=_limits(config, max_sequences, max_seq_len),
            notes=tuple(notes),
            speculation=speculation,
            draft=draft,
            images=images,
        )

    def _pooling_plan(self, config: Config, layout: Layout, backend: Backend, reason: str, head: Head) -> PoolingPlan:
        options = config.options
        notes: list[str] = []
        # A model that pools has no KV cache, so an option of that is no reason to refuse it.
        if problems := refusals(config, {"quantize": EFFECTS["quantize"]}, "OpenVINO"):
            raise ConfigError(problems)
        length = planned_text_length(config, layout.shape, head, notes)
        return PoolingPlan(
            **_compiled_fields(config, layout, backend, reason),
            task=head.task,
            max_sequences=planned_sequences(config),
            max_seq_len=length,
            max_input_len=length,
            max_num_batched_tokens=options.max_num_tokens or _POOLED_TOKENS,
            notes=tuple(notes),
            head=head,
        )

    def _speculation(
        self, config: Config, layout: Layout, hardware: Hardware, backend: Backend, problems: list[str]
    ) -> tuple[Speculation | None, OpenVinoPlan | None]:
        """The speculation of the model, and the plan of its draft model; adds to `problems`."""
        try:
            speculation = planned_speculation(config, layout, "OpenVINO", _SPECULATES)
        except ConfigError as error:
            problems += error.problems
            return None, None
        draft = layout.draft
        if speculation is None or draft is None:
            return speculation, None
        reason = self.accept(backend, speculation.setting, draft, hardware)
        compiled = _compiled_fields(config, draft, backend, reason)
        # The model's executor runs it, so it has no limits of its own.
        return speculation, OpenVinoPlan(**compiled, max_sequences=0, max_seq_len=0, max_input_len=0)


def _planned_images(
    config: Config, layout: Layout, speculation: Speculation | None, problems: list[str], notes: list[str]
) -> bool:
    """Whether the engine is, or becomes, one with the parts that read images; adds to `problems` and `notes`."""
    asked = most_images(config.options.limit_mm_per_prompt) > 0
    if layout.kind is ModelKind.OPENVINO_ENGINE:
        images = takes_images(layout.path)
    else:
        images = asked and Vision.find(layout.path, layout.config) is not None
    if images and speculation is not None:
        problems.append(
            f"{speculation.setting}: OpenVINO GenAI speculates for texts only; set option.limit_mm_per_prompt="
            '{"image": 0} to compile the model without images, or leave speculation out'
        )
    if asked and not images and config.is_set("limit_mm_per_prompt"):
        notes.append(f"{config.format_setting('limit_mm_per_prompt')} has no effect: this model takes text only")
    return images


def _compiled_fields(config: Config, layout: Layout, backend: Backend, reason: str) -> dict[str, Any]:
    """The fields that each plan of OpenVINO derives from configuration and files."""
    quantize = config.options.quantize
    return {
        **shared_fields(config, layout),
        "backend": backend,
        "reason": reason,
        "dtype": _dtype(config, layout),
        "quantize": "none" if quantize is None else quantize.value,
        "asked": asked_options(config),
        "num_threads": config.options.inference_num_threads,
    }


def _own_engine(layout: Layout) -> str:
    return f"{layout.path} is a {layout.kind.value}" if layout.kind is ModelKind.OPENVINO_ENGINE else ""


def _limits(config: Config, max_sequences: int, max_seq_len: int) -> dict[str, int]:
    options = config.options
    limits = {
        "max_rolling_batch_size": max_sequences,
        "max_input_len": min(options.max_input_len, max_seq_len - 1),
        "max_output_len": min(options.max_output_len, max_seq_len - 1),
        "max_seq_len": max_seq_len,
    }
    return limits if options.max_num_tokens is None else limits | {"max_num_tokens": options.max_num_tokens}


def _dtype(config: Config, layout: Layout) -> str:
    if config.options.dtype is not DType.AUTO:
        return str(config.options.dtype)
    return _DTYPES.get(layout.shape.dtype or "") or _stored_dtype(layout) or "fp16"


def _stored_dtype(layout: Layout) -> str | None:
    if layout.kind is not ModelKind.HF_CHECKPOINT or not layout.weight_files:
        return None
    if layout.weight_files[0].suffix != ".safetensors":
        return None
    stored = (tensor.dtype for tensor in read_header(layout.weight_files[0]).values())
    return next((_DTYPES[name] for name in stored if name in _DTYPES), None)


def _weight_bytes(layout: Layout, shape: ModelShape) -> int:
    if shape.parameter_bytes is not None:
        return shape.parameter_bytes
    return sum(path.stat().st_size for path in layout.weight_files)


def _fits_twice(hardware: Hardware, weights: int, kv_cache: KvCachePlan | None) -> bool:
    """Whether memory has room to load the model a second time for log-probabilities of prompts: in 32 bits, and twice.

    `weights` (bytes) include those of a draft model.
    """
    if kv_cache is None or kv_cache.block_bytes is None:
        return False
    return 4 * weights + kv_cache.blocks * kv_cache.block_bytes <= hardware.available_memory


def _batched_tokens(config: Config, max_sequences: int, notes: list[str]) -> tuple[int, int]:
    """Tokens per step, and sequences; at least as many tokens, because a decoding step takes one of each."""
    asked = config.options.max_num_tokens
    if asked is None:
        floor = _BATCHED_TOKENS_OF_MANY if max_sequences > _MANY_SEQUENCES else _BATCHED_TOKENS
        return max(floor, max_sequences), max_sequences
    if max_sequences > asked:
        notes.append(
            f"{asked} sequences run at once and not {max_sequences}: {config.format_setting('max_num_tokens')} is the "
            "most tokens of a step, and a step takes one of each sequence"
        )
    return asked, min(max_sequences, asked)


def _speculated_tokens(
    config: Config, asked: Speculation | None, tokens: int, max_sequences: int, max_seq_len: int, problems: list[str]
) -> int:
    """Tokens per step, with those that are verified; adds to `problems`.

    With a draft model a step must have room for a whole prompt: OpenVINO GenAI (2026.4) gives wrong output where it
    reads a prompt in parts.
    """
    if asked is None:
        return tokens
    least = max_sequences * (1 + asked.tokens) + (0 if asked.model is None else max_seq_len)
    if config.options.max_num_tokens is None:
        return max(tokens, least)
    if asked.model is not None and tokens < least:
        problems.append(
            f"{config.format_setting('max_num_tokens')}: with a draft model a step reads whole prompts and verifies "
            f"{asked.tokens} tokens of each sequence: expected at least {least}, or lower option.max_seq_len or "
            "option.max_rolling_batch_size"
        )
    return tokens


def built_limits(config: Config, engine_dir: Path) -> Built | None:
    """The limits in the engine's manifest; None without one.

    OpenVINO's files have no limits, so these are defaults and no bounds: lengths that the user raises above them count.
    Raises EngineMismatchError for a damaged manifest.
    """
    manifest = Manifest.read(engine_dir)
    if manifest is None or not manifest.limits:
        return None
    limits = {name: value for name, value in manifest.limits.items() if not _widened(config, name, value)}
    longest, asked = manifest.limits.get("max_seq_len", 0), config.options
    if not config.is_set("max_seq_len"):
        if any(name not in limits and getattr(asked, name) >= longest for name in ("max_input_len", "max_output_len")):
            limits.pop("max_seq_len", None)
    elif asked.max_seq_len and asked.max_seq_len > longest:
        limits = {name: value for name, value in limits.items() if name not in ("max_input_len", "max_output_len")}
    if "max_rolling_batch_size" in limits and asked.max_num_sequences is not None:
        if config.is_set("max_num_sequences"):
            limits["max_rolling_batch_size"] = min(limits["max_rolling_batch_size"], asked.max_num_sequences)
        else:
            limits["max_num_sequences"] = limits["max_rolling_batch_size"]
    return Built(f"limits in {engine_dir / MANIFEST_FILE}", limits)


def _widened(config: Config, name: str, built: int) -> bool:
    """Return whether the user set the option, or raised it above the engine's limit by max_num_tokens."""
    if config.is_set(name):
        return True
    origin = config.origin(name)
    raised = origin.kind is OriginKind.DERIVED and not origin.is_preset
    return raised and getattr(config.options, name) > built
