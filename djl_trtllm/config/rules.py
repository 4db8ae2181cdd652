"""The rules between options; nothing else checks one option against another.

Rules that need only options run in `resolve.resolve`; rules about the model's files run in `check_model`, when the
files are there; rules about what an engine does run in `check_running`, when the engine is chosen, with the values that
it runs with: an option without effect there, or with a fixed one, breaks none of them. A rule that today's engines no
longer have gives a note and never an error.
"""

import enum
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.options.choices import Backend, QuantAlgorithm, Quantization, SchedulerPolicy
from djl_trtllm.config.sources import Config
from djl_trtllm.errors import ConfigError
from djl_trtllm.files import read_table

_IMAGES = 16
"""The most images of a request by default."""


@lru_cache(maxsize=8)
def most_images(limits: str | None) -> int:
    """The most images of a request, from the option's text. Raises ValueError for a text that it may not have.

    As in vLLM, a limit is a number, or an object whose `count` is one.
    """
    if limits is None:
        return _IMAGES
    try:
        read = json.loads(limits)
    except (ValueError, RecursionError):
        read = None
    if type(read) is not dict:
        raise ValueError('expected a JSON object such as {"image": 4}')
    counts = {kind: given.get("count", 0) if type(given) is dict else given for kind, given in read.items()}
    for kind, count in counts.items():
        if type(count) is not int or count < 0:
            raise ValueError(f"expected a whole number for {kind!r}")
        if count and kind != "image":
            raise ValueError(f"only texts and images are served: expected 0 for {kind!r}")
    return int(counts.get("image", _IMAGES))


@dataclass(frozen=True)
class RuleContext:
    """Options by the names of their fields.

    `value(name)` is the resolved value, `is_set(name)` whether the user set it, `format_setting(name)` is `KEY=VALUE
    (origin)`, `written_name(name)` the key or variable that the user wrote. `model_type` is that of config.json,
    `is_engine` whether the model is compiled, `compiled_as` with which quantisation; None if unknown.
    """

    value: Callable[[str], Any]
    is_set: Callable[[str], bool]
    format_setting: Callable[[str], str]
    written_name: Callable[[str], str]
    model_type: str | None = None
    is_engine: bool | None = None
    compiled_as: str | None = None

    @classmethod
    def of(cls, config: Config, **model: Any) -> "RuleContext":
        """The context of a configuration and a model."""
        return cls(
            value=partial(getattr, config.options),
            is_set=config.is_set,
            format_setting=config.format_setting,
            written_name=lambda name: OPTIONS[name].key,
            **model,
        )


Broken = Callable[[RuleContext], str | None]


class Severity(enum.Enum):
    """The result of a broken rule: an error refuses the configuration, a note is only shown."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class When(enum.Enum):
    """The moment a rule is checked: options are read, the model's files are there, or the engine is chosen."""

    OPTIONS = "options"
    MODEL = "model"
    RUNNING = "running"


@dataclass(frozen=True)
class Rule:
    """One row of `rules.toml`. `broken` returns a message, or None if the rule holds; without it the type checks it."""

    name: str
    options: list[str]
    condition: str
    severity: Severity
    lifted: str
    document: str
    broken: Broken | None = None
    when: When = When.OPTIONS


_BROKEN: dict[str, Broken] = {}


def _rule(broken: Broken) -> Broken:
    """The function checks the rule of its name in `rules.toml`."""
    _BROKEN[broken.__name__] = broken
    return broken


@dataclass
class Findings:
    """Messages of broken rules, by severity."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def added_to(self, config: Config) -> Config:
        """The configuration with these warnings and notes. Raises ConfigError if there are problems."""
        if self.problems:
            raise ConfigError(self.problems, [*config.warnings, *self.warnings])
        if not self.warnings and not self.notes:
            return config
        return replace(config, warnings=(*config.warnings, *self.warnings), notes=(*config.notes, *self.notes))


def check(context: RuleContext, when: When, rules: Iterable[Rule] | None = None) -> Findings:
    """Check the rules of one moment; `rules` are all by default."""
    found = Findings()
    into = {Severity.ERROR: found.problems, Severity.WARNING: found.warnings, Severity.NOTE: found.notes}
    for rule in RULES if rules is None else rules:
        if rule.when is when and rule.broken is not None and (message := rule.broken(context)) is not None:
            into[rule.severity].append(message)
    return found


def check_model(config: Config, model_type: str | None, is_engine: bool, *, compiled_as: str | None = None) -> Config:
    """Run the rules that need the model's files, and return the configuration with their warnings and notes.

    `model_type` is that of config.json, `is_engine` whether the files are a compiled engine, and `compiled_as` the
    quantisation it was compiled with, where that is known. Raises ConfigError with every problem.
    """
    context = RuleContext.of(config, model_type=model_type, is_engine=is_engine, compiled_as=compiled_as)
    return check(context, When.MODEL).added_to(config)


def check_running(config: Config, value: Callable[[str], Any]) -> Config:
    """Run the rules about running engines, and return the configuration with their warnings and notes.

    `value` is what the backend makes of an option, by its field.
    """
    return check(replace(RuleContext.of(config), value=value), When.RUNNING).added_to(config)


@_rule
def engine_of_djl_serving(context: RuleContext) -> str | None:
    engine = context.value("engine")
    if engine is None or engine.lower() in ("python", "mpi"):
        return None
    return (
        f"{context.format_setting('engine')} is another engine of DJL Serving and has no effect: option.backend "
        "chooses the engine; under DJL Serving write engine=Python"
    )


@_rule
def rotary_scaling_pair(context: RuleContext) -> str | None:
    pair = ("rotary_scaling_type", "rotary_scaling_factor")
    missing = [name for name in pair if context.value(name) is None]
    if len(missing) != 1:
        return None
    (present,) = (name for name in pair if name not in missing)
    example = "linear" if missing == ["rotary_scaling_type"] else "2"
    return (
        f"{context.format_setting(present)} needs option.{missing[0]} beside it: write option.{missing[0]}={example}, "
        "or neither"
    )


def _is_of(context: RuleContext, families: tuple[str, ...]) -> bool:
    kind = (context.model_type or "").lower().replace("-", "").replace("_", "")
    return kind.startswith(families)


def _outside(context: RuleContext, name: str, families: tuple[str, ...], names: str) -> str | None:
    if (
        not context.is_set(name)
        or context.value(name) is False
        or context.model_type is None
        or _is_of(context, families)
    ):
        return None
    return f"{context.format_setting(name)} is documented for {names} only, and this model is {context.model_type}"


for _name, _families, _names in (
    ("rotary_dim", ("gptj",), "GPT-J"),
    ("rotary_base", ("llama", "internlm", "qwen"), "Llama, InternLM and Qwen"),
    ("use_fused_mlp", ("llama",), "Llama"),
):
    _BROKEN[f"{_name}_family"] = partial(_outside, name=_name, families=_families, names=_names)


@_rule
def multi_block_mode_family(context: RuleContext) -> str | None:
    if not context.value("multi_block_mode") or not _is_of(context, ("qwen",)):
        return None
    return (
        f"{context.format_setting('multi_block_mode')}: early engines did not have it for Qwen (this model is "
        f"{context.model_type}); today's kernels do"
    )


@_rule
def smoothquant_family(context: RuleContext) -> str | None:
    families = ("llama", "mistral", "internlm", "baichuan")
    if _quantization(context) != "smoothquant" or context.model_type is None or _is_of(context, families):
        return None
    return (
        f"{_quantized(context)} is documented for Llama, Mistral, InternLM and Baichuan, and this model is "
        f"{context.model_type}: where compiling fails, use option.quantize=fp8 or int8"
    )


@_rule
def smoothquant_parts(context: RuleContext) -> str | None:
    if _quantization(context) == "smoothquant":
        return None
    names = ("smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel", "multi_query_mode")
    return _without(context, names, "smoothquant")


@_rule
def awq_family(context: RuleContext) -> str | None:
    if _quantization(context) != "awq" or context.model_type is None or _is_of(context, ("llama", "mistral")):
        return None
    return (
        f"{_quantized(context)}: early containers had it for Llama and Mistral only (this model is "
        f"{context.model_type}); today's compilers take it"
    )


@_rule
def awq_parts(context: RuleContext) -> str | None:
    chosen = _quantization(context)
    if chosen in ("awq", "w4a8_awq"):
        return None
    names = ["awq_format", "awq_block_size"]
    calibrated = chosen in ("smoothquant", "fp8", "NVFP4") and "awq" not in context.written_name("calib_size").lower()
    if not calibrated:
        names.append("calib_size")
    return _without(context, tuple(names), "awq")


@_rule
def quantize_compiled(context: RuleContext) -> str | None:
    if not context.is_engine:
        return None
    wanted = context.value("quantize")
    algorithm = context.value("quant_algo") not in (None, QuantAlgorithm.NO_QUANT)
    if algorithm and context.compiled_as is None:
        name = "quant_algo"
    elif wanted is not None and wanted != context.compiled_as:
        name = "quantize"
    else:
        return None
    return (
        f"{context.format_setting(name)}: the model is a compiled engine, and its weights have the format that it was "
        f"compiled with; remove option.{name}, or serve the checkpoint it was compiled from"
    )


@_rule
def chatglm_version(context: RuleContext) -> str | None:
    if not _is_of(context, ("chatglm",)) or context.is_set("chatglm_model_version"):
        return None
    return (
        f"option.chatglm_model_version is not set and this model is {context.model_type}: LMI containers "
        "require it (such as chatglm3_6b), here the checkpoint's path or its config.json has the version"
    )


@_rule
def chatglm_unspecified(context: RuleContext) -> str | None:
    unspecified = context.value("chatglm_model_version") == "unspecified"
    if not _is_of(context, ("chatglm",)) or not context.is_set("chatglm_model_version") or not unspecified:
        return None
    return (
        f"{context.format_setting('chatglm_model_version')}: this model is {context.model_type} and has a version; "
        "name it (such as chatglm3_6b), or remove the option: the checkpoint's path or its config.json has it"
    )


@_rule
def model_version_family(context: RuleContext) -> str | None:
    return _outside(context, "chatglm_model_version", ("chatglm",), "ChatGLM") or _outside(
        context, "gpt_model_version", ("gpt2", "gptbigcode"), "GPT-2, SantaCoder and StarCoder"
    )


@_rule
def media_of_a_prompt(context: RuleContext) -> str | None:
    try:
        most_images(context.value("limit_mm_per_prompt"))
    except ValueError as error:
        return f"{context.format_setting('limit_mm_per_prompt')}: {error}"
    return None


@_rule
def cap_and_fraction(context: RuleContext) -> str | None:
    cap, fraction = "max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction"
    if context.value(cap) is None or context.value(fraction) is None:
        return None
    return (
        f"{context.format_setting(cap)} and {context.format_setting(fraction)}: the KV cache holds the smaller of "
        f"{context.value(cap)} tokens and what fits into {100 * context.value(fraction):g} % of the memory "
        "that is free once the model is loaded"
    )


@_rule
def max_num_tokens_holds_a_prompt(context: RuleContext) -> str | None:
    tokens, longest = context.value("max_num_tokens"), context.value("max_input_len")
    if tokens is None or tokens >= longest or context.value("enable_chunked_prefill"):
        return None
    return (
        f"{context.format_setting('max_num_tokens')} is below {context.format_setting('max_input_len')}: "
        f"TensorRT-LLM refuses prompts of more than {tokens} tokens although up to {longest} are allowed; set "
        f"option.enable_chunked_prefill=true, or option.max_num_tokens={longest}"
    )


@_rule
def static_batch(context: RuleContext) -> str | None:
    if context.value("batch_scheduler_policy") is not SchedulerPolicy.STATIC_BATCH:
        return None
    return (
        f"{context.format_setting('batch_scheduler_policy')} finishes a whole batch before the next one begins, a "
        "legacy mode that is not for production; write max_utilization or guaranteed_no_evict"
    )


@_rule
def attention_window(context: RuleContext) -> str | None:
    windows = context.value("max_attention_window")
    if windows is None:
        return None
    name = "max_seq_len"
    longest = context.value(name)
    given = context.format_setting(name)
    if longest is None:
        longest = context.value("max_input_len") + context.value("max_output_len")
        given = f"{context.format_setting('max_input_len')} plus {context.format_setting('max_output_len')}"
    if min(windows) >= longest:
        return None
    return (
        f"{context.format_setting('max_attention_window')} is below the longest sequence of {longest} tokens ({given}"
        f"): of longer sequences only the last {min(windows)} tokens are attended to, which is faster and less "
        "accurate; leave it out for full attention"
    )


@_rule
def speculation_without_method(context: RuleContext) -> str | None:
    others = (
        *("speculative_config", "speculative_decoding_mode", "speculative_draft_model", "medusa_choices"),
        *("eagle_choices", "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
    )
    if not context.value("speculative_length") or any(context.value(name) is not None for name in others):
        return None
    return (
        f"{context.format_setting('speculative_length')} has no effect without a method: set "
        "option.speculative_decoding_mode (ngram, for example), or option.speculative_draft_model"
    )


class NamedEngine(NamedTuple):
    """An engine of LMI's container, and the backends that run it here: none if this server does not have it."""

    name: str
    backends: tuple[Backend, ...] = ()


_TRT_LLM = NamedEngine("TensorRT-LLM", (Backend.TENSORRT, Backend.PYTORCH, Backend.AUTODEPLOY))
_VLLM = NamedEngine("vLLM", (Backend.VLLM,))
_DEEPSPEED = NamedEngine("DeepSpeed")
_NAMED_ENGINES = {
    "rolling_batch": {
        "trtllm": _TRT_LLM,
        "vllm": _VLLM,
        "lmi-dist": _VLLM,
        "deepspeed": _DEEPSPEED,
        "scheduler": NamedEngine("LMI's sequence scheduler"),
    },
    "entry_point": {
        "djl_python.tensorrt_llm": _TRT_LLM,
        "djl_python.lmi_trtllm.trtllm_async_service": _TRT_LLM,
        "djl_python.lmi_vllm.vllm_async_service": _VLLM,
        "djl_python.deepspeed": _DEEPSPEED,
        "djl_python.fastertransformer": NamedEngine("FasterTransformer"),
        "djl_python.transformers_neuronx": NamedEngine("Neuron"),
    },
}


def engine_named(value: Callable[[str], Any]) -> tuple[str, NamedEngine] | None:
    """The engine that an option names in LMI's words, with that option; None where none does."""
    found = ((name, engines.get(str(value(name)))) for name, engines in _NAMED_ENGINES.items())
    return next(((name, engine) for name, engine in found if engine is not None), None)


@_rule
def engine_of_lmi(context: RuleContext) -> str | None:
    named, backend = engine_named(context.value), context.value("backend")
    if named is None or backend is None or backend in named[1].backends or context.is_set("backend"):
        return None
    return (
        f"{context.format_setting(named[0])} names {named[1].name}, and {backend} runs the model here; "
        "option.backend says which engine you want"
    )


def _quantization(context: RuleContext) -> str | None:
    """The method, by its name in `option.quantize`, also if `option.quant_algo` names it."""
    algorithm = context.value("quant_algo")
    if algorithm is not None:
        words = {"AWQ": "awq", "_SQ_": "smoothquant", "FP8": "fp8"}
        return next((method for word, method in words.items() if word in algorithm.value), str(algorithm))
    method: Quantization | None = context.value("quantize")
    return None if method is None else method.value


def _quantized(context: RuleContext) -> str:
    return context.format_setting("quant_algo" if context.value("quant_algo") is not None else "quantize")


def _without(context: RuleContext, names: tuple[str, ...], method: str) -> str | None:
    given = [context.format_setting(name) for name in names if context.is_set(name)]
    if not given:
        return None
    verb = "has" if len(given) == 1 else "have"
    return f"{' and '.join(given)} {verb} no effect without option.quantize={method}: add that, or leave it out"


def _declared(name: str, row: dict[str, Any]) -> Rule:
    kinds = {"severity": Severity(row["severity"]), "when": When(row.get("when", When.OPTIONS))}
    return Rule(**row | kinds, name=name, broken=_BROKEN.get(name))


RULES = tuple(_declared(name, row) for name, row in read_table("rules.toml", "djl_trtllm.config").items())
"""Every rule between options."""
