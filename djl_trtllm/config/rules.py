"""The rules between options; nothing else checks one option against another.

Rules that need only options run in `resolve.resolve`; rules about the model's files run in `check_model`, when the
files are there; rules about what an engine does run in `check_running`, when the engine is chosen, with the values that
it runs with: an option without effect there, or with a fixed one, breaks none of them. A rule that today's engines no
longer have gives a note and never an error.
"""

import enum
import json
from collections.abc import Callable, Mapping
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
    """The most images of a request, from the option's text. Raises ValueError for other text.

    As in vLLM, a limit is a number, or an object whose member `count` is the number.
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
    `is_engine` whether the model is compiled, `compiled_as` the quantisation that it was compiled with; None if
    unknown.
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


Broken = Callable[[RuleContext], bool | Mapping[str, object] | None]
"""Whether a rule is broken, or, where it is, the words that its message needs."""


class Severity(enum.Enum):
    """The result of a broken rule: an error refuses the configuration, a note is only shown."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class When(enum.Enum):
    """The moment at which a rule is checked: options are read, the model's files are there, or the engine is chosen."""

    OPTIONS = "options"
    MODEL = "model"
    RUNNING = "running"


@dataclass(frozen=True)
class Rule:
    """One row of `rules.toml`. A row without `broken` is checked by the option's type.

    In `message` the field of an option in braces is its `KEY=VALUE (origin)`.
    """

    name: str
    options: list[str]
    condition: str
    severity: Severity
    lifted: str
    document: str
    message: str = ""
    broken: Broken | None = None
    when: When = When.OPTIONS

    def finding(self, context: RuleContext) -> str | None:
        """The message about a broken rule; None if it holds."""
        found = False if self.broken is None else self.broken(context)
        return self.message.format_map(_Words(context, {} if found is True else found)) if found else None


class _Words(dict[str, object]):
    """Fills the words of a message in: those that the rule found, the model's type, and the settings of options."""

    def __init__(self, context: RuleContext, found: Mapping[str, object]) -> None:
        super().__init__({"model_type": context.model_type} | dict(found))
        self._context = context

    def __missing__(self, name: str) -> str:
        return self._context.format_setting(name)


_BROKEN: dict[str, Broken] = {}


def _rule(broken: Broken) -> Broken:
    """Register a function as the check of the rule that has its name in `rules.toml`."""
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


def check(context: RuleContext, when: When) -> Findings:
    """Check the rules of one moment."""
    found = Findings()
    into = {Severity.ERROR: found.problems, Severity.WARNING: found.warnings, Severity.NOTE: found.notes}
    for rule in RULES:
        if rule.when is when and (message := rule.finding(context)) is not None:
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
def engine_of_djl_serving(context: RuleContext) -> bool:
    return (context.value("engine") or "python").lower() not in ("python", "mpi")


@_rule
def rotary_scaling_pair(context: RuleContext) -> Mapping[str, object] | None:
    examples = {"rotary_scaling_type": "linear", "rotary_scaling_factor": "2"}
    missing = [name for name in examples if context.value(name) is None]
    if len(missing) != 1:
        return None
    (present,) = examples.keys() - missing
    return {"present": context.format_setting(present), "missing": missing[0], "example": examples[missing[0]]}


def _is_of(context: RuleContext, *families: str) -> bool:
    kind = (context.model_type or "").lower().replace("-", "").replace("_", "")
    return kind.startswith(families)


def _is_other(context: RuleContext, *families: str) -> bool:
    return context.model_type is not None and not _is_of(context, *families)


def _outside(context: RuleContext, name: str, families: tuple[str, ...]) -> bool:
    """Whether an option is set, and the model is of none of the families that it is documented for."""
    return context.is_set(name) and context.value(name) is not False and _is_other(context, *families)


for _name, _families in (
    ("rotary_dim", ("gptj",)),
    ("rotary_base", ("llama", "internlm", "qwen")),
    ("use_fused_mlp", ("llama",)),
):
    _BROKEN[f"{_name}_family"] = partial(_outside, name=_name, families=_families)


@_rule
def multi_block_mode_family(context: RuleContext) -> bool:
    return bool(context.value("multi_block_mode")) and _is_of(context, "qwen")


@_rule
def smoothquant_family(context: RuleContext) -> Mapping[str, object] | None:
    of_others = _is_other(context, "llama", "mistral", "internlm", "baichuan")
    return _quantized(context) if _quantization(context) == "smoothquant" and of_others else None


@_rule
def smoothquant_parts(context: RuleContext) -> Mapping[str, object] | None:
    names = ("smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel", "multi_query_mode")
    return None if _quantization(context) == "smoothquant" else _without(context, names)


@_rule
def awq_family(context: RuleContext) -> Mapping[str, object] | None:
    return _quantized(context) if _quantization(context) == "awq" and _is_other(context, "llama", "mistral") else None


@_rule
def awq_parts(context: RuleContext) -> Mapping[str, object] | None:
    chosen = _quantization(context)
    if chosen in ("awq", "w4a8_awq"):
        return None
    calibrated = chosen in ("smoothquant", "fp8", "NVFP4") and "awq" not in context.written_name("calib_size").lower()
    return _without(context, ("awq_format", "awq_block_size", *(() if calibrated else ("calib_size",))))


@_rule
def quantize_compiled(context: RuleContext) -> Mapping[str, object] | None:
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
    return {"setting": context.format_setting(name), "name": name}


@_rule
def chatglm_version(context: RuleContext) -> bool:
    return _is_of(context, "chatglm") and not context.is_set("chatglm_model_version")


@_rule
def chatglm_unspecified(context: RuleContext) -> bool:
    version = "chatglm_model_version"
    return _is_of(context, "chatglm") and context.is_set(version) and context.value(version) == "unspecified"


@_rule
def model_version_family(context: RuleContext) -> Mapping[str, object] | None:
    for name, names, families in (
        ("chatglm_model_version", "ChatGLM", ("chatglm",)),
        ("gpt_model_version", "GPT-2, SantaCoder and StarCoder", ("gpt2", "gptbigcode")),
    ):
        if _outside(context, name, families):
            return {"setting": context.format_setting(name), "names": names}
    return None


@_rule
def media_of_a_prompt(context: RuleContext) -> Mapping[str, object] | None:
    try:
        most_images(context.value("limit_mm_per_prompt"))
    except ValueError as error:
        return {"error": error}
    return None


@_rule
def cap_and_fraction(context: RuleContext) -> Mapping[str, object] | None:
    tokens, fraction = context.value("max_tokens_in_paged_kv_cache"), context.value("kv_cache_free_gpu_mem_fraction")
    return None if tokens is None or fraction is None else {"tokens": tokens, "percent": 100 * fraction}


@_rule
def max_num_tokens_holds_a_prompt(context: RuleContext) -> Mapping[str, object] | None:
    tokens, longest = context.value("max_num_tokens"), context.value("max_input_len")
    if tokens is None or tokens >= longest or context.value("enable_chunked_prefill"):
        return None
    return {"tokens": tokens, "longest": longest}


@_rule
def static_batch(context: RuleContext) -> bool:
    return context.value("batch_scheduler_policy") is SchedulerPolicy.STATIC_BATCH


@_rule
def attention_window(context: RuleContext) -> Mapping[str, object] | None:
    windows, longest = context.value("max_attention_window"), context.value("max_seq_len")
    if windows is None:
        return None
    given = context.format_setting("max_seq_len")
    if longest is None:
        longest = context.value("max_input_len") + context.value("max_output_len")
        given = f"{context.format_setting('max_input_len')} plus {context.format_setting('max_output_len')}"
    return None if min(windows) >= longest else {"window": min(windows), "longest": longest, "given": given}


@_rule
def speculation_without_method(context: RuleContext) -> bool:
    others = (
        *("speculative_config", "speculative_decoding_mode", "speculative_draft_model", "medusa_choices"),
        *("eagle_choices", "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
    )
    return bool(context.value("speculative_length")) and all(context.value(name) is None for name in others)


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
def engine_of_lmi(context: RuleContext) -> Mapping[str, object] | None:
    named, backend = engine_named(context.value), context.value("backend")
    if named is None or backend is None or backend in named[1].backends or context.is_set("backend"):
        return None
    return {"setting": context.format_setting(named[0]), "engine": named[1].name, "running": backend}


def _quantization(context: RuleContext) -> str | None:
    """The method, by its name in `option.quantize`, also if `option.quant_algo` names it."""
    algorithm = context.value("quant_algo")
    if algorithm is not None:
        words = {"AWQ": "awq", "_SQ_": "smoothquant", "FP8": "fp8"}
        return next((method for word, method in words.items() if word in algorithm.value), str(algorithm))
    method: Quantization | None = context.value("quantize")
    return None if method is None else method.value


def _quantized(context: RuleContext) -> Mapping[str, object]:
    """The setting that names the quantisation."""
    name = "quantize" if context.value("quant_algo") is None else "quant_algo"
    return {"setting": context.format_setting(name)}


def _without(context: RuleContext, names: tuple[str, ...]) -> Mapping[str, object] | None:
    """The options among these that are set."""
    given = [context.format_setting(name) for name in names if context.is_set(name)]
    return {"given": " and ".join(given), "have": "has" if len(given) == 1 else "have"} if given else None


def _declared(name: str, row: dict[str, Any]) -> Rule:
    kinds = {"severity": Severity(row["severity"]), "when": When(row.get("when", When.OPTIONS))}
    return Rule(**row | kinds, name=name, broken=_BROKEN.get(name))


RULES = tuple(_declared(name, row) for name, row in read_table("rules.toml", "djl_trtllm.config").items())
"""Every rule between options."""
