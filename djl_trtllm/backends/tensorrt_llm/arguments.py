"""The arguments of TensorRT-LLM's LLM for a configuration, as plain data.

`options` maps options to arguments. `derivations` computes arguments from several options, the model and the machine,
and overrides that map.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from djl_trtllm.backends.effects import Derived, Passed, Target
from djl_trtllm.backends.tensorrt_llm.argument_types import choices
from djl_trtllm.backends.tensorrt_llm.names import all_members, default_of, has, members, owners
from djl_trtllm.backends.tensorrt_llm.options import ENGINE, PYTORCH
from djl_trtllm.config import Backend, Config, DType
from djl_trtllm.config.format_setting import format_setting
from djl_trtllm.config.options.choices import Choice, PluginDType
from djl_trtllm.config.options.registry import OPTIONS

Arguments = dict[str, Any]
"""Keyword arguments of LLM: a configuration object is `{"class": NAME, field: value}`, a member of an enum
`{"enum": NAME, "name": MEMBER}`, everything else is as it is in JSON."""

LLM_OWNERS = {
    Backend.TENSORRT: "LLM.tensorrt",
    Backend.PYTORCH: "LLM.pytorch",
    Backend.AUTODEPLOY: "LLM.autodeploy",
}
"""The LLM of each backend, as the table of names has it."""
_DTYPES = {DType.AUTO: "auto", DType.FP32: "float32", DType.FP16: "float16", DType.BF16: "bfloat16"}
_PLACES = {
    "KvCacheConfig": Target("LLM", "kv_cache_config"),
    "SchedulerConfig": Target("LLM", "scheduler_config"),
    "DynamicBatchConfig": Target("SchedulerConfig", "dynamic_batch_config"),
    "PeftCacheConfig": Target("LLM", "peft_cache_config"),
    "ExtendedRuntimePerfKnobConfig": Target("LLM", "extended_runtime_perf_knob_config"),
    "CudaGraphConfig": Target("LLM", "cuda_graph_config"),
    "TorchCompileConfig": Target("LLM", "torch_compile_config"),
    "MoeConfig": Target("LLM", "moe_config"),
    "BuildConfig": Target("LLM", "build_config"),
    "PluginConfig": Target("BuildConfig", "plugin_config"),
    "QuantConfig": Target("LLM", "quant_config"),
    "CalibConfig": Target("LLM", "calib_config"),
}
_LORA_PLACES = {Backend.TENSORRT: Target("BuildConfig", "lora_config")}
_LORA_PLACE = Target("LLM", "lora_config")
_LORA_OWNERS = ("LoraConfig", "PeftCacheConfig")


class Phase(enum.Flag):
    """When an argument is passed: to compile an engine, or to run an engine or a checkpoint."""

    BUILD = enum.auto()
    RUN = enum.auto()


_BUILD_OWNERS = frozenset({"BuildConfig", "PluginConfig", "QuantConfig", "CalibConfig", "LoraConfig"})
_BUILD_ARGUMENTS = frozenset({"dtype", "load_format", "embedding_parallel_mode", "fast_build", "enable_tqdm"})
_BOTH_ARGUMENTS = frozenset(
    {
        "trust_remote_code",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "context_parallel_size",
        "moe_tensor_parallel_size",
        "moe_expert_parallel_size",
        "moe_cluster_parallel_size",
        "enable_attention_dp",
        "enable_lm_head_tp_in_adp",
        "gpus_per_node",
        "orchestrator_type",
        "enable_lora",
        "batching_type",
    }
)


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of arguments other than the options.

    `version` is TensorRT-LLM's. `dtype` is the number format of the weights (float16, ...; None if unknown),
    `stored_quantization` the quantisation of the checkpoint. `max_sequences` run at once, the engine is compiled for
    `max_batch_size`; lengths and `tokens_per_block` are in tokens, parallel degrees in GPUs.
    """

    backend: Backend
    version: str
    dtype: str | None
    stored_quantization: str | None
    max_sequences: int
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    tokens_per_block: int
    tensor_parallel: int
    pipeline_parallel: int


class ArgumentBuilder:
    """Collects values by argument, with problems and notes, and builds `Arguments`."""

    def __init__(self, config: Config, inputs: PlanInputs, phases: Phase) -> None:
        self.config = config
        self.options = config.options
        self.inputs = inputs
        self.phases = phases
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._values: dict[Target, Any] = {}

    def __contains__(self, target: Target) -> bool:
        return target in self._values

    def is_taken(self, target: Target) -> bool:
        """Whether this version has the argument, and it is passed in one of the phases."""
        return self._is_passed(target) and self.exists(target)

    def exists(self, target: Target) -> bool:
        return has(self._owner(target), target.name, self.inputs.version)

    def put(self, target: Target, value: Any, *options: str) -> None:
        """Pass a value, in place of an earlier one. `options` are the fields that it comes from.

        If this version of TensorRT-LLM has no such argument, or no such member of its enum, it is a problem if the
        user set one of the options.
        """
        if not self._is_passed(target):
            return
        missing: Target | None = target
        if self.exists(target):
            value = _plain(value, self._type(target))
            missing = self._missing_member(value)
        if missing is None:
            self._values[target] = value
            self._check_choice(target, value, options)
            return
        problems = (self._missing(name, missing) for name in options if self.config.is_set(name))
        self.problems += [problem for problem in problems if problem not in self.problems]

    def _check_choice(self, target: Target, value: Any, options: tuple[str, ...]) -> None:
        """TensorRT-LLM's classes refuse other strings while compiling or loading; before 1.2 its kernels do."""
        taken = choices(self._type(target))
        if taken is None or not isinstance(value, str) or value in taken:
            return
        words = " or ".join(filter(None, (", ".join(taken[:-1]), taken[-1])))
        self.problems += [
            f"{self.format_setting(name)}: TensorRT-LLM {self.inputs.version} takes {words} as {target}"
            for name in options
            if self.config.is_set(name)
        ]

    def drop(self, target: Target) -> None:
        self._values.pop(target, None)

    def put_unless_default(self, target: Target, value: Any, *options: str) -> None:
        """Pass a value that the user set, or that differs from TensorRT-LLM's default."""
        is_set = any(self.config.is_set(name) for name in options)
        if is_set or (self.is_taken(target) and self._differs(target, value)):
            self.put(target, value, *options)

    def format_setting(self, name: str) -> str:
        return format_setting(self.config, name)

    def arguments(self, phase: Phase) -> Arguments:
        """The keyword arguments of LLM in one phase."""
        objects: dict[str, dict[str, Any]] = {"LLM": {}}
        for target, value in sorted(self._values.items()):
            if phase in _phases(target, self.inputs.backend):
                self._object(target.owner, objects)[target.name] = value
        return dict(sorted(objects["LLM"].items()))

    def _object(self, owner: str, objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
        if owner not in objects:
            place = _LORA_PLACES.get(self.inputs.backend, _LORA_PLACE) if owner == "LoraConfig" else _PLACES[owner]
            objects[owner] = {"class": owner}
            self._object(place.owner, objects)[place.name] = objects[owner]
        return objects[owner]

    def _is_passed(self, target: Target) -> bool:
        if target.owner in _LORA_OWNERS and not self.options.enable_lora:
            return False
        return bool(self.phases & _phases(target, self.inputs.backend))

    def _owner(self, target: Target) -> str:
        return LLM_OWNERS[self.inputs.backend] if target.owner == "LLM" else target.owner

    def _type(self, target: Target) -> str:
        return members(self._owner(target), self.inputs.version)[target.name].type

    def _differs(self, target: Target, value: Any) -> bool:
        default = default_of(self._owner(target), target.name, self.inputs.version)
        return bool(_plain(value, self._type(target)) != default)

    def _missing_member(self, value: Any) -> Target | None:
        if not isinstance(value, dict) or "enum" not in value:
            return None
        member = Target(value["enum"], value["name"])
        return None if self.exists(member) else member

    def _missing(self, name: str, target: Target) -> str:
        return (
            f"{self.format_setting(name)}: TensorRT-LLM {self.inputs.version} has no {target}"
            f"{_span(self._owner(target), target.name)}; leave the option out"
        )


def collect(config: Config, inputs: PlanInputs, phases: Phase) -> ArgumentBuilder:
    """Every option that is passed as it is."""
    builder = ArgumentBuilder(config, inputs, phases)
    effects = ENGINE if inputs.backend is Backend.TENSORRT else PYTORCH
    for declared in OPTIONS.values():
        effect = effects.get(declared.name)
        value = getattr(config.options, declared.name)
        if not isinstance(effect, Passed) or value is None:
            continue
        # Of several arguments a version may have one.
        for target in [target for target in effect.targets if builder.exists(target)] or effect.targets:
            if not effect.when_set:
                builder.put_unless_default(target, value, declared.name)
            elif config.is_set(declared.name):
                builder.put(target, value, declared.name)
    return builder


def flattened(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"build_config.plugin_config.gemm_plugin": "auto"}`: the same without nesting, for manifests and logs."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, dict) and "enum" in value:
            flat[prefix + name] = value["name"]
        elif isinstance(value, dict):
            flat |= flattened({key: item for key, item in value.items() if key != "class"}, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def shown(arguments: Mapping[str, Any], name: str = "LLM") -> str:
    """As Python code, for the log."""
    return f"{name}({', '.join(f'{key}={_shown(value)}' for key, value in arguments.items() if key != 'class')})"


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "class" in value:
        return shown(value, value["class"])
    if isinstance(value, dict) and "enum" in value:
        return f"{value['enum']}.{value['name']}"
    return repr(value)


def is_of_build(option: str) -> bool:
    """Whether an option has its effect while an engine is compiled, and none when it runs."""
    effect = ENGINE.get(option)
    targets = effect.targets if isinstance(effect, Passed | Derived) else ()
    return bool(targets) and all(_phases(target, Backend.TENSORRT) is Phase.BUILD for target in targets)


def _phases(target: Target, backend: Backend) -> Phase:
    if backend is not Backend.TENSORRT:
        # Nothing is built from a checkpoint that runs as it is.
        return Phase(0) if target.owner in _BUILD_OWNERS - {"LoraConfig"} else Phase.RUN
    if target.owner in _BUILD_OWNERS or (target.owner == "LLM" and target.name in _BUILD_ARGUMENTS):
        return Phase.BUILD
    if target.owner == "LLM" and target.name in _BOTH_ARGUMENTS:
        return Phase.BUILD | Phase.RUN
    return Phase.RUN


def _span(owner: str, name: str) -> str:
    """The versions in which an owner has a name, as text."""
    among = {owner, *owners()[owner].base}
    spans = [(row.since, row.until) for row in all_members() if row.owner in among and row.name == name]
    if not spans:
        return ""
    since, until = spans[-1]
    return f" (it has it from {since} on)" if until is None else f" (it had it from {since} on and before {until})"


def _plain(value: Any, type_text: str) -> Any:
    """An option's value as TensorRT-LLM takes it; `type_text` is the type of the argument."""
    if value is PluginDType.DISABLE:
        return None
    if isinstance(value, DType):
        return _DTYPES[value]
    if isinstance(value, Choice):
        names = re.findall(r"\w+", type_text)
        owner = next((name for name in names if name in owners() and owners()[name].kind == "enum"), None)
        return value.value if owner is None else {"enum": owner, "name": value.name}
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
