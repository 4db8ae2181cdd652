"""Resolve sources to one configuration: one order of precedence, then one list of derivations (`resolve`).

For example `max_num_tokens`: `load` reads the sources, `_choose` takes the setting of the highest layer, `_parse` makes
it a number, `_raise_limits_for_max_num_tokens` raises other limits by it, and the rules compare it with them.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from djl_trtllm.config.compat.detect import names_configuration, read_model, read_source
from djl_trtllm.config.options import OPTIONS, DeclaredOption, Options, find, suggest
from djl_trtllm.config.options.choices import Backend, Task
from djl_trtllm.config.options.option import NotAValueError, Scope, as_text, is_quoted, without_comment
from djl_trtllm.config.rules import RuleContext, When, check, engine_named
from djl_trtllm.config.sources import (
    Config,
    Layer,
    Origin,
    OriginKind,
    Setting,
    Source,
    format_value,
    read_arguments,
    read_environment,
    variables_of,
)
from djl_trtllm.errors import ConfigError
from djl_trtllm.files import read_table

_DEFAULTS = Options()
_DEFAULT_ORIGINS = dict.fromkeys(OPTIONS, Origin.default())
_ARGUMENT = re.compile(r"option\.[a-z][a-z0-9_]*")
_FILES_OF_A_MODEL = (Layer.FILE, Layer.FOREIGN, Layer.PRESET)


def precedence(scope: Scope) -> tuple[Layer, ...]:
    """The layers that may set an option; each overrides those after it.

    ====  =====================================  =====================================  ===========================
    rank  options of a model (`option.*`,        options of the server (addresses,      options only the operator
          `job_queue_size`, ...)                 sizes, status codes, ...)              may set
    ====  =====================================  =====================================  ===========================
    1     command line                           command line                           SERVING_* variables
    2     SageMaker variables                    SageMaker variables
    3     HF_MODEL_ID and HF_REVISION            SERVING_* variables
    4     serving.properties                     plain variables
    5     OPTION_* variables                     variables of other servers
    6     SERVING_* variables                    serving.properties
    7     plain variables                        config.pbtxt, config.yaml
    8     config.pbtxt, config.yaml              presets of Triton and Truss
    9     variables of other servers
    10    presets of Triton and Truss
    ====  =====================================  =====================================  ===========================

    This is DJL Serving's order: a model's file overrides OPTION_*, SageMaker's variables override the file, and a
    variable of another server is used only if nothing else sets its option. DJL Serving does not read the server's
    options from a model's file but from its config.properties; here the file is the last place for them.
    HF_MODEL_ID replaces the model that a file names, and its revision (DJL Serving would load both models).
    A `config.pbtxt` or `config.yaml` is written for another server, so everything that is for this one overrides it.

    The limits of a compiled engine are below all layers but the presets (`backends.planning`): the engine is looked at
    when the rest is resolved.

    Permissions (`option.trust_remote_code`) are options of a model that every other layer overrides: the files of a
    model come last.
    """
    if scope is Scope.PERMISSION:
        return tuple(sorted(precedence(Scope.MODEL), key=_FILES_OF_A_MODEL.__contains__))
    if scope is Scope.OPERATOR:
        return (Layer.SERVING,)
    if scope is Scope.SERVER:
        return (
            Layer.ARGUMENTS,
            Layer.SAGEMAKER,
            Layer.SERVING,
            Layer.PLAIN,
            Layer.TRANSLATED,
            Layer.FILE,
            Layer.FOREIGN,
            Layer.PRESET,
        )
    return (
        Layer.ARGUMENTS,
        Layer.SAGEMAKER,
        Layer.NAMED_MODEL,
        Layer.FILE,
        Layer.OPTION,
        Layer.SERVING,
        Layer.PLAIN,
        Layer.FOREIGN,
        Layer.TRANSLATED,
        Layer.PRESET,
    )


def load(
    model_dir: Path | None,
    environ: Mapping[str, str],
    *,
    arguments: Iterable[str] = (),
    fetched: str | None = None,
) -> Config:
    """Resolve the configuration at `model_dir` (see `detect.read_source`), the environment and a command line.

    If `option.model_id` names another directory, the configuration that its compiler wrote there is read too, as the
    last of its layer.
    `model_dir` may also be a configuration file; then its folder is the model directory. `arguments` are KEY=VALUE
    pairs.
    `fetched` is the name of a model whose directory was fetched: its files may set what `fetched.toml` lists.
    Raises `ConfigError` with every problem found.
    """
    sources = list(read_environment(environ))
    sources.append(read_arguments(arguments))
    if model_dir is not None:
        sources += _of_model(read_source(model_dir), fetched)
    if model_dir is not None and names_configuration(model_dir):
        model_dir = model_dir.parent
    config = resolve(sources, model_dir=model_dir)
    if config.options.model_id is None:
        return config
    of_model = _of_model(read_model(model_dir, config.options.model_id), fetched)
    return resolve([*sources, *of_model], model_dir=model_dir) if of_model else config


def _of_model(sources: list[Source], fetched: str | None) -> list[Source]:
    """Bound what the files of a model may set, if the model was fetched."""
    return sources if fetched is None else [within_bounds(source, fetched) for source in sources]


def resolve(sources: Iterable[Source], *, model_dir: Path | None = None) -> Config:
    """Decide the value of every option. Pure: reads nothing but its arguments.

    Raises `ConfigError` with every problem found, one line each.
    """
    draft = _Draft()
    _sort_by_option(sources, draft)
    _choose_and_parse(draft)
    _take_the_engine_that_lmi_names(draft)
    _leave_to_vllm(draft)
    _serve_the_named_model(draft)
    _warn_of_overridden(draft)
    _warn_of_legacy(draft)
    _raise_limits_for_max_num_tokens(draft)
    _run_as_many_sequences_as_the_engine_holds(draft)
    _split_addresses(draft)
    _place_engine_cache(draft)
    _check_rules(draft)
    _report_unknown(draft)
    return draft.finished(model_dir)


@dataclass
class _Draft:
    """A `Config` under construction.

    `values` are those that users set, and derived ones. `chosen` has the setting that is used, `overridden` the users'
    settings that it overrides. `unknown` are settings that name no option, `foreign` messages about names in another
    server's file that this server does not have either. By field name, `beyond` has the errors of values that vLLM may
    take; `engine_settings` are settings left to vLLM.
    """

    candidates: dict[str, list[tuple[Layer, Setting]]] = field(default_factory=dict)
    unknown: list[Setting] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    beyond: dict[str, str] = field(default_factory=dict)
    engine_settings: list[Setting] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, Setting] = field(default_factory=dict)
    overridden: dict[str, list[Setting]] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def is_set(self, name: str) -> bool:
        return name in self.chosen and name in self.values

    def derive(self, name: str, value: Any, rule: str) -> None:
        self.values[name] = value
        self.origins[name] = Origin.derived(rule)

    def value(self, name: str) -> Any:
        return self.values.get(name, OPTIONS[name].default)

    def format_setting(self, name: str) -> str:
        if name in self.chosen and name not in self.origins:
            return str(self.chosen[name])
        return format_value(name, self.value(name), self.origins.get(name, Origin.default()))

    def written_name(self, name: str) -> str:
        return self.chosen[name].name if name in self.chosen else OPTIONS[name].key

    def finished(self, model_dir: Path | None) -> Config:
        """Return the configuration. Raises ConfigError if there are problems."""
        if self.problems:
            raise ConfigError(self.problems, self.warnings)
        chosen = {name: setting.origin for name, setting in self.chosen.items()}
        return Config(
            # Every value has been checked by its own type; checking all of them again costs more than the rest.
            options=_DEFAULTS.updated(self.values),
            origins={**_DEFAULT_ORIGINS, **chosen, **self.origins},
            user_set=frozenset(name for name, origin in chosen.items() if origin.is_user),
            warnings=tuple(self.warnings),
            notes=tuple(self.notes),
            model_dir=model_dir,
            overridden={name: tuple(others) for name, others in self.overridden.items() if others},
            engine_settings=tuple(self.engine_settings),
        )


def _sort_by_option(sources: Iterable[Source], draft: _Draft) -> None:
    for source in sources:
        draft.warnings += source.warnings
        draft.notes += source.notes
        draft.problems += source.problems
        draft.foreign += source.unknown
        for setting in source.settings:
            declared = find(setting.key)
            if declared is None:
                draft.unknown.append(setting)
            elif source.layer not in precedence(declared.option.scope):
                draft.problems.append(_forbidden(declared, setting))
            elif not setting.value.strip():
                draft.warnings.append(f"{setting} is empty: the option is not set")
            else:
                draft.candidates.setdefault(declared.name, []).append((source.layer, setting))


def _choose_and_parse(draft: _Draft) -> None:
    for name, found in draft.candidates.items():
        draft.chosen[name], draft.overridden[name] = _choose(OPTIONS[name], found, draft)
        _parse(OPTIONS[name], draft.chosen[name], draft)


def _choose(
    declared: DeclaredOption, found: Sequence[tuple[Layer, Setting]], draft: _Draft
) -> tuple[Setting, list[Setting]]:
    """The setting that is used, and the user's others of the option, in the order of precedence."""
    order = precedence(declared.option.scope)
    ranked = sorted(found, key=lambda candidate: order.index(candidate[0]))
    layer, winner = ranked[0]
    for other_layer, other in ranked[1:]:
        two_names = other_layer is layer and layer.has_own_names
        if two_names and other.value.strip() != winner.value.strip():
            how = "given twice" if other.name == winner.name else "two names of one option"
            draft.problems.append(f"{winner} and {other} are {how} with different values; keep one")
    return winner, [setting for _, setting in ranked[1:] if setting.origin.is_user]


def _parse(declared: DeclaredOption, setting: Setting, draft: _Draft) -> None:
    text = setting.value
    bare = without_comment(text)
    if bare != text and declared.type.is_text:
        draft.warnings.append(f"{setting}: the text from # on is part of the value; comments need their own line")
    elif bare != text:
        draft.warnings.append(
            f"{setting}: the comment behind the value is ignored; put comments on their own line, because "
            "DJL Serving takes them for part of the value"
        )
        text = bare
    elif declared.type.is_text and is_quoted(text):
        draft.warnings.append(f"{setting}: the quotes are part of the value; write it without them")
    try:
        draft.values[declared.name] = declared.type.parse(text, declared.option)
    except NotAValueError as error:
        # Other servers write names and values differently.
        example = declared.example if setting.alone else f"{setting.name}={declared.example}"
        problem = f"{setting}: {error}; for example {example}"
        if declared.option.vllm_argument:
            draft.beyond[declared.name] = problem
        else:
            draft.problems.append(problem)


def _forbidden(declared: DeclaredOption, setting: Setting) -> str:
    (variable, *_) = variables_of(declared.key)
    return (
        f"{setting}: {declared.key} opens this machine to a model, so it can be set only by the "
        f"environment variable {variable}; remove it here"
    )


def _take_the_engine_that_lmi_names(draft: _Draft) -> None:
    """Set the backend to vLLM where `rolling_batch` or `entryPoint` names it, as in most files for LMI, unless
    `backend` names an engine.

    A model that embeds or scores has other engines, too: what is installed here decides.
    """
    named = engine_named(draft.values.get)
    if draft.value("task") in (Task.EMBED, Task.SCORE):
        return
    if named is not None and named[1].backends == (Backend.VLLM,) and not draft.is_set("backend"):
        draft.derive("backend", Backend.VLLM, str(draft.chosen[named[0]]))


def _leave_to_vllm(draft: _Draft) -> None:
    """Leave names that are no options, and values that options do not have, to vLLM where it is the engine."""
    on_vllm = draft.value("backend") is Backend.VLLM
    for name, problem in draft.beyond.items():
        if on_vllm:
            setting = draft.chosen.pop(name)
            draft.overridden.pop(name)
            draft.engine_settings.append(replace(setting, key=f"option.{OPTIONS[name].option.vllm_argument}"))
        else:
            draft.problems.append(f"{problem}; vLLM's own names need option.backend=vllm")
    if on_vllm:
        for_vllm = [setting for setting in draft.unknown if _ARGUMENT.fullmatch(setting.key)]
        draft.engine_settings += for_vllm
        draft.unknown = [setting for setting in draft.unknown if setting not in for_vllm]


def _serve_the_named_model(draft: _Draft) -> None:
    """Let HF_MODEL_ID replace the model of other sources; a revision of their model is dropped with it."""
    winner = draft.chosen.get("model_id")
    if winner is None:
        return
    others = [other for other in draft.overridden["model_id"] if other.value.strip() != winner.value.strip()]
    for other in others:
        draft.warnings.append(f"{other} is overridden by {winner}: one model is served")
    revision = draft.chosen.get("revision")
    if not others or revision is None or winner.name != "HF_MODEL_ID":
        return
    if revision.name != "HF_REVISION" and revision.origin.kind is not OriginKind.OVERRIDE:
        draft.warnings.append(
            f"{revision} is ignored: it is a revision of {others[0].assignment}; "
            f"set HF_REVISION for {winner.assignment}"
        )
        del draft.chosen["revision"]
        draft.values.pop("revision", None)
        draft.overridden.pop("revision", None)


def _warn_of_overridden(draft: _Draft) -> None:
    for name, settings in draft.overridden.items():
        winner = draft.chosen[name]
        for setting in settings:
            if name != "model_id" and setting.value.strip() != winner.value.strip():
                draft.warnings.append(f"{setting.assignment} is overridden by {winner}")


def _warn_of_legacy(draft: _Draft) -> None:
    """Warn of options that no engine has any more, with what they did and what replaces them."""
    for name, setting in draft.chosen.items():
        option = OPTIONS[name].option
        if option.warn and name in draft.values:
            what = option.description[0].lower() + option.description[1:].removesuffix(".")
            draft.warnings.append(f"{setting} has no effect any more ({what}): {option.legacy}")


def _raise_limits_for_max_num_tokens(draft: _Draft) -> None:
    """`max_num_tokens`, set by the user to N, raises the limits that would keep batches below it.

    Input and output length to at least min(4096, N), the batch to at least 256 (finding-max-num-tokens.md).
    """
    tokens = draft.values.get("max_num_tokens")
    if tokens is None:
        return
    cause = draft.chosen["max_num_tokens"]
    if cause.alone:
        return
    for name, floor in (
        ("max_input_len", min(4096, tokens)),
        ("max_output_len", min(4096, tokens)),
        ("max_rolling_batch_size", 256),
    ):
        own = draft.values.get(name)
        if own is not None and own >= floor:
            continue
        rule = f"option.max_num_tokens={tokens} ({cause.origin})"
        if own is not None:
            setting = draft.chosen[name]
            draft.warnings.append(
                f"{setting} is raised to {floor}, because {cause} sets it to max({floor}, your "
                "value); to keep a smaller value, leave option.max_num_tokens out"
            )
            rule += f", which raises {as_text(own)} ({setting.origin})"
        draft.derive(name, floor, rule)


def _run_as_many_sequences_as_the_engine_holds(draft: _Draft) -> None:
    """`option.max_batch_size` (TensorRT-LLM's name) is the batch, in the engine and in the server.

    LMI's `option.max_num_sequences` is the engine's only.
    """
    sequences = draft.values.get("max_num_sequences")
    setting = draft.chosen.get("max_num_sequences")
    if sequences is None or setting is None or draft.is_set("max_rolling_batch_size"):
        return
    if setting.key == "option.max_batch_size":
        draft.derive("max_rolling_batch_size", sequences, str(setting))


def _split_addresses(draft: _Draft) -> None:
    """Set host and port from `inference_address` and `management_address`, unless they are set."""
    _split_address(draft, "inference_address", "host", "port")
    _split_address(draft, "management_address", "management_host", "management_port")
    values = draft.values
    one = (draft.value("host"), draft.value("port"))
    if not draft.is_set("management_port") and one == (values.get("management_host"), values.get("management_port")):
        # DJL Serving's way to say that it has no port of its own.
        draft.derive("management_port", 0, f"{draft.chosen['management_address']}, that of the requests")


def _split_address(draft: _Draft, name: str, host_option: str, port_option: str) -> None:
    address = draft.values.get(name)
    if address is None:
        return
    setting = draft.chosen[name]
    scheme = "http" if draft.values.get("certificate_file") is None else "https"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme != scheme or not host or parts.username or parts.path not in ("", "/") or parts.query:
        problem = f"{setting}: expected {scheme}://HOST:PORT"
        if host and {scheme, parts.scheme} == {"http", "https"}:
            tls = "certificate_file and private_key_file"
            problem += f"; for TLS set {tls}" if scheme == "http" else f", because {tls} are set"
        draft.problems.append(problem)
        return
    rule = str(setting)
    if not draft.is_set(host_option):
        draft.derive(host_option, host, rule)
    if not draft.is_set(port_option):
        draft.derive(port_option, (80 if scheme == "http" else 443) if port is None else port, rule)


def _place_engine_cache(draft: _Draft) -> None:
    """Set the engine cache to the djl-trtllm folder of DJL's cache folder, else of the download folder."""
    if draft.values.get("engine_cache_dir") is not None:
        return
    for name in ("cache_dir", "download_dir"):
        folder = draft.values.get(name)
        if folder is not None:
            setting = draft.chosen[name]
            draft.derive("engine_cache_dir", folder / "djl-trtllm", str(setting))
            return


def _check_rules(draft: _Draft) -> None:
    context = RuleContext(draft.value, draft.is_set, draft.format_setting, draft.written_name)
    found = check(context, When.OPTIONS)
    draft.problems += found.problems
    draft.warnings += found.warnings
    draft.notes += found.notes


def _report_unknown(draft: _Draft) -> None:
    into = draft.problems if draft.values.get("strict", False) else draft.warnings
    into += draft.foreign
    into += map(without_effect, draft.unknown)


def without_effect(setting: Setting, what: str = "is not an option", others: Iterable[str] = ()) -> str:
    """The message about a setting whose name no option has; `others` are names beside those of options."""
    near = difflib.get_close_matches(setting.name_in_engine, others, n=1, cutoff=0.8)
    suggestion = suggest(setting.key) or (f"option.{near[0]}" if near else None)
    if suggestion is None:
        advice = "docs/options.md lists the options"
    else:
        # As it is written there: the key itself in a file, a variable in the environment.
        in_environment = setting.origin.kind is OriginKind.ENVIRONMENT
        advice = f"did you mean {variables_of(suggestion)[0] if in_environment else suggestion}?"
    # The value is not shown: that of an unknown option may be a secret.
    return f"{setting.name or 'an empty key'} ({setting.place}) {what} and has no effect; {advice}"


# -- what a fetched repository's configuration may set -----------------------------------------------------------------

# It is a list, so that a new option is not on it by itself. The owner of a repository on the hub or in S3 may say how
# its model runs. Files and addresses of this machine, its caches and secrets, and permissions are the operator's: set
# them in the environment or on the command line.
_TABLE = read_table("fetched.toml", "djl_trtllm.config")
MAY_SET = frozenset(_TABLE["may_set"])
WITHIN = frozenset(_TABLE["within"])


def within_bounds(source: Source, model: str) -> Source:
    """The source, a file of the fetched `model`, without what it may not set, and a warning of each such setting."""
    kept = tuple(setting for setting in source.settings if _may_set(setting))
    warnings = tuple(_ignored(setting, model) for setting in source.settings if setting not in kept)
    return replace(source, settings=kept, warnings=(*source.warnings, *warnings))


def _ignored(setting: Setting, model: str) -> str:
    declared = find(setting.key)
    variable = variables_of(setting.key if declared is None else declared.key)[0]
    return (
        f"{setting if declared else setting.name} is ignored: {model} was fetched, and its own files may set only what "
        f"docs/fetched-models.md lists; if you want it, set {variable} in the environment"
    )


def _may_set(setting: Setting) -> bool:
    declared = find(setting.key)
    if declared is None:
        return _ARGUMENT.fullmatch(setting.key) is None  # which may be an argument of an engine
    if declared.option.legacy:
        return True  # it has no effect
    if declared.name in WITHIN:
        path = Path(setting.value.strip())
        return (
            not path.is_absolute() and ".." not in path.parts and not setting.value.strip().startswith(("~", "file:"))
        )
    return declared.name in MAY_SET


def listed() -> list[str]:
    """The keys of the options in the order of their groups, for the documents."""
    return [declared.key for name, declared in OPTIONS.items() if name in MAY_SET or name in WITHIN]
