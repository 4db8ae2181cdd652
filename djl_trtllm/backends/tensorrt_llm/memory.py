"""Fits the options of a checkpoint to the memory of the GPUs, before an engine is compiled or weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from djl_trtllm.backends.tensorrt_llm.plan_inputs import degrees
from djl_trtllm.config import Backend, Config
from djl_trtllm.config.format_setting import format_setting
from djl_trtllm.config.sources.origin import Origin
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import planned_length
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.model import Layout, ModelKind
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.configured import conditions_of
from djl_trtllm.sizing.estimate import MOST
from djl_trtllm.sizing.gpus import gpu_found
from djl_trtllm.sizing.recommendation import Recommendation, recommend

_UNKNOWN = (
    "option.max_num_tokens is not set, and nothing says what fits ({}): it is as large as TensorRT-LLM's own default, "
    "8192, or as the batch can use; djl-trtllm size estimates it for other GPUs"
)

_VOUCHED_FOR = 4096
"""A measurement shows that sequences of this length run: a prompt of 3,700 tokens and its answer."""


def fitted_to_memory(config: Config, layout: Layout, hardware: Hardware, backend: Backend) -> Config:
    """The configuration with a max_num_tokens that fits, where the user set none, and with warnings of what does not.

    An engine that is there already keeps its own. Raises ConfigError instead of warning with option.strict_memory.
    """
    if layout.kind.is_engine or layout.bundled_engine is not None or not hardware.gpus:
        return config
    found = _recommendation(config, layout, hardware, backend)
    if found is None:
        return config
    if isinstance(found, str):
        told = config.options.max_num_tokens is None
        return replace(config, notes=(*config.notes, _UNKNOWN.format(found))) if told else config
    chosen = _Choice(config, layout, found, backend)
    config = chosen.applied()
    problems = chosen.problems(config)
    if problems and config.options.strict_memory:
        raise ConfigError([f"{problem} ({format_setting(config, 'strict_memory')})" for problem in problems])
    advice = "; it is tried nevertheless, option.strict_memory=true refuses it"
    return replace(config, warnings=(*config.warnings, *(f"{problem}{advice}" for problem in problems)))


def _recommendation(
    config: Config, layout: Layout, hardware: Hardware, backend: Backend
) -> Recommendation | str | None:
    """A text where nothing is known, and why; None where the plan reports a problem of its own."""
    if layout.kind is not ModelKind.HF_CHECKPOINT:
        return f"the weights of a {layout.kind.value} are not read"
    if any(gpu.memory is None for gpu in hardware.gpus):
        return "the memory of the GPUs is unknown"
    problems: list[str] = []
    tensor_parallel, pipeline_parallel = degrees(config, layout, hardware, problems)
    if problems:
        return None
    smallest = min(hardware.gpus, key=lambda gpu: gpu.memory or 0)
    model = gpu_found(smallest.name, smallest.memory)
    try:
        sizes = _sizes(layout.path, layout)
    except DjlTrtllmError as error:
        return str(error)
    if not sizes.layers or not sizes.parts:
        return "config.json does not have the sizes of the model"
    conditions = conditions_of(
        config,
        sizes.shape,
        gpu_memory=smallest.memory or 0,
        compute_capability=smallest.compute_capability,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        compiled=backend is Backend.TENSORRT,
    )
    return recommend(sizes, conditions, model, gpu=smallest.name or "an NVIDIA GPU")


def _sizes(path: Path, layout: Layout) -> CheckpointSizes:
    # Of a remote model that is only described, the weights are counted.
    return CheckpointSizes.read(path) if layout.weight_files else CheckpointSizes.from_config(layout.config or {})


@dataclass(frozen=True)
class _Choice:
    config: Config
    layout: Layout
    found: Recommendation
    backend: Backend

    @property
    def sequences(self) -> int:
        options = self.config.options
        return options.max_num_sequences or options.max_rolling_batch_size

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return planned_length(self.config, self.layout.shape, [])

    @property
    def longest_prompt(self) -> int:
        return min(self.config.options.max_input_len, self.longest)

    def applied(self) -> Config:
        options, found = self.config.options, self.found
        if options.max_num_tokens is not None or not found.fits:
            return self.config
        most = self.sequences * self.longest
        tokens = max(min(found.max_num_tokens, most), self.sequences * options.max_beam_width)
        origin = found.origin
        if tokens < found.max_num_tokens:
            origin = f"{self.sequences} sequences of {self.longest} tokens; {origin} allows {found.max_num_tokens}"
        chunked = options.enable_chunked_prefill
        if tokens < self.longest_prompt and not chunked:
            if self.holds_a_prompt or not self.may_split_prompts:
                tokens, origin = self.longest_prompt, f"one prompt of option.max_input_len; {origin}"
            else:
                chunked = True
        values = {"max_num_tokens": tokens}
        config = self.config.replace(Origin.derived(origin), **values)
        if chunked == options.enable_chunked_prefill:
            return config
        rule = f"option.max_num_tokens={tokens}, which is less than a prompt of {self.longest_prompt} tokens"
        return config.replace(Origin.derived(rule), enable_chunked_prefill=True)

    @property
    def holds_a_prompt(self) -> bool:
        """Whether a whole prompt fits although the recommendation is less: half of an estimate leaves room."""
        return self.found.row is None and self.longest_prompt <= min(MOST, self.found.maximum)

    @property
    def may_split_prompts(self) -> bool:
        options = self.config.options
        engine = self.backend is Backend.TENSORRT
        return not self.config.is_set("enable_chunked_prefill") and (options.use_paged_context_fmha or not engine)

    def problems(self, config: Config) -> list[str]:
        """What does not fit, with the numbers."""
        found, tokens = self.found, config.options.max_num_tokens
        if found.refusal is not None:
            return [f"{self.layout.path} does not fit: {found.refusal}"]
        if tokens is None:
            return []
        if tokens > found.maximum:
            source = str(found.row) if found.row is not None else f"estimated for {found.place}"
            return [
                f"{format_setting(config, 'max_num_tokens')} does not fit: at most {found.maximum} do ({source}); "
                f"leave the option out, or set {found.max_num_tokens}"
            ]
        smaller = found.estimate.recommended
        held = found.estimate.kv_tokens(tokens)
        if found.row is not None and held < self.longest and self.longest > _VOUCHED_FOR and 0 < smaller < tokens:
            return [
                f"{format_setting(config, 'max_num_tokens')} leaves a KV cache of about {held} tokens on "
                f"{found.place}, less than one sequence of {self.longest}: {found.row} was measured with prompts of "
                f"3,700 tokens; set option.max_num_tokens={smaller}, or shorter lengths"
            ]
        return []
