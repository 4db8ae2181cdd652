"""The plans by which OpenVINO compiles and runs a model, one that generates and one that embeds or scores."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import structs

from djl_trtllm.backends.openvino.compile import COMPILER, OpenVinoSpec, check_engine
from djl_trtllm.backends.openvino.kv_cache import BLOCK_TOKENS, KvCachePlan
from djl_trtllm.config import Task
from djl_trtllm.config.speculation import Speculation
from djl_trtllm.engines.cache import Manifest, OptionValue, installed_versions
from djl_trtllm.engines.plan import DRAFT_FOLDER, EnginePlan
from djl_trtllm.errors import EngineError
from djl_trtllm.model.pooling import Head
from djl_trtllm.progress import format_bytes

_VERSIONS = ("openvino", "openvino-genai", "optimum-intel", "nncf", "djl-trtllm")
_RUNTIME = ("openvino", "openvino-genai")
_LOOKUP_NGRAM = 3
# With the plugin's own choice (bf16 on some CPUs) greedy output is no longer that of transformers.
_PRECISION = "f32"


@dataclass(frozen=True, kw_only=True)
class CompiledPlan(EnginePlan):
    """The base of all plans of OpenVINO.

    `dtype` (fp32, fp16, bf16) and `quantize` (none, int8, int4, awq) are what its weights become. An iteration takes at
    most `max_num_batched_tokens` tokens.
    """

    dtype: str
    quantize: str
    max_num_batched_tokens: int
    num_threads: int | None

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
    """The plan of a model that embeds or scores; `head` says how."""

    head: Head

    executor = "djl_trtllm.backends.openvino.pooling_executor:OpenVinoPoolingExecutor"

    def executor_options(self) -> dict[str, Any]:
        if self.engine_dir is None:
            raise ValueError("the plan has no engine yet: use plan.at(engine.path)")
        self.require_runtime()
        return {
            "engine_dir": str(self.engine_dir),
            "task": self.task.value,
            "pooled": self.head.pooled.value,
            "activates": self.head.activates,
            "pad_id": self.head.pad_id,
            "inference_precision": _PRECISION,
            "num_threads": self.num_threads,
            "max_sequences": self.max_sequences,
            "max_seq_len": self.max_seq_len,
            "max_num_tokens": self.max_num_batched_tokens,
        }

    def describe(self) -> str:
        return (
            f"{super().describe()}; {self.head.describe()}; texts of up to {self.max_seq_len} tokens, "
            f"{self.max_num_batched_tokens} tokens per iteration"
        )


@dataclass(frozen=True, kw_only=True)
class OpenVinoPlan(CompiledPlan):
    """The plan of a model that generates.

    `kv_cache` is None in a plan for compiling only. `limits` are the options that an engine is served with if it is
    copied without its serving.properties. With `keeps_keys_apart`, prompts of several API keys share nothing in the
    prefix cache.
    """

    kv_cache: KvCachePlan | None
    enable_prefix_caching: bool
    scores_prompts: bool
    limits: Mapping[str, int]
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
            raise ValueError("the plan has no engine yet: use plan.at(engine.path)")
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
