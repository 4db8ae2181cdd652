"""The plans of models that TensorRT-LLM runs on GPUs: compiled engines, and checkpoints as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

from djl_trtllm.backends.tensorrt_llm.adapters import adapter_limits
from djl_trtllm.backends.tensorrt_llm.arguments import (
    ArgumentBuilder,
    Arguments,
    Phase,
    PlanInputs,
    collect,
    flattened,
    shown,
)
from djl_trtllm.backends.tensorrt_llm.built_engine import BuiltEngine, check_built_engine, read_built_engine
from djl_trtllm.backends.tensorrt_llm.compiler import COMPILER, TensorRtLlmSpec
from djl_trtllm.backends.tensorrt_llm.derivations import derive
from djl_trtllm.backends.tensorrt_llm.quantization import is_calibrated
from djl_trtllm.config import Config
from djl_trtllm.config.sources.origin import Origin
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.manifest import Manifest, OptionValue, installed_versions, raise_damaged
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.model import ModelShape
from djl_trtllm.model.adapter import AdapterLimits

_MOST_LOOKAHEAD = 16
# Stop words lose host memory in 0.20 and 0.21 (TensorRT-LLM #5509); which release candidate ended that is not known.
_STOPS_KEEP_MEMORY = Version("1.0.0")
# Without it TensorRT-LLM 1.3 sends usage statistics to NVIDIA.
_ENVIRONMENT = {"TRTLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, kw_only=True)
class TensorRtLlmPlan(EnginePlan):
    """What both plans have: `inputs` is what the arguments of LLM follow from beside `config`."""

    config: Config
    hardware: Hardware
    inputs: PlanInputs
    shape: ModelShape

    executor = "djl_trtllm.backends.tensorrt_llm.executor:TensorRtLlmExecutor"

    @cached_property
    def running(self) -> Arguments:
        """The arguments of LLM that run the engine or the checkpoint."""
        return collected(self.config, self.inputs, Phase.RUN).arguments(Phase.RUN)

    def _executor_options(self, model: Path, **options: Any) -> dict[str, Any]:
        return {
            "backend": self.backend.value,
            "model": str(model),
            "tokenizer": str(self.tokenizer_dir),
            "arguments": self.running,
            "environment": _ENVIRONMENT,
            "max_sequences": self.max_sequences,
            "lookahead": min(_MOST_LOOKAHEAD, max(2, self.max_sequences // 4)),
            "max_seq_len": self.max_seq_len,
            "tokens_per_block": self.inputs.tokens_per_block,
            "hang_timeout": self.config.options.executor_hang_timeout,
            "lora": self.config.options.enable_lora,
            "max_lora_rank": self.config.options.max_lora_rank,
            "stop_in_engine": self._stop_in_engine,
            "accept_ignored_seeds": self.config.options.ignored_seed == "warn",
            **options,
        }

    @property
    def _stop_in_engine(self) -> bool:
        chosen = self.config.options.stop_in_engine
        return Version(self.inputs.version) >= _STOPS_KEEP_MEMORY if chosen is None else chosen

    @property
    def adapter_limits(self) -> AdapterLimits | None:
        return adapter_limits(self.config, self.shape, self.backend)

    @property
    def gpus(self) -> int:
        return self.inputs.tensor_parallel * self.inputs.pipeline_parallel

    def describe(self) -> str:
        inputs, options, gpus = self.inputs, self.config.options, self.gpus
        derived = "" if options.max_num_tokens else " (option.max_num_tokens is not set)"
        if options.max_num_tokens and self.engine_dir is None and not self.config.is_set("max_num_tokens"):
            derived = f" ({self.config.origin('max_num_tokens')})"
        line = (
            f"{super().describe()}; on {gpus} GPU{'s' if gpus > 1 else ''}, up to "
            f"{self.max_sequences} sequences of {self.max_seq_len} tokens, {inputs.max_num_tokens} tokens per "
            f"iteration{derived}, KV cache in blocks of {inputs.tokens_per_block} tokens"
        )
        return line if inputs.stored_quantization is None else f"{line}, weights in {inputs.stored_quantization}"

    def details(self) -> tuple[str, ...]:
        return (f"TensorRT-LLM runs {shown(self.running)}",)


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan(TensorRtLlmPlan):
    """A checkpoint that TensorRT-LLM's PyTorch backend or AutoDeploy runs as it is."""

    def executor_options(self) -> dict[str, Any]:
        return self._executor_options(
            self.source,
            max_prompt_len=0 if self.config.options.enable_chunked_prefill else self.inputs.max_num_tokens,
            iteration_stats=bool(self.running.get("enable_iter_perf_stats")),
            logprobs=True,
            max_beam_width=self.config.options.max_beam_width,
        )


@dataclass(frozen=True, kw_only=True)
class TensorRtEnginePlan(TensorRtLlmPlan):
    """An engine that TensorRT-LLM's engine backend compiles and runs; `engine` once it is there (see `at`)."""

    engine: BuiltEngine | None = None
    converter_alias: str | None = None

    compiler = COMPILER

    @cached_property
    def building(self) -> Arguments:
        """The arguments of LLM that compile the engine."""
        return collected(self.config, self.inputs, Phase.BUILD).arguments(Phase.BUILD)

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

    def at(self, engine_dir: Path) -> TensorRtEnginePlan:
        """This plan with an engine, whose own limits count."""
        engine, inputs, options = read_built_engine(engine_dir), self.inputs, self.config.options
        inputs = replace(
            inputs,
            max_sequences=_least(inputs.max_sequences, engine.max_batch_size),
            max_batch_size=engine.max_batch_size or inputs.max_batch_size,
            max_seq_len=_least(inputs.max_seq_len, engine.max_seq_len),
            max_num_tokens=_least(
                options.max_num_tokens or engine.max_num_tokens or inputs.max_num_tokens, engine.max_num_tokens
            ),
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
            raise ValueError("the plan has no engine yet: use plan.at(engine.path)")
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


def collected(config: Config, inputs: PlanInputs, phases: Phase) -> ArgumentBuilder:
    """The arguments of LLM that options and inputs make."""
    builder = collect(config, inputs, phases)
    derive(builder)
    return builder


def check_engine(
    config: Config, engine: BuiltEngine, hardware: Hardware, manifest: Manifest | None, max_seq_len: int
) -> list[str]:
    """Compare what is planned: no length above the model's context is asked of an engine."""
    options = config.options
    lower = {
        name: bound
        for name, bound in (
            ("max_seq_len", max_seq_len),
            ("max_input_len", max_seq_len - 1),
            ("max_output_len", max_seq_len - 1),
        )
        if (getattr(options, name) or 0) > bound
    }
    if options.max_seq_len is None and options.max_input_len + options.max_output_len > max_seq_len:
        lower["max_seq_len"] = max_seq_len
    context = Origin.derived("the model's context")
    return check_built_engine(config.replace(context, **lower), engine, hardware, manifest)


def _least(value: int, bound: int | None) -> int:
    return value if bound is None else min(value, bound)
