"""The plans of models that TensorRT-LLM runs on GPUs: compiled engines, and checkpoints as they are.

`option.extra_llm_api_options` has arguments of TensorRT-LLM's LLM by its own names, in a YAML file or as JSON. For
example `kv_cache_config: {max_util_for_resume: 0.9}`.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

from djl_trtllm.backends.effects import Effects, Target
from djl_trtllm.backends.extra_options import (
    OF_THE_SERVER,
    ExtraArgument,
    Library,
    Signatures,
    options_of,
    read_arguments,
)
from djl_trtllm.backends.installed import classes_of, folder_of, statements
from djl_trtllm.backends.speculation import planned_speculation
from djl_trtllm.backends.tensorrt_llm.arguments import (
    ENGINE,
    LLM_OWNERS,
    PYTORCH,
    Arguments,
    Phase,
    PlanInputs,
    collect,
    flattened,
    is_calibrated,
    shown,
)
from djl_trtllm.backends.tensorrt_llm.built_engine import BuiltEngine, check_built_engine, read_built_engine
from djl_trtllm.backends.tensorrt_llm.checkpoints import check_stored_format, converter_alias, gpu_problems
from djl_trtllm.backends.tensorrt_llm.compile import COMPILER, TensorRtLlmSpec
from djl_trtllm.backends.tensorrt_llm.limits import plan_inputs, planned_version, tokens_per_iteration
from djl_trtllm.backends.tensorrt_llm.mpi import REASONS
from djl_trtllm.backends.tensorrt_llm.names import all_members, lora_modules, members, owners
from djl_trtllm.backends.tensorrt_llm.speculation import SPECULATES
from djl_trtllm.config import Backend, Config, Task
from djl_trtllm.config.rules import most_images
from djl_trtllm.config.sources import Origin
from djl_trtllm.engines.cache import Manifest, OptionValue, installed_versions, raise_damaged
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import EnginePlan, asked_options, planned_adapters, planned_text_length, shared_fields
from djl_trtllm.errors import ConfigError, EngineError
from djl_trtllm.files import read_table
from djl_trtllm.model import Layout, ModelShape
from djl_trtllm.model.adapter import AdapterLimits
from djl_trtllm.model.pooling import Head, find_head, find_task
from djl_trtllm.model.vision import Vision

_PLACED = frozenset(read_table("options.toml", __package__)["places"])
"""Configuration objects whose fields options set too."""

# Arguments that the server sets itself, with what to do instead.
_OURS = {
    **OF_THE_SERVER,
    "backend": "set option.backend",
    "skip_tokenizer_init": "the engine needs the tokenizer for guides",
    "generation_config": "requests say how they are sampled",
    "num_postprocess_workers": "it reads token ids and makes the text itself",
    "postprocess_tokenizer_dir": "it reads token ids and makes the text itself",
    "lora_config": "set option.enable_lora and the options of adapters",
}
# Arguments that are options under another name, where code derives the argument.
_DERIVED = {
    Target("LLM", "max_input_len"): "max_input_len",
    Target("LLM", "max_batch_size"): "max_rolling_batch_size",
    Target("KvCacheConfig", "free_gpu_memory_fraction"): "kv_cache_free_gpu_mem_fraction",
}


def apply_extra_options(
    config: Config, effects: Effects, llm: str, version: str, notes: list[str]
) -> tuple[Config, tuple[ExtraArgument, ...]]:
    """See `read_arguments`; `llm` is the LLM of the backend as the table of names has it."""
    library = Library(
        option="extra_llm_api_options",
        engine=f"TensorRT-LLM {version}",
        owner="LLM",
        root=llm,
        signatures={**_tabled(llm, version), **_installed(llm)},
        ours=_OURS,
        options=options_of(effects, _DERIVED),
        placed=_PLACED,
    )
    return read_arguments(config, library, notes)


@cache
def _tabled(llm: str, version: str) -> Signatures:
    """The signatures in the table of names: for machines without TensorRT-LLM, and for classes declared elsewhere."""
    of = {name: members(name, version) for name in {llm, *(row.owner for row in all_members())}}
    return {
        name: {member.name: member.type for member in known.values() if member.kind == "argument"}
        for name, known in of.items()
        if known and owners()[name].kind == "class"
    }


@cache
def _installed(llm: str) -> Signatures:
    """The signatures that the installed package declares, read without running it; empty if it is not installed."""
    package, declared = folder_of("tensorrt_llm"), owners()[llm].declared
    if package is None or declared is None:
        return {}
    module, _, root = declared.partition(":")
    names = dict.fromkeys(("tensorrt_llm.llmapi.llm_args", module))
    files = [package.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in names]
    if not all(map(statements, files)):
        return {}
    found = {name: fields for name, fields in classes_of(*files).items() if fields}
    return found | {llm: found[root]} if root in found else {}


def adapter_limits(config: Config, shape: ModelShape, backend: Backend) -> AdapterLimits | None:
    """Return the LoRA adapters that an engine takes; None where LoRA is off.

    A compiled engine's names of modules depend on its family, so they are not compared.
    """
    limits = planned_adapters(config, shape)
    if limits is None or backend is Backend.TENSORRT:
        return limits
    chosen = config.options.lora_target_modules
    modules = frozenset(lora_modules().get(name, name) for name in chosen or lora_modules())
    setting = config.format_setting("lora_target_modules") if chosen else "all that it knows"
    return replace(limits, modules=modules, modules_setting=setting)


# Stop words lose host memory in 0.20 and 0.21 (TensorRT-LLM #5509); which release candidate ended that is not known.
_STOPS_KEEP_MEMORY = Version("1.0.0")
# Without it TensorRT-LLM 1.3 sends usage statistics to NVIDIA.
_ENVIRONMENT = {"TRTLLM_NO_USAGE_STATS": "1"}
_POOLED_TOKENS = 2048
"""The tokens of an iteration of a model that scores pairs, where nothing says another number."""
_TAKES_IMAGES = Version("1.2.0")
"""The oldest release whose sources were read. 1.1 failed where several prompts had images (TensorRT-LLM #7357)."""


@dataclass(frozen=True, kw_only=True)
class TensorRtLlmPlan(EnginePlan):
    """The base of both plans; the arguments of LLM follow from `config` and `inputs`."""

    config: Config
    hardware: Hardware
    inputs: PlanInputs
    shape: ModelShape

    executor = "djl_trtllm.backends.tensorrt_llm.executor:TensorRtLlmExecutor"
    reasons = REASONS

    @cached_property
    def running(self) -> Arguments:
        """The arguments of LLM that run the engine or the checkpoint."""
        return collect(self.config, self.inputs, Phase.RUN).arguments(Phase.RUN)

    def _executor_options(self, model: Path, **options: Any) -> dict[str, Any]:
        stop_in_engine = self.config.options.stop_in_engine
        if stop_in_engine is None:
            stop_in_engine = Version(self.inputs.version) >= _STOPS_KEEP_MEMORY
        return {
            "backend": self.backend.value,
            "model": str(model),
            "tokenizer": str(self.tokenizer_dir),
            "arguments": self.running,
            "environment": _ENVIRONMENT,
            "max_sequences": self.max_sequences,
            "lookahead": self.lookahead,
            "max_seq_len": self.max_seq_len,
            "tokens_per_block": self.inputs.tokens_per_block,
            "hang_timeout": self.config.options.executor_hang_timeout,
            "compile_timeout": self.config.options.model_loading_timeout,
            "lora": self.config.options.enable_lora,
            "stop_in_engine": stop_in_engine,
            "accept_ignored_seeds": self.config.options.ignored_seed == "warn",
            "vocab_size": self.shape.vocab_size,
            **options,
        }

    def settled(self, config: Config) -> Config:
        return self.config

    @property
    def effects(self) -> dict[str, str]:
        passed = ", ".join(f"{each.target}={each.value!r} ({each.place})" for each in self.inputs.extra)
        return {"extra_llm_api_options": f"{passed}; arguments that have an option are in its row"} if passed else {}

    @property
    def gpus(self) -> int:
        return self.inputs.tensor_parallel * self.inputs.pipeline_parallel

    def describe(self) -> str:
        inputs, options = self.inputs, self.config.options
        if self.head is not None:
            return super().describe()
        derived = "" if options.max_num_tokens else " (option.max_num_tokens is not set)"
        if options.max_num_tokens and self.engine_dir is None and not self.config.is_set("max_num_tokens"):
            derived = f" ({self.config.origin('max_num_tokens')})"
        line = (
            f"{super().describe()}, up to {self.max_sequences} sequences of {self.max_seq_len} tokens, "
            f"{inputs.max_num_tokens} tokens per iteration{derived}, KV cache in blocks of {inputs.tokens_per_block} "
            "tokens"
        )
        return line if inputs.stored_quantization is None else f"{line}, weights in {inputs.stored_quantization}"

    def details(self) -> tuple[str, ...]:
        return (f"TensorRT-LLM runs {shown(self.running)}",)


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan(TensorRtLlmPlan):
    """A checkpoint that TensorRT-LLM's PyTorch backend or AutoDeploy runs as it is."""

    images: bool = False
    """Whether it takes images."""

    def executor_options(self) -> dict[str, Any]:
        return self._executor_options(
            self.source,
            max_prompt_len=0 if self.config.options.enable_chunked_prefill else self.inputs.max_num_tokens,
            iteration_stats=bool(self.running.get("enable_iter_perf_stats")),
            logprobs=True,
            max_beam_width=self.config.options.max_beam_width,
            images=self.images,
        )


@dataclass(frozen=True, kw_only=True)
class PoolingPlan(TensorRtLlmPlan):
    """A checkpoint that TensorRT-LLM scores pairs with, by `LLM.encode`."""

    executor = "djl_trtllm.backends.tensorrt_llm.executor:TensorRtLlmPoolingExecutor"

    @cached_property
    def running(self) -> Arguments:
        arguments = collect(self.config, self.inputs, Phase.RUN).arguments(Phase.RUN)
        arguments.pop("guided_decoding_backend", None)
        return arguments | {"encode_only": True, "cuda_graph_config": None}

    def executor_options(self) -> dict[str, Any]:
        return {
            "model": str(self.source),
            "tokenizer": str(self.tokenizer_dir),
            "arguments": self.running,
            "environment": _ENVIRONMENT,
            **self.pooling_options(self.inputs.max_num_tokens),
        }


@dataclass(frozen=True, kw_only=True)
class TensorRtEnginePlan(TensorRtLlmPlan):
    """An engine that TensorRT-LLM's engine backend compiles and runs; `engine` once it is there (see `at`)."""

    engine: BuiltEngine | None = None
    converter_alias: str | None = None

    compiler = COMPILER

    @cached_property
    def building(self) -> Arguments:
        """The arguments of LLM that compile the engine."""
        return collect(self.config, self.inputs, Phase.BUILD).arguments(Phase.BUILD)

    @property
    def build_options(self) -> dict[str, OptionValue]:
        quantize = self.config.options.quantize
        return {
            "dtype": self.building.get("dtype", "auto"),
            "quantize": "none" if quantize is None else quantize.value,
            **flattened(self.building),
            **({} if self.converter_alias is None else {"checkpoint_name": self.converter_alias}),
        }

    @property
    def recipe(self) -> str:
        return shown(self.building)

    @property
    def served_with(self) -> dict[str, OptionValue]:
        quantize = self.config.options.quantize
        return {} if quantize is None else {"quantize": quantize.value}

    @property
    def versions(self) -> dict[str, str]:
        installed = {"tensorrt-llm": self.hardware.tensorrt_llm, "tensorrt": self.hardware.tensorrt}
        known = {package: version for package, version in installed.items() if version is not None}
        return known | installed_versions(["djl-trtllm"])

    @property
    def platform(self) -> str:
        return self.hardware.gpus[0].architecture or "unknown"

    @property
    def machine(self) -> str:
        driver = (self.hardware.driver or "unknown").split(".")[0]
        return f"{self.hardware.gpus[0].name or 'unknown GPU'}, driver {driver}"

    @property
    def offline(self) -> bool:
        # Samples are a data set of the hub, unless they are a folder.
        calibrated = is_calibrated(self.config, self.inputs.stored_quantization)
        return super().offline and (not calibrated or Path(self.config.options.calib_dataset).is_dir())

    def compile_spec(self, out: Path) -> TensorRtLlmSpec:
        wanted = self.config.options.workspace
        workspace = out.resolve() / "workspace" if wanted is None else wanted.absolute() / f"djl-trtllm{out.name}"
        return TensorRtLlmSpec(
            checkpoint=str(self.source.resolve()),
            tokenizer_dir=str(self.tokenizer_dir.resolve()),
            out=str(out.resolve()),
            workspace=str(workspace),
            arguments=self.building,
            converter_alias=self.converter_alias,
        )

    def check_whole(self, directory: Path) -> Manifest | None:
        manifest = Manifest.read(directory)
        if manifest is not None:
            manifest.require_whole(directory)
        engine = read_built_engine(directory)
        ranks = (directory / f"rank{rank}.engine" for rank in range(engine.world_size))
        raise_damaged(directory, [f"{path.name}: missing" for path in ranks if not path.is_file()])
        return manifest

    def check_fit(self, directory: Path, manifest: Manifest | None) -> None:
        if manifest is not None:
            manifest.require_fit(directory, backend=self.backend.value, options=self.asked, versions={})
        check_engine(self.config, read_built_engine(directory), self.hardware, manifest, self.max_seq_len)

    def at(self, engine_dir: Path) -> "TensorRtEnginePlan":
        """This plan with an engine, whose own limits count."""
        engine, inputs, options = read_built_engine(engine_dir), self.inputs, self.config.options
        inputs = replace(
            inputs,
            max_sequences=_least(inputs.max_sequences, engine.max_batch_size),
            max_batch_size=engine.max_batch_size or inputs.max_batch_size,
            max_seq_len=_least(inputs.max_seq_len, engine.max_seq_len),
            max_num_tokens=tokens_per_iteration(self.config, self.backend, inputs.max_seq_len, engine=engine).tokens,
            tokens_per_block=engine.tokens_per_block or inputs.tokens_per_block,
            tensor_parallel=engine.tp_size,
            pipeline_parallel=engine.pp_size,
            stored_quantization=engine.quant_algo,
        )
        return replace(
            self,
            engine_dir=engine_dir,
            engine=engine,
            inputs=inputs,
            max_sequences=inputs.max_sequences,
            max_seq_len=inputs.max_seq_len,
            max_input_len=_least(
                options.max_input_len, engine.longest_prompt(chunked_prefill=options.enable_chunked_prefill)
            ),
        )

    def executor_options(self) -> dict[str, Any]:
        if self.engine is None or self.engine_dir is None:
            raise ValueError("the plan has no engine yet: use plan.at(directory)")
        longest_prompt = self.engine.longest_prompt(
            chunked_prefill=self.config.options.enable_chunked_prefill, max_num_tokens=self.inputs.max_num_tokens
        )
        return self._executor_options(
            self.engine_dir,
            max_prompt_len=longest_prompt or 0,
            iteration_stats=True,
            logprobs=bool(self.running.get("gather_generation_logits")),
            max_beam_width=self.engine.max_beam_width or 1,
        )

    def details(self) -> tuple[str, ...]:
        if self.engine is not None:
            return super().details()
        return (f"TensorRT-LLM compiles {self.recipe}", *super().details())


def check_engine(
    config: Config, engine: BuiltEngine, hardware: Hardware, manifest: Manifest | None, max_seq_len: int
) -> list[str]:
    """Compare an engine with what is planned, which asks for no length above the model's context."""
    options = config.options
    bounds = {"max_seq_len": max_seq_len, "max_input_len": max_seq_len - 1, "max_output_len": max_seq_len - 1}
    lower = {name: bound for name, bound in bounds.items() if (getattr(options, name) or 0) > bound}
    if options.max_seq_len is None and options.max_input_len + options.max_output_len > max_seq_len:
        lower["max_seq_len"] = max_seq_len
    context = Origin.derived("the model's context")
    return check_built_engine(config.replace(context, **lower), engine, hardware, manifest)


def _pooling_inputs(
    config: Config, layout: Layout, inputs: PlanInputs, head: Head, problems: list[str], notes: list[str]
) -> PlanInputs:
    """The sizes for a model whose iterations take whole texts; adds to `problems` and `notes`."""
    if inputs.tensor_parallel * inputs.pipeline_parallel > 1:
        names = [name for name in ("tensor_parallel_degree", "pipeline_parallel_degree") if config.is_set(name)]
        settings = " and ".join(map(config.format_setting, names))
        problems.append(f"{settings}: TensorRT-LLM encodes on one GPU; leave the option out")
    length = planned_text_length(config, layout.shape, head, notes)
    tokens = max(length, config.options.max_num_tokens or _POOLED_TOKENS)
    return replace(inputs, max_seq_len=length, max_num_tokens=tokens)


def _planned_images(config: Config, layout: Layout, inputs: PlanInputs, problems: list[str], notes: list[str]) -> bool:
    """Whether images are served; adds to `problems` and `notes`."""
    vision = None if layout.kind.is_engine else Vision.find(layout.path, layout.config)
    compiled = inputs.backend is Backend.TENSORRT  # the option has no effect there
    if not most_images(config.options.limit_mm_per_prompt):
        return False
    reason = "this model takes text only"
    if vision is not None:
        if inputs.backend is Backend.PYTORCH and Version(inputs.version) >= _TAKES_IMAGES:
            if inputs.speculation is not None:
                problems.append(
                    f"{inputs.speculation.setting}: TensorRT-LLM speculates for texts only here; set "
                    'option.limit_mm_per_prompt={"image": 0} to serve the model without images, or leave it out'
                )
            return True
        reason = (
            f"TensorRT-LLM {inputs.version}'s {inputs.backend} backend takes text only here: images need "
            f"option.backend=pytorch and TensorRT-LLM {_TAKES_IMAGES} or later"
        )
    if config.is_set("limit_mm_per_prompt") and not compiled:
        problems.append(f"{config.format_setting('limit_mm_per_prompt')}: {reason}; leave the option out")
    elif vision is not None:
        notes.append(f"this model takes images, and is served without: {reason}")
    return False


def _least(value: int, bound: int | None) -> int:
    return value if bound is None else min(value, bound)


def plan_tensorrt_llm(
    config: Config, layout: Layout, hardware: Hardware, backend: Backend, reason: str
) -> TensorRtLlmPlan:
    """Derive the plan. Raises EngineError, ConfigError (all problems at once) and EngineMismatchError."""
    version = planned_version(hardware)
    effects = ENGINE if backend is Backend.TENSORRT else PYTORCH
    problems: list[str] = []
    notes: list[str] = []
    config, extra = apply_extra_options(config, effects, LLM_OWNERS[backend], version, notes)
    options = config.options
    engine = f"TensorRT-LLM's {backend} backend"
    speculation = planned_speculation(config, layout, engine, SPECULATES[backend], own_fields=True)
    inputs = replace(
        plan_inputs(config, layout, hardware, backend, problems, notes),
        extra=extra,
        speculation=speculation,
        draft=None if speculation is None or layout.draft is None else str(layout.draft.path),
    )
    head = None
    if (task := find_task(options.task, layout)) is not Task.GENERATE:
        head = find_head(task, layout)
        inputs = _pooling_inputs(config, layout, inputs, head, problems, notes)
    if not members(LLM_OWNERS[backend], inputs.version):
        raise EngineError(f"{reason}: TensorRT-LLM {inputs.version} has no such backend; set option.backend=auto")
    check_stored_format(layout, backend, inputs.version, notes)
    common = {
        **shared_fields(config, layout),
        "backend": backend,
        "reason": reason,
        "config": config,
        "hardware": hardware,
        "inputs": inputs,
        "shape": layout.shape,
        "max_sequences": inputs.max_sequences,
        "max_seq_len": inputs.max_seq_len,
        "adapter_limits": adapter_limits(config, layout.shape, backend),
    }
    is_engine = layout.kind.is_engine
    builder = collect(config, inputs, Phase.RUN if is_engine else Phase.BUILD | Phase.RUN)
    problems += builder.problems
    if not is_engine:
        problems += gpu_problems(config, inputs, hardware, builder.arguments(Phase.BUILD))
    images = _planned_images(config, layout, inputs, problems, notes)
    if problems:
        raise ConfigError(problems)
    notes += builder.notes
    if head is not None:
        return PoolingPlan(**common, task=task, head=head, max_input_len=inputs.max_seq_len, notes=tuple(notes))
    if backend is not Backend.TENSORRT:
        longest_prompt = inputs.max_seq_len if options.enable_chunked_prefill else inputs.max_num_tokens
        longest_prompt = min(options.max_input_len, longest_prompt)
        return CheckpointPlan(**common, notes=tuple(notes), max_input_len=longest_prompt, images=images)
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
