"""The arguments of TensorRT-LLM's LLM for a configuration, as plain data.

`options.toml` maps options to arguments: what it says is passed as it is. The derivations at the end compute arguments
from several options, the model and the machine, and override that.
"""

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from djl_trtllm.backends.effects import Derived, Effects, Passed, Target, read_effects, refusals
from djl_trtllm.backends.extra_options import ExtraArgument, choices
from djl_trtllm.backends.tensorrt_llm.names import all_members, default_of, has, members, owners
from djl_trtllm.backends.tensorrt_llm.speculation import speculative_object
from djl_trtllm.config import Backend, Config, DType, KvCacheDType, Quantization
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.options.choices import Choice, GuidedDecoding, KvCacheType
from djl_trtllm.config.speculation import Speculation
from djl_trtllm.engines.hardware import release_of
from djl_trtllm.files import read_table
from djl_trtllm.sizing.recommendation import FREE_MEMORY_FRACTION

ENGINE: Effects = read_effects(__package__, "both", "engine")
"""The option map of engines that TensorRT-LLM compiles (`option.backend=tensorrt`)."""
PYTORCH: Effects = read_effects(__package__, "both", "pytorch")
"""The option map of TensorRT-LLM's PyTorch backend and of AutoDeploy (`option.backend=pytorch`, `autodeploy`)."""
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
_TABLE = read_table("options.toml", __package__)
_LORA_PLACES = {Backend.TENSORRT: Target("BuildConfig", "lora_config")}
_LORA_OWNERS = ("LoraConfig", "PeftCacheConfig")


class Phase(enum.Flag):
    """When an argument is passed: to compile an engine, or to run an engine or a checkpoint."""

    BUILD = enum.auto()
    RUN = enum.auto()


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of arguments other than the options.

    `version` is TensorRT-LLM's. `dtype` is the number format of the weights (float16, ...; None if unknown),
    `stored_quantization` the quantisation of the checkpoint. `max_sequences` run at once, the engine is compiled for
    `max_batch_size`; lengths and `tokens_per_block` are in tokens, parallel degrees in GPUs. `extra` are the arguments
    of `option.extra_llm_api_options` that no option is. `draft` is the draft model of `speculation`.
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
    extra: tuple[ExtraArgument, ...] = ()
    speculation: Speculation | None = None
    draft: str | None = None


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
        """Return whether this version has the argument and one of the phases passes it."""
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
        self.problems += [self._missing(name, missing) for name in options if self.config.is_set(name)]

    def _check_choice(self, target: Target, value: Any, options: tuple[str, ...]) -> None:
        """Note a problem for a text that TensorRT-LLM's classes, or before 1.2 its kernels, refuse."""
        taken = choices(self._type(target))
        if taken is None or not isinstance(value, str) or value in taken:
            return
        words = " or ".join(filter(None, (", ".join(taken[:-1]), taken[-1])))
        self.problems += [
            f"{self.format_setting(name)}: TensorRT-LLM {self.inputs.version} takes {words} as {target}"
            for name in options
            if self.config.is_set(name)
        ]

    def add(self, extra: ExtraArgument, effects: Effects) -> None:
        """Pass an argument without an option; it is a problem if options of the user say otherwise."""
        if not self._is_passed(extra.target):
            return
        around = _place(extra.target.owner, self.inputs.backend)
        if self._values.get(around, extra) is None or self._values.get(extra.target, extra.value) != extra.value:
            self.problems += [
                f"option.extra_llm_api_options, {extra.place}: {extra.target} is {extra.value!r} here, and "
                f"{self.format_setting(name)} says otherwise: keep one"
                for name, effect in effects.items()
                if isinstance(effect, Passed | Derived)
                and {extra.target, around} & set(effect.targets)
                and self.config.is_set(name)
            ]
        self._values[extra.target] = extra.value

    def drop(self, target: Target) -> None:
        self._values.pop(target, None)

    def put_unless_default(self, target: Target, value: Any, *options: str) -> None:
        """Pass a value that the user set, or that differs from TensorRT-LLM's default."""
        is_set = any(self.config.is_set(name) for name in options)
        if is_set or (self.is_taken(target) and self._differs(target, value)):
            self.put(target, value, *options)

    def format_setting(self, name: str) -> str:
        return self.config.format_setting(name)

    def arguments(self, phase: Phase) -> Arguments:
        """The keyword arguments of LLM in one phase."""
        objects: dict[str, dict[str, Any]] = {"LLM": {}}
        for target, value in sorted(self._values.items()):
            if phase in _phases(target, self.inputs.backend):
                self._object(target.owner, objects)[target.name] = value
        return dict(sorted(objects["LLM"].items()))

    def _object(self, owner: str, objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
        if owner not in objects:
            place = _place(owner, self.inputs.backend)
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
    """Collect the options that are passed as they are, and above them what is derived from several."""
    builder = ArgumentBuilder(config, inputs, phases)
    effects = ENGINE if inputs.backend is Backend.TENSORRT else PYTORCH
    builder.problems += refusals(config, effects, f"TensorRT-LLM's {inputs.backend} backend")
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
    for derive in _DERIVATIONS:
        derive(builder)
    for extra in inputs.extra:
        builder.add(extra, effects)
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
    """Return the arguments as Python code, for the log."""
    return f"{name}({', '.join(f'{key}={_shown(value)}' for key, value in arguments.items() if key != 'class')})"


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "class" in value:
        return shown(value, value["class"])
    if isinstance(value, dict) and "enum" in value:
        return f"{value['enum']}.{value['name']}"
    return repr(value)


def is_of_build(option: str) -> bool:
    """Return whether an option has its effect while an engine is compiled, and none when it runs."""
    effect = ENGINE.get(option)
    targets = effect.targets if isinstance(effect, Passed | Derived) else ()
    return bool(targets) and all(_phases(target, Backend.TENSORRT) is Phase.BUILD for target in targets)


def _place(owner: str, backend: Backend) -> Target:
    """The argument of LLM that takes an object of a class; the owner LLM itself has none."""
    if owner == "LoraConfig" and backend in _LORA_PLACES:
        return _LORA_PLACES[backend]
    return Target(*_TABLE["places"].get(owner, ".").split("."))


def _phases(target: Target, backend: Backend) -> Phase:
    if backend is not Backend.TENSORRT:
        # Nothing is built from a checkpoint that runs as it is.
        return Phase(0) if target.owner in _TABLE["phases"]["build"] and target.owner != "LoraConfig" else Phase.RUN
    name = target.name if target.owner == "LLM" else target.owner
    if name in _TABLE["phases"]["build"]:
        return Phase.BUILD
    return Phase.BUILD | Phase.RUN if name in _TABLE["phases"]["both"] else Phase.RUN


def _span(owner: str, name: str) -> str:
    """The versions in which an owner has a name, in words for a message; "" where no version has it."""
    among = {owner, *owners()[owner].base}
    spans = [(row.since, row.until) for row in all_members() if row.owner in among and row.name == name]
    if not spans:
        return ""
    since, until = spans[-1]
    return f" (it has it from {since} on)" if until is None else f" (it had it from {since} on and before {until})"


def _plain(value: Any, type_text: str) -> Any:
    """An option's value as TensorRT-LLM takes it; `type_text` is the type of the argument."""
    if value == "disable":
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


# -- arguments that follow from several options, the model and the machine --------------------------------------------

_SMOOTHQUANT = {
    (False, False): "W8A8_SQ_PER_TENSOR_PLUGIN",
    (True, False): "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
    (False, True): "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
    (True, True): "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
}
"""The algorithm by option.smoothquant_per_token and option.smoothquant_per_channel, where one is set (TensorRT-LLM's
`tests/integration/defs/accuracy/test_cli_flow.py` at 000a01de)."""

_SAME = {Quantization(name): tuple(algorithms) for name, algorithms in _TABLE["algorithms"].items()}
"""The algorithms that count as each value of `option.quantize`; the compiler uses the first."""
_CALIBRATED = frozenset({"W4A16_AWQ", "W4A8_AWQ", "FP8", "NVFP4", "W4A8_NVFP4_FP8", *_SAME[Quantization.SMOOTHQUANT]})
_QUANT_ALGO = Target("QuantConfig", "quant_algo")


def method_of(algorithm: str | None) -> Quantization | None:
    """The value of `option.quantize` for one of TensorRT-LLM's algorithms, or None."""
    return next((method for method, names in _SAME.items() if algorithm in names), None)


def _quantization(builder: ArgumentBuilder) -> None:
    """`QuantConfig` and `CalibConfig` of an engine; a quantised checkpoint has its own."""
    options, inputs = builder.options, builder.inputs
    if options.quantize is not None and inputs.stored_quantization is not None:
        if inputs.stored_quantization not in _SAME[options.quantize]:
            builder.problems.append(
                f"{builder.format_setting('quantize')}: the checkpoint is quantised already, with "
                f"{inputs.stored_quantization}; leave the option out, or take a checkpoint that is not"
            )
        return
    if options.quantize is not None and inputs.backend is not Backend.TENSORRT:
        builder.problems.append(
            f"{builder.format_setting('quantize')}: TensorRT-LLM's {inputs.backend} backend does not quantise, and "
            "this checkpoint is not quantised: take one that is (quantised by ModelOpt, with hf_quant_config.json), "
            "or compile an engine with option.backend=tensorrt on TensorRT-LLM 1.2"
        )
        return
    algorithm = _algorithm(builder.config)
    if algorithm is None:
        return
    if _QUANT_ALGO not in builder:
        builder.put(_QUANT_ALGO, {"enum": "QuantAlgo", "name": algorithm}, "quantize")
    if algorithm in _SAME[Quantization.SMOOTHQUANT]:
        builder.put(Target("QuantConfig", "smoothquant_val"), options.smoothquant_alpha, "smoothquant_alpha")
    if algorithm in _CALIBRATED and options.calib_batches is None:
        batches = -(-options.calib_size // options.calib_batch_size)
        builder.put(Target("CalibConfig", "calib_batches"), batches, "calib_size")


def _algorithm(config: Config) -> str | None:
    options = config.options
    if options.quant_algo is not None:
        return str(options.quant_algo)
    if options.quantize is Quantization.AWQ and options.awq_format == "w4a8_awq":
        return "W4A8_AWQ"
    chosen = config.is_set("smoothquant_per_token") or config.is_set("smoothquant_per_channel")
    if options.quantize is Quantization.SMOOTHQUANT and chosen:
        return _SMOOTHQUANT[options.smoothquant_per_token, options.smoothquant_per_channel]
    return None if options.quantize is None else _SAME[options.quantize][0]


def _kv_cache_format(builder: ArgumentBuilder) -> None:
    """The number format of the KV cache: an engine's is chosen while compiling, PyTorch's while loading."""
    options, engine = builder.options, builder.inputs.backend is Backend.TENSORRT
    match options.kv_cache_dtype:
        case KvCacheDType.FP8 | KvCacheDType.INT8 if engine:
            if options.kv_cache_quant_algo is None:
                algorithm = {"enum": "QuantAlgo", "name": options.kv_cache_dtype.value.upper()}
                builder.put(Target("QuantConfig", "kv_cache_quant_algo"), algorithm, "kv_cache_dtype")
        case KvCacheDType.FP8:
            builder.put(Target("KvCacheConfig", "dtype"), "fp8", "kv_cache_dtype")
        case KvCacheDType.FP16 if builder.inputs.dtype not in (None, "float16"):
            builder.notes.append(
                f"{builder.format_setting('kv_cache_dtype')}: TensorRT-LLM keeps the cache in the model's own number "
                f"format, {builder.inputs.dtype}"
            )


def is_calibrated(config: Config, stored_quantization: str | None) -> bool:
    """Return whether compiling calibrates with samples."""
    return stored_quantization is None and _algorithm(config) in _CALIBRATED


_GUIDES_OVERLAPPED = Version("1.1.0rc0")
_DYNAMIC_BATCH = {
    "enable_batch_size_tuning": True,
    "enable_max_num_tokens_tuning": False,
    "dynamic_batch_moving_average_window": 128,
}
_KNOBS = "ExtendedRuntimePerfKnobConfig"
_CUDA_GRAPHS = ("cuda_graph_batch_sizes", "cuda_graph_max_batch_size", "cuda_graph_padding_enabled")


_RESPONSES = 1024
"""The most responses of an iteration that the engine process can read in time."""


def _limits(builder: ArgumentBuilder) -> None:
    inputs, options = builder.inputs, builder.options
    sequences = ("max_rolling_batch_size", "max_num_sequences")
    lengths = ("max_seq_len", "max_output_len")
    builder.put(Target("BuildConfig", "max_batch_size"), inputs.max_batch_size, *sequences)
    builder.put(Target("BuildConfig", "max_seq_len"), inputs.max_seq_len, *lengths)
    builder.put(Target("BuildConfig", "max_num_tokens"), inputs.max_num_tokens, "max_num_tokens")
    longest_prompt = min(options.max_input_len, inputs.max_seq_len)
    builder.put(Target("BuildConfig", "max_input_len"), longest_prompt, "max_input_len")
    builder.put(Target("LLM", "max_batch_size"), inputs.max_sequences, *sequences)
    builder.put(Target("LLM", "max_num_tokens"), inputs.max_num_tokens, "max_num_tokens")
    if inputs.backend is not Backend.TENSORRT:
        if options.max_beam_width > inputs.max_sequences:
            builder.problems.append(
                f"{builder.format_setting('max_beam_width')}: each request of the {inputs.backend} backend takes one "
                f"sequence for each beam, and only {inputs.max_sequences} run at once: raise "
                "option.max_rolling_batch_size to as many, or lower option.max_beam_width"
            )
        # An engine has its own lengths, and warns of others.
        builder.put(Target("LLM", "max_seq_len"), inputs.max_seq_len, *lengths)
        builder.put_unless_default(Target("LLM", "max_input_len"), longest_prompt, "max_input_len")


def _parallelism(builder: ArgumentBuilder) -> None:
    inputs = builder.inputs
    if inputs.backend is Backend.AUTODEPLOY:
        _world_size(builder)
        return
    partition = builder.options.pp_partition
    if partition is not None and inputs.backend is Backend.PYTORCH and len(partition) != inputs.pipeline_parallel:
        builder.problems.append(
            f"{builder.format_setting('pp_partition')}: {len(partition)} numbers of layers for "
            f"{inputs.pipeline_parallel} groups; give one for each group of option.pipeline_parallel_degree"
        )
    for target, degree, option in (
        (Target("LLM", "tensor_parallel_size"), inputs.tensor_parallel, "tensor_parallel_degree"),
        (Target("LLM", "pipeline_parallel_size"), inputs.pipeline_parallel, "pipeline_parallel_degree"),
    ):
        if degree > 1 or target in builder:
            builder.put(target, degree, option)


def _world_size(builder: ArgumentBuilder) -> None:
    """Pass AutoDeploy the number of GPUs over which it distributes a model by itself."""
    builder.drop(Target("LLM", "tensor_parallel_size"))
    if builder.inputs.tensor_parallel > 1:
        builder.put(Target("LLM", "world_size"), builder.inputs.tensor_parallel)
    builder.problems += [
        f"{builder.format_setting(name)}: AutoDeploy distributes a model by option.tensor_parallel_degree only; leave "
        f"it out"
        for name in _TABLE["autodeploy"]["distributes_itself"]
        if builder.config.is_set(name)
    ]


def _kv_cache(builder: ArgumentBuilder) -> None:
    options = builder.options
    fraction = options.kv_cache_free_gpu_mem_fraction
    builder.put_unless_default(
        Target("KvCacheConfig", "free_gpu_memory_fraction"),
        FREE_MEMORY_FRACTION if fraction is None else fraction,
        "kv_cache_free_gpu_mem_fraction",
    )
    builder.put_unless_default(
        Target("KvCacheConfig", "enable_block_reuse"), options.enable_kv_cache_reuse, "enable_kv_cache_reuse"
    )
    if builder.is_taken(tokens_per_block := Target("KvCacheConfig", "tokens_per_block")):
        # Those of an engine are what it was compiled with.
        builder.drop(tokens_per_block)
        builder.put_unless_default(tokens_per_block, builder.inputs.tokens_per_block, "tokens_per_block")
    _kv_cache_format(builder)


def _kv_cache_type(builder: ArgumentBuilder) -> None:
    options, target = builder.options, Target("BuildConfig", "kv_cache_type")
    if not builder.config.is_set("paged_kv_cache"):
        return
    paged = options.kv_cache_type in (None, KvCacheType.PAGED)
    if options.kv_cache_type is not None and paged != options.paged_kv_cache:
        builder.problems.append(
            f"{builder.format_setting('paged_kv_cache')} and {builder.format_setting('kv_cache_type')} contradict "
            "each other: leave one of them out"
        )
    elif options.kv_cache_type is None:
        kind = KvCacheType.PAGED if options.paged_kv_cache else KvCacheType.CONTINUOUS
        builder.put(target, kind, "paged_kv_cache")


def _paged_context(builder: ArgumentBuilder) -> None:
    """Problems of reused blocks or chunked prompts without attention kernels that read the paged cache."""
    options = builder.options
    if builder.inputs.backend is not Backend.TENSORRT or options.use_paged_context_fmha:
        return
    for name in ("enable_kv_cache_reuse", "enable_chunked_prefill"):
        if getattr(options, name):
            builder.problems.append(
                f"{builder.format_setting(name)} needs an engine with option.use_paged_context_fmha, and "
                f"{builder.format_setting('use_paged_context_fmha')}: leave that out"
            )


def _scheduler(builder: ArgumentBuilder) -> None:
    options = builder.options
    if any(Target("DynamicBatchConfig", name) in builder for name in _DYNAMIC_BATCH):
        for name, value in _DYNAMIC_BATCH.items():
            if Target("DynamicBatchConfig", name) not in builder:
                builder.put(Target("DynamicBatchConfig", name), value)
    if options.enable_overlap_scheduler is not None and builder.inputs.backend is not Backend.TENSORRT:
        builder.put(
            Target("LLM", "disable_overlap_scheduler"), not options.enable_overlap_scheduler, "enable_overlap_scheduler"
        )


def _stream_interval(builder: ArgumentBuilder) -> None:
    """`auto` keeps an iteration's responses at 1,024: each costs the engine process 12 µs on PyTorch."""
    if builder.inputs.backend is not Backend.TENSORRT:
        chosen = builder.options.stream_interval
        interval = -(-builder.inputs.max_sequences // _RESPONSES) if chosen == "auto" else chosen
        builder.put_unless_default(Target("LLM", "stream_interval"), interval, "stream_interval")


def _knobs(builder: ArgumentBuilder) -> None:
    """Runtime switches of an engine: the options of single switches override the JSON object."""
    options = builder.options
    if builder.inputs.backend is not Backend.TENSORRT:
        return
    for name, value in _knob_object(builder).items():
        if Target(_KNOBS, name) not in builder:
            builder.put(Target(_KNOBS, name), value, "extended_runtime_perf_knob_config")
    if options.enforce_eager and not builder.config.is_set("cuda_graph_mode"):
        builder.put(Target(_KNOBS, "cuda_graph_mode"), False, "enforce_eager")


def _knob_object(builder: ArgumentBuilder) -> dict[str, Any]:
    text = builder.options.extended_runtime_perf_knob_config
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, bool | int])
    except msgspec.DecodeError as error:
        builder.problems.append(
            f"{builder.format_setting('extended_runtime_perf_knob_config')}: expected a JSON object of switches and "
            f'numbers, such as {{"cuda_graph_mode": true}} ({error})'
        )
        return {}


def _cuda_graphs(builder: ArgumentBuilder) -> None:
    options, config = builder.options, builder.config
    target = Target("LLM", "cuda_graph_config")
    if builder.inputs.backend is Backend.TENSORRT:
        return
    chosen = [name for name in _CUDA_GRAPHS if config.is_set(name)]
    wanted = not options.enforce_eager if options.use_cuda_graph is None else options.use_cuda_graph
    if not wanted:
        switch = "enforce_eager" if options.use_cuda_graph is None else "use_cuda_graph"
        builder.problems += [
            f"{builder.format_setting(name)} and {builder.format_setting(switch)} contradict each other: leave one of "
            f"them out"
            for name in chosen
        ]
        builder.put(target, None, switch)
    elif options.cuda_graph_batch_sizes is not None and options.cuda_graph_max_batch_size is not None:
        builder.problems.append(
            f"{builder.format_setting('cuda_graph_batch_sizes')} and "
            f"{builder.format_setting('cuda_graph_max_batch_size')}: "
            "TensorRT-LLM takes either the batches or the largest of them; leave one out"
        )
    elif options.use_cuda_graph and not chosen:
        builder.put(target, {"class": "CudaGraphConfig"}, "use_cuda_graph")


def _guided_decoding(builder: ArgumentBuilder) -> None:
    options, target = builder.options, Target("LLM", "guided_decoding_backend")
    engine = builder.inputs.backend is Backend.TENSORRT
    if engine and options.guided_decoding_backend is GuidedDecoding.LLGUIDANCE:
        builder.problems.append(
            f"{builder.format_setting('guided_decoding_backend')}: a compiled engine has xgrammar only; llguidance is "
            "the PyTorch backend's"
        )
    elif _guides_by_default(builder.inputs) and not builder.config.is_set("guided_decoding_backend"):
        builder.put(target, GuidedDecoding.XGRAMMAR)


def _guides_by_default(inputs: PlanInputs) -> bool:
    """Return whether a backend gets a library for guides although no option chooses one.

    Not all versions of AutoDeploy have guides; PyTorch 1.0 has them only without its overlap scheduler.
    """
    if inputs.backend is Backend.PYTORCH:
        release = release_of(inputs.version)
        return release is None or release >= _GUIDES_OVERLAPPED
    return inputs.backend is Backend.TENSORRT


def _lora(builder: ArgumentBuilder) -> None:
    options = builder.options
    if not options.enable_lora:
        return
    if builder.inputs.backend is Backend.TENSORRT:
        building = Phase.BUILD in builder.phases
        if building and options.lora_target_modules is None and options.lora_dir is None:
            builder.problems.append(
                f"{builder.format_setting('enable_lora')}: a compiled engine must know which modules adapters change: "
                "set option.lora_target_modules (such as attn_q,attn_k,attn_v), or option.lora_dir to an adapter"
            )
    builder.put(Target("LoraConfig", "max_lora_rank"), options.max_lora_rank, "max_lora_rank")
    if options.lora_dir is not None:
        builder.put(Target("LoraConfig", "lora_dir"), [options.lora_dir], "lora_dir")


def _files(builder: ArgumentBuilder) -> None:
    """Make the paths of files absolute that the compiler reads, because it runs in the engine's directory."""
    cache = builder.options.input_timing_cache
    if cache is not None:
        builder.put(Target("BuildConfig", "input_timing_cache"), cache.absolute(), "input_timing_cache")


def _speculation(builder: ArgumentBuilder) -> None:
    """`LLM.speculative_config`: an object of the method's class."""
    asked = builder.inputs.speculation
    if asked is None:
        return
    place = Target("LLM", "speculative_config")
    builder.problems += [
        f"{asked.setting}: speculative_config in option.extra_llm_api_options ({extra.place}) says the same: keep one"
        for extra in builder.inputs.extra
        if extra.target == place
    ]
    owner, values = speculative_object(asked, builder.inputs.draft, builder.problems)
    for name, value in values.items():
        if builder.exists(Target(owner, name)):
            builder.put(Target(owner, name), value)
        else:
            builder.problems.append(
                f"{asked.setting}: TensorRT-LLM {builder.inputs.version} has no {owner}.{name}; leave {name} out"
            )


_DERIVATIONS: tuple[Callable[[ArgumentBuilder], None], ...] = (
    _limits,
    _parallelism,
    _quantization,
    _kv_cache,
    _kv_cache_type,
    _paged_context,
    _scheduler,
    _stream_interval,
    _knobs,
    _cuda_graphs,
    _guided_decoding,
    _lora,
    _files,
    _speculation,
)
