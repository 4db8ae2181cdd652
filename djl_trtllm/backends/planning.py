"""Select the backend of a model, derive its plan, say what options do there, and compile ahead of time."""

import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import javaproperties
import msgspec

from djl_trtllm.backends.base import (
    Built,
    EngineBackend,
    PrefixCache,
    backend_named,
    backends,
    effects_on,
    this_machine,
)
from djl_trtllm.backends.effects import Effects, Fixed, NoEffect, describe_effect, has_effect
from djl_trtllm.config import Backend, Config, Task
from djl_trtllm.config.explain import shown_origin, shown_value
from djl_trtllm.config.options import OPTIONS, DeclaredOption
from djl_trtllm.config.options.option import as_text
from djl_trtllm.config.resolve import without_effect
from djl_trtllm.config.rules import check_running
from djl_trtllm.config.sources import Origin, OriginKind
from djl_trtllm.engines.build import build_engine
from djl_trtllm.engines.cache import Manifest
from djl_trtllm.engines.config_overlay import with_rotary_options
from djl_trtllm.engines.hardware import Gpu, Hardware
from djl_trtllm.engines.plan import DRAFT_FOLDER, EnginePlan, planned_sequences
from djl_trtllm.errors import ConfigError, EngineError, EngineMismatchError
from djl_trtllm.model import Layout, inspect
from djl_trtllm.model.pooling import find_task
from djl_trtllm.model.tokenizer import load_fitting_tokenizer
from djl_trtllm.model.work_directory import marked, sweep, unfinished_name

_LIMITS = (
    "max_rolling_batch_size",
    "max_num_sequences",
    "max_input_len",
    "max_output_len",
    "max_seq_len",
    "max_num_tokens",
    "max_beam_width",
)
"""The fields of `Options` that an engine is compiled for."""


_RUNNING_TEXTS = 256
_WAITING_TEXTS = 4096


def choose_backend(config: Config, layout: Layout, hardware: Hardware) -> tuple[Backend, str]:
    """The backend and its reason in one line.

    With `auto`, the first backend that offers to run these files on this machine; the reason names the others that are
    installed for it. Raises EngineError if the selected backend cannot run here or cannot load these files.
    """
    asked, task = config.options.backend, find_task(config.options.task, layout)
    if asked is not Backend.AUTO:
        if problem := _other_task(backend_named(asked), asked.value, task):
            raise EngineError(f"{config.format_setting('backend')}: {problem}; {layout.path} is such a model")
        return asked, backend_named(asked).accept(asked, config.format_setting("backend"), layout, hardware)
    refusals: list[str] = []
    for place, backend in enumerate(backends(), 1):
        if problem := _other_task(backend, next(iter(backend.effects)), task):
            refusals.append(problem)
            continue
        offer = backend.offer(layout, hardware)
        if offer.backend is not None:
            others = [each for each in backends()[place:] if task in each.tasks]
            later = [each.offer(layout, hardware) for each in others] if offer.reason else []
            also = [f"option.backend={each.backend} would take another: {each.reason}" for each in later if all(each)]
            return offer.backend, "; ".join([offer.reason, *also] if offer.reason else refusals)
        if offer.reason:
            refusals.append(offer.reason)
    raise EngineError(f"no backend runs {layout.path}: {'; '.join(refusals)}")


def _other_task(backend: EngineBackend, name: str, task: Task) -> str:
    """The reason why the backend does not run models for this task, "" if it does."""
    if task in backend.tasks:
        return ""
    served = [each for each in Backend.all_values() if each != "auto" and task in backend_named(Backend(each)).tasks]
    return f"{name} runs no model that is for option.task={task} here ({', '.join(served)} would)"


def likely_backend(config: Config, hardware: Hardware) -> Backend:
    """The backend for a checkpoint that is not known yet: the one in `option.backend`, or what `auto` selects here."""
    asked = config.options.backend
    if asked is not Backend.AUTO:
        return asked
    usual = (backend.usual(hardware) for backend in backends())
    return next(backend for backend in usual if backend is not None)


def batch_size(config: Config) -> int:
    """The number of sequences at a time by the options alone; the files of a model may give another one."""
    options, planned = config.options, planned_sequences(config)
    if options.backend is Backend.AUTO or config.is_set("max_rolling_batch_size") or options.max_num_sequences:
        return planned
    return max(planned, backend_named(options.backend).batch_size)


def served_as_built(config: Config, layout: Layout) -> Config:
    """The configuration with the limits of a compiled engine as defaults; unchanged for a checkpoint.

    Raises EngineMismatchError for an engine whose description is damaged.
    """
    if not layout.kind.is_engine:
        return config
    found = (backend.built(config, layout) for backend in backends())
    built = next((built for built in found if built is not None), None)
    return config if built is None else _as_built(config, built)


def compiled_quantization(layout: Layout) -> str | None:
    """Return the value of `option.quantize` that an engine was compiled with, by its manifest or else its own files."""
    if layout.engine_dir is None or not layout.kind.is_engine:
        return None
    manifest = Manifest.read(layout.engine_dir)
    if manifest is not None:
        return str(manifest.options.get("quantize"))
    found = (backend.quantize_of(layout) for backend in backends())
    return next((value for value in found if value is not None), None)


def fitted_to_memory(config: Config, layout: Layout, hardware: Hardware) -> Config:
    """The configuration with limits that fit the machine's memory, where the user set none.

    What does not fit is a warning, or a ConfigError with option.strict_memory. An engine keeps what it was compiled
    with. Raises EngineError if the backend cannot run here.
    """
    backend, _ = choose_backend(config, layout, hardware)
    config = _for_task(config, find_task(config.options.task, layout))
    if config.options.task is not Task.GENERATE:
        return config
    config = _with_prefix_cache(config, backend_named(backend).prefix_cache(backend, hardware))
    if layout.kind.is_engine:
        return config
    return backend_named(backend).fitted_to_memory(config, layout, hardware, backend)


def _for_task(config: Config, task: Task) -> Config:
    """The configuration for what the model is for.

    Texts that become vectors wait and run by the hundred: they are short, take no KV cache, and those of like lengths
    are computed together.
    """
    if config.options.task is Task.AUTO:
        config = config.replace(Origin.derived("the model's files"), task=task)
    if task is Task.GENERATE:
        return config
    limits = {"max_rolling_batch_size": _RUNNING_TEXTS, "job_queue_size": _WAITING_TEXTS}
    unset = {name: value for name, value in limits.items() if not config.is_set(name)}
    return config.replace(Origin.derived(f"option.task={task}"), **unset)


def _with_prefix_cache(config: Config, cache: PrefixCache | None) -> Config:
    """The configuration with the engine's own default, unless prompts of different API keys would be shared."""
    if cache is None or config.is_set("enable_kv_cache_reuse"):
        return config
    if cache.separate or config.options.api_keys_file is None:
        return config.replace(Origin.derived(f"{cache.engine}'s own default"), enable_kv_cache_reuse=True)
    rule = f"api_keys_file: {cache.engine} cannot keep the prompts of different keys apart, and true would share them"
    return config.replace(Origin.derived(rule), enable_kv_cache_reuse=False)


def plan_fitted(
    config: Config, layout: Layout, hardware: Hardware | None = None, *, compile_only: bool = False
) -> tuple[Config, EnginePlan]:
    """`fitted_to_memory`'s configuration with the options that its plan sets, and the plan. Raises what both do."""
    hardware = this_machine() if hardware is None else hardware
    config = fitted_to_memory(config, layout, hardware)
    plan = plan_engine(config, layout, hardware, compile_only=compile_only)
    return plan.settled(config), plan


def plan_engine(
    config: Config, layout: Layout, hardware: Hardware | None = None, *, compile_only: bool = False
) -> EnginePlan:
    """Derive the plan; reads headers of weight files, never weights. `hardware` defaults to this machine.

    `compile_only` leaves out everything that depends on the machine that will run the engine. Raises EngineError if the
    backend cannot run here, EngineMismatchError for an engine that does not fit, ConfigError (all problems at once) for
    options that the backend cannot honour, and LayoutError for damaged weight files.
    """
    hardware = this_machine() if hardware is None else hardware
    backend, reason = choose_backend(config, layout, hardware)
    return backend_named(backend).plan(config, layout, hardware, backend, reason, compile_only=compile_only)


def suppose_machine(hardware: Hardware, gpus: tuple[Gpu, ...]) -> Hardware:
    """The machine with these GPUs and with every engine installed: an engine that it has keeps its version."""
    for backend in backends():
        hardware = backend.suppose(hardware)
    return replace(hardware, gpus=gpus)


def _as_built(config: Config, built: Built) -> Config:
    """The configuration with the engine's limits below everything that the user set, and within its bounds.

    A user's value above a bound is lowered to it with a warning, as TensorRT-LLM does.
    """
    warnings = []
    asked = config
    for name, bound in built.bounds.items():
        value = getattr(config.options, name)
        if not config.is_set(name) or value is None or value <= bound.value:
            continue
        setting = asked.format_setting(name)
        if bound.option is None:
            where, compiled = built.where, f"the engine was compiled with {bound.name} {bound.value}, which applies"
            warnings.append(f"{setting}: {compiled}; leave the option out, or compile the checkpoint again for more")
        else:
            where = asked.format_setting(bound.option)
            warnings.append(f"{setting}: {where} leaves {bound.name} {bound.value}, which applies; change one of them")
        config = config.replace(
            Origin.derived(f"{where}, which lowers {value} ({asked.origin(name)})"), **{name: bound.value}
        )
    defaults = {name: value for name, value in built.defaults.items() if not config.is_set(name)}
    config = config.replace(Origin.derived(built.where), **defaults)
    return replace(config, warnings=(*config.warnings, *warnings), notes=(*config.notes, *built.notes))


def describe_limits(config: Config) -> str:
    """One line with every limit that has a value, grouped by where the values came from."""
    groups: dict[str, list[str]] = {}
    for name in _LIMITS:
        value = getattr(config.options, name)
        if value is not None:
            groups.setdefault(str(config.origin(name)), []).append(f"{OPTIONS[name].key}={value}")
    return "limits: " + "; ".join(f"{', '.join(settings)} ({origin})" for origin, settings in groups.items())


def automatic_backends() -> tuple[Backend, ...]:
    """The backends that `option.backend=auto` selects from."""
    return tuple(Backend(name) for backend in backends() for name in backend.automatic)


def describe(declared: DeclaredOption, backend: Backend, *, under_djl: bool = False) -> str:
    """Describe an option's effect on a backend, for readers; AUTO names all backends that it selects from.

    `under_djl`: where DJL Serving runs the model and reads options of its own.
    """
    if under_djl and declared.option.under_djl:
        return declared.option.under_djl
    if everywhere := declared.option.effect_everywhere:
        return everywhere
    if backend is Backend.AUTO:
        return "; ".join(f"{one}: {describe(declared, one)}" for one in automatic_backends())
    return describe_effect(declared, effects_on(backend), backend)


def with_effects(
    config: Config, backend: Backend, plan: EnginePlan | None = None, *, under_djl: bool = False
) -> Config:
    """The configuration with notes on it: options that deviate on the backend, and rules about running engines.

    About options from a program or a command line the notes are warnings: those options are for this run, while a file
    may be for several engines.
    """
    effects = effects_on(backend)
    config = _without_unknown(config, backend)
    runs = None if under_djl else backend  # DJL Serving reads the words that name an engine

    def value(name: str) -> Any:
        return runs if name == "backend" else effective_value(config, effects, name)

    checked = check_running(config, value)
    deviating = deviations(config, effects, backend, plan, under_djl=under_djl)
    given = [line for name, line in deviating.items() if config.origins[name].kind is OriginKind.OVERRIDE]
    others = [line for line in deviating.values() if line not in given]
    return replace(checked, warnings=(*checked.warnings, *given), notes=(*others, *checked.notes))


def _without_unknown(config: Config, backend: Backend) -> Config:
    """The configuration with a warning for each setting that is neither an option nor an argument of the engine.

    Raises ConfigError for them with option.strict.
    """
    known = backend_named(backend).arguments()
    unknown, useless = [], []
    for setting in config.engine_settings:
        reason = known.get(setting.name_in_engine)
        if reason is None:
            unknown.append(without_effect(setting, f"is neither an option nor an argument of {backend}", known))
        elif reason:
            useless.append(f"{setting} has no effect: {reason}")
    if unknown and config.options.strict:
        raise ConfigError(unknown, config.warnings)
    return replace(config, warnings=(*config.warnings, *unknown, *useless))


def effective_value(config: Config, effects: Effects, name: str) -> Any:
    """The value that an option has on a backend: the configured one, or what it always is there."""
    declared = OPTIONS[name]
    if has_effect(declared, effects):
        return getattr(config.options, name)
    effect = effects.get(name)
    return effect.value if isinstance(effect, Fixed) else declared.default


def deviations(
    config: Config, effects: Effects, backend: str, plan: object = None, *, under_djl: bool = False
) -> dict[str, str]:
    """One line for each option that the user set and that does nothing, does something else, or does less on the
    backend.

    `plan` has what limits have become. Options that a warning of the configuration or a note of the plan names for the
    same reason are left out, and with `under_djl` those that DJL Serving reads.
    """
    lines = {}
    for declared in OPTIONS.values():
        option = declared.option
        if not config.is_set(declared.name) or option.warn or option.effect or (under_djl and option.under_djl):
            continue
        deviation = _deviation(config, declared, effects, backend, plan)
        if deviation and not _is_reported(config, declared.name, getattr(plan, "notes", ())):
            lines[declared.name] = setting_line(config, declared, deviation)
    return lines


def setting_line(config: Config, declared: DeclaredOption, effect: str) -> str:
    """An option's value, where that came from, and what it does."""
    value = shown_value(declared, getattr(config.options, declared.name))
    return f"{declared.key} = {value} ({shown_origin(config, declared)}): {effect}"


def _is_reported(config: Config, name: str, notes: Iterable[str]) -> bool:
    setting = config.format_setting(name)
    warned = any(line.startswith(setting) and "has no effect" in line for line in config.warnings)
    return warned or any(setting in note for note in notes)


def _deviation(config: Config, declared: DeclaredOption, effects: Effects, backend: str, plan: object) -> str:
    """Describe how the effect differs from what the value says; "" if it does not."""
    effect = effects.get(declared.name)
    value = getattr(config.options, declared.name)
    if declared.option.legacy or effect is None or isinstance(effect, NoEffect):
        return describe_effect(declared, effects, backend)
    if isinstance(effect, Fixed):
        return str(effect) if value not in (None, effect.value) else ""
    if effect.needs and not effect.needs.met(config):
        return f"no effect without {effect.needs}"
    if not effect.bound or plan is None or value is None:
        return ""
    used = getattr(plan, effect.bound)
    return f"{shown_value(declared, used)} here: {effect}" if used < value else ""


# -- compiling ahead of time: `djl-trtllm compile CHECKPOINT OUT` ------------------------------------------------------

log = logging.getLogger(__name__)

PROPERTIES_FILE = "serving.properties"
_CARRIED_GROUPS = ("limits", "kv_cache", "scheduler", "parallelism", "decoding", "lora", "serving")
_CARRIED = ("trust_remote_code", "model_name", "task")
_SPECULATION = "speculation"
_TEMPLATE_FILE = "option_chat_template.jinja"


def compile_checkpoint(
    config: Config,
    checkpoint: Path,
    out: Path,
    progress: Callable[[str], None] = log.info,
    *,
    tokenizer_dir: Path | None = None,
    draft_dir: Path | None = None,
    template: Callable[[], str] | None = None,
) -> None:
    """Compile a local checkpoint into the directory `out`, with a `serving.properties` that serves it.

    `out` may not exist, be empty, or hold an engine of the same checkpoint: that one is kept when it is whole and was
    compiled by the same versions with the same options, and replaced (its serving.properties too) otherwise. The log
    of a failure stays in `OUT.log`, or, where an engine is replaced, in the file that the error names until the next
    compile. `tokenizer_dir` is the tokenizer's directory if it is not the checkpoint's,
    `draft_dir` the draft model's, which is compiled into the folder `draft` of `out` where the backend compiles it;
    `template` returns the chat template that replaces the model's.

    Raises EngineError where there is nothing to compile or `out` holds something else, ModelError, ConfigError,
    CompilerMissingError and BuildError.
    """
    layout = inspect(checkpoint)
    if layout.kind.is_engine:
        raise EngineError(f"{checkpoint} is a {layout.kind.value}: there is nothing to compile, serve it as it is")
    if draft_dir is not None and out.resolve() in draft_dir.resolve().parents:
        raise EngineError(f"{draft_dir} is in {out}, which may be replaced: name the draft model's checkpoint")
    layout, notes = with_rotary_options(config, layout)
    for line in notes:
        progress(line)
    if tokenizer_dir is not None:
        layout = replace(layout, tokenizer_dir=tokenizer_dir)
    if draft_dir is not None:
        layout = replace(layout, draft=inspect(draft_dir))
    load_fitting_tokenizer(layout, trust_remote_code=config.options.trust_remote_code, template=template)
    asked, (config, plan) = config, plan_fitted(config, layout, compile_only=True)
    for line in config.warnings[len(asked.warnings) :]:
        progress(f"warning: {line}")
    _into(out, plan, progress)
    if plan.draft is not None:
        _compile_draft(plan.draft, layout.draft, out / DRAFT_FOLDER, progress)
    _write_properties(config, plan, out, template)


def _compile_draft(plan: EnginePlan, layout: Layout | None, out: Path, progress: Callable[[str], None]) -> None:
    if layout is not None and layout.kind.is_engine:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(layout.path, out)
    else:
        _into(out, plan, progress)


def _into(out: Path, plan: EnginePlan, progress: Callable[[str], None]) -> None:
    sweep(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        _replace(plan, out, progress)
        return
    if out.exists():
        out.rmdir()
    build_engine(plan, out, progress)
    out.with_name(f"{out.name}.log").unlink(missing_ok=True)


def _replace(plan: EnginePlan, out: Path, progress: Callable[[str], None]) -> None:
    manifest = _manifest_of(out)
    if manifest is None:
        raise EngineError(f"{out} is not empty and is not an engine this program compiled: choose another directory")
    if differences := manifest.differences(backend=plan.backend.value, checkpoint=plan.checkpoint_identity):
        raise EngineError(
            f"{out} holds another engine ({'; '.join(differences)}): remove it or choose another directory"
        )
    if _is_current(plan, manifest, out):
        _write_limits(plan, manifest, out)
        progress(f"{out} is up to date")
        return
    # Built beside it and swapped when done, so that a failure leaves the old engine.
    fresh, old = unfinished_name(out), unfinished_name(out)
    build_engine(plan, fresh, progress)
    with marked(fresh):
        out.rename(old)
        fresh.rename(out)
    shutil.rmtree(old, ignore_errors=True)  # the next compile removes what is left of it
    fresh.with_name(f"{fresh.name}.log").unlink(missing_ok=True)


def _manifest_of(out: Path) -> Manifest | None:
    try:
        return Manifest.read(out)
    except EngineMismatchError:
        return None


def _is_current(plan: EnginePlan, manifest: Manifest, out: Path) -> bool:
    if manifest.options != plan.build_options or manifest.versions != plan.versions:
        return False
    try:
        plan.check_whole(out)
    except EngineMismatchError:
        return False
    return not manifest.verify(out)


def _write_limits(plan: EnginePlan, manifest: Manifest, out: Path) -> None:
    """Write the plan's limits into the manifest: they change without compiling where the engine's files lack them."""
    if manifest.limits == plan.built_limits:
        return
    if manifest.limits:
        (out / PROPERTIES_FILE).unlink(missing_ok=True)
    msgspec.structs.replace(manifest, limits=plan.built_limits).write(out)


def _write_properties(config: Config, plan: EnginePlan, out: Path, template: Callable[[], str] | None) -> None:
    path = out / PROPERTIES_FILE
    if path.exists():
        return  # the user's by now
    properties = {"engine": "Python", "option.backend": plan.backend.value}
    properties |= {f"option.{name}": as_text(value) for name, value in plan.served_with.items()}
    for declared in OPTIONS.values():
        group = declared.group.name
        # With a compiled draft the plan's own settings say all of it.
        carried = declared.name in _CARRIED or group in _CARRIED_GROUPS or (group == _SPECULATION and not plan.draft)
        if carried and config.is_set(declared.name):
            properties[declared.key] = as_text(getattr(config.options, declared.name)) or "none"
    if template is not None:
        properties["option.chat_template"] = _TEMPLATE_FILE
        (out / _TEMPLATE_FILE).write_text(template(), encoding="utf-8")
    path.write_text(
        javaproperties.dumps(properties, comments="Serves the engine in this directory.", timestamp=False),
        encoding="utf-8",
    )
