"""The sizes of a plan: GPUs, lengths, and the tokens of an iteration as far as the memory of the GPUs allows them."""

import os
from dataclasses import replace
from typing import Any, NamedTuple

from djl_trtllm.backends.tensorrt_llm.arguments import PlanInputs
from djl_trtllm.backends.tensorrt_llm.built_engine import BuiltEngine
from djl_trtllm.backends.tensorrt_llm.engine_watch import LAUNCHED
from djl_trtllm.backends.tensorrt_llm.names import has
from djl_trtllm.config import Backend, Config
from djl_trtllm.config.sources import Origin
from djl_trtllm.engines.hardware import Hardware, release_of
from djl_trtllm.engines.plan import planned_length, planned_sequences
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.model import Layout, ModelKind
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import MOST
from djl_trtllm.sizing.machines import gpu_found
from djl_trtllm.sizing.recommendation import Recommendation, conditions_of, recommend, weight_dtype
from djl_trtllm.sizing.tensors import indivisible_heads

SUPPOSED_VERSION = "1.2.1"
"""The release that is planned for where none is known to be installed."""
_DEFAULT_TOKENS = 8192
"""TensorRT-LLM's own default of `max_num_tokens`."""
_MANY_TOKENS = 16384
_TOKENS_PER_BLOCK = 32
_VOUCHED_FOR = 4096
"""The most tokens of a sequence for which a measurement counts: it ran a prompt of 3,700 tokens and its answer."""
_UNKNOWN = (
    "option.max_num_tokens is not set, and nothing says what fits ({}): it is as large as TensorRT-LLM's own default, "
    "8192, or as the batch can use; djl-trtllm size estimates it for other GPUs"
)

# -- tokens of an iteration --------------------------------------------------------------------------------------------


class Iteration(NamedTuple):
    """The tokens of an iteration (`max_num_tokens`), and where the number comes from, unless it is an option's.

    `split`: longer prompts are split. `holds_a_prompt`: the number was raised to hold a prompt that is not split.
    """

    tokens: int
    origin: str
    split: bool
    holds_a_prompt: bool


def tokens_per_iteration(
    config: Config,
    backend: Backend,
    longest: int,
    *,
    fitting: Recommendation | None = None,
    engine: BuiltEngine | None = None,
) -> Iteration:
    """Return `max_num_tokens` with all that may change it between the file and LLM's argument, in this order.

    Before that the environment overrides the file, and a value of the user raises the lengths (`config.derive`).
    `longest` is the length of the longest sequence, `fitting` what fits the memory, if that is known.
    """
    options = config.options
    sequences = options.max_num_sequences or options.max_rolling_batch_size
    prompt = min(options.max_input_len, longest)
    compiled = None if engine is None else engine.max_num_tokens
    # 1. The option: the user's value, that of an engine which is served as it is, or what `fitted_to_memory` has found.
    # 2. An engine that was compiled or found meanwhile.
    tokens, origin = options.max_num_tokens or compiled, ""
    split, whole = options.enable_chunked_prefill, False
    if tokens is None:
        # 3. What fits the memory, where that is known, else TensorRT-LLM's own default.
        most, origin = (_DEFAULT_TOKENS, "") if fitting is None else (fitting.max_num_tokens, fitting.origin)
        # 4. No more than the batch can use, and a token for each beam.
        tokens = max(min(most, sequences * longest), sequences * options.max_beam_width)
        if tokens < most:
            origin = f"{sequences} sequences of {longest} tokens; {origin} allows {most}"
        # 5. A whole prompt, unless prompts are split; they are where a whole one does not fit.
        if tokens < prompt and not split:
            split = fitting is not None and _splits(config, backend, prompt, fitting)
            whole = not split
        if whole:
            tokens, origin = prompt, f"one prompt of option.max_input_len; {origin}"
    # 6. No more than the engine was compiled for.
    return Iteration(tokens if compiled is None else min(tokens, compiled), origin, split, whole)


def _splits(config: Config, backend: Backend, prompt: int, fitting: Recommendation) -> bool:
    """Return whether long prompts are split: they may be, and a whole one does not fit the memory.

    A whole prompt may take half of an estimate.
    """
    options = config.options
    possible = not config.is_set("enable_chunked_prefill") and (
        options.use_paged_context_fmha or backend is not Backend.TENSORRT
    )
    return possible and not (fitting.row is None and prompt <= min(MOST, fitting.maximum))


def fitted_to_memory(config: Config, layout: Layout, hardware: Hardware, backend: Backend) -> Config:
    """Return the configuration with a max_num_tokens that fits, where the user set none, and warnings of what does not.

    An engine that is there already keeps its own. Raises ConfigError instead of warning with option.strict_memory.
    """
    if layout.kind.is_engine or layout.bundled_engine is not None or not hardware.gpus:
        return config
    found = _recommendation(config, layout, hardware, backend)
    if found is None:
        return config
    is_open = config.options.max_num_tokens is None
    if isinstance(found, str):
        return replace(config, notes=(*config.notes, _UNKNOWN.format(found))) if is_open else config
    longest = planned_length(config, layout.shape, [])
    if is_open and found.fits:
        iteration = tokens_per_iteration(config, backend, longest, fitting=found)
        splits = iteration.split and not config.options.enable_chunked_prefill
        config = config.replace(Origin.derived(iteration.origin), max_num_tokens=iteration.tokens)
        if splits:
            prompt = min(config.options.max_input_len, longest)
            rule = f"option.max_num_tokens={iteration.tokens}, which is less than a prompt of {prompt} tokens"
            config = config.replace(Origin.derived(rule), enable_chunked_prefill=True)
    problem = _memory_problem(config, layout, longest, found)
    if problem is None:
        return config
    if config.options.strict_memory:
        raise ConfigError([f"{problem} ({config.format_setting('strict_memory')})"])
    advice = "; it is tried nevertheless, option.strict_memory=true refuses it"
    return replace(config, warnings=(*config.warnings, f"{problem}{advice}"))


def _recommendation(
    config: Config, layout: Layout, hardware: Hardware, backend: Backend
) -> Recommendation | str | None:
    """Return what fits; why that is unknown, as text; or None where the plan reports a problem of its own."""
    if layout.kind is not ModelKind.HF_CHECKPOINT:
        return f"the weights of a {layout.kind.value} are not read"
    if any(gpu.memory is None for gpu in hardware.gpus):
        return "the memory of the GPUs is unknown"
    problems: list[str] = []
    tensor_parallel, pipeline_parallel = _degrees(config, layout, hardware, problems)
    if problems:
        return None
    smallest = min(hardware.gpus, key=lambda gpu: gpu.memory or 0)
    try:
        sizes = _sizes(layout)
        draft = None if layout.draft is None else _sizes(layout.draft)
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
        draft=draft,
    )
    model = gpu_found(smallest.name, smallest.memory)
    return recommend(sizes, conditions, model, gpu=smallest.name or "an NVIDIA GPU")


def _sizes(layout: Layout) -> CheckpointSizes:
    """The sizes of a checkpoint; the weights of a remote one that is only described are counted."""
    if layout.weight_files:
        return CheckpointSizes.read(layout.path)
    return CheckpointSizes.from_config(layout.config or {})


def _memory_problem(config: Config, layout: Layout, longest: int, found: Recommendation) -> str | None:
    """Return what does not fit, with the numbers; None if all does."""
    tokens = config.options.max_num_tokens
    if found.refusal is not None:
        return f"{layout.path} does not fit: {found.refusal}"
    if tokens is None:
        return None
    setting = config.format_setting("max_num_tokens")
    if tokens > found.maximum:
        source = str(found.row) if found.row is not None else f"estimated for {found.place}"
        return (
            f"{setting} does not fit: at most {found.maximum} do ({source}); leave the option out, or set "
            f"{found.max_num_tokens}"
        )
    smaller, held = found.estimate.recommended, found.estimate.kv_tokens(tokens)
    if found.row is not None and held < longest and longest > _VOUCHED_FOR and 0 < smaller < tokens:
        return (
            f"{setting} leaves a KV cache of about {held} tokens on {found.place}, less than one sequence of "
            f"{longest}: {found.row} was measured with prompts of 3,700 tokens; set option.max_num_tokens={smaller}, "
            "or shorter lengths"
        )
    return None


# -- inputs of the arguments -------------------------------------------------------------------------------------------


def plan_inputs(
    config: Config, layout: Layout, hardware: Hardware, backend: Backend, problems: list[str], notes: list[str]
) -> PlanInputs:
    """Return what the arguments of LLM follow from beside the options; adds to `problems` and `notes`."""
    options, shape = config.options, layout.shape
    tensor_parallel, pipeline_parallel = _degrees(config, layout, hardware, problems)
    problems += _undivided(config, layout, backend, tensor_parallel)
    max_seq_len = planned_length(config, shape, notes)
    version = planned_version(hardware)
    if version != hardware.tensorrt_llm:
        notes.append(f"the version of TensorRT-LLM is unknown: it gets the arguments of {version}")
    iteration = tokens_per_iteration(config, backend, max_seq_len)
    if iteration.holds_a_prompt and iteration.tokens > _MANY_TOKENS:
        notes.append(
            f"an iteration holds {iteration.tokens} tokens, because prompts may be so long and are not split: that "
            "takes memory from the KV cache; set option.enable_chunked_prefill=true to split them"
        )
    oldest = min((gpu.compute_capability for gpu in hardware.gpus if gpu.compute_capability), default=None)
    settable = backend is Backend.TENSORRT or has("KvCacheConfig", "tokens_per_block", version)
    return PlanInputs(
        backend=backend,
        version=version,
        dtype=weight_dtype(config, shape, oldest, compiled=backend is Backend.TENSORRT),
        stored_quantization=layout.quantization,
        max_sequences=planned_sequences(config),
        max_batch_size=options.max_num_sequences or options.max_rolling_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=iteration.tokens,
        tokens_per_block=options.tokens_per_block if settable else _TOKENS_PER_BLOCK,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )


def planned_version(hardware: Hardware) -> str:
    """The version whose arguments are passed: the installed one, or another where none can be read."""
    known = hardware.tensorrt_llm is not None and release_of(hardware.tensorrt_llm) is not None
    return hardware.tensorrt_llm if known and hardware.tensorrt_llm else SUPPOSED_VERSION


def _degrees(config: Config, layout: Layout, hardware: Hardware, problems: list[str]) -> tuple[int, int]:
    """Return the GPUs over which each layer is split, and the groups of GPUs over which layers are spread."""
    options = config.options
    context = options.context_parallel_size
    launched = os.environ.get(LAUNCHED) == "1"
    nodes = max(options.num_nodes, options.cluster_size or 1)
    here = len(hardware.gpus) * (nodes if launched else 1)
    pipeline = _degree(config, "pipeline_parallel_degree", layout, layout.pipeline_parallel, problems)
    tensor = _degree(config, "tensor_parallel_degree", layout, layout.tensor_parallel, problems)
    if tensor == "max":
        tensor = max(1, here // (pipeline * context))
    needed = tensor * pipeline * context
    unknown = launched and nodes == 1  # how many GPUs the other machines have
    # `check_built_engine` compares all of this for an engine.
    if needed > here and not unknown and not layout.kind.is_engine:
        asked = [
            config.format_setting(name)
            for name in ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_size")
            if config.is_set(name)
        ]
        problems.append(
            f"{' and '.join(asked) or layout.path} need{'' if len(asked) > 1 else 's'} {needed} GPUs, and {here} can "
            "be used here; with GPUs of several machines, start the server with trtllm-llmapi-launch"
        )
    return tensor, pipeline


def _degree(config: Config, name: str, layout: Layout, degree: int | None, problems: list[str]) -> Any:
    """Return the option's degree, or the degree in TensorRT-LLM's own files, which are split already."""
    value = getattr(config.options, name)
    if degree is None:
        return value
    if layout.kind.is_engine:
        return degree
    if config.is_set(name) and value not in ("max", degree):
        problems.append(f"{config.format_setting(name)}: the checkpoint is converted for {degree}")
    return degree


def _undivided(config: Config, layout: Layout, backend: Backend, degree: int) -> list[str]:
    """Return why the heads cannot be split over this number of GPUs; AutoDeploy leaves such layers whole."""
    whole = backend is Backend.PYTORCH and config.options.enable_attention_dp
    if whole or backend is Backend.AUTODEPLOY or layout.kind is not ModelKind.HF_CHECKPOINT:
        return []
    problem = indivisible_heads(layout.shape.num_heads, layout.shape.num_kv_heads, degree)
    return [] if problem is None else [f"{config.format_setting('tensor_parallel_degree')}: {problem}"]
