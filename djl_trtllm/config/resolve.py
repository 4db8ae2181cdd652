"""Resolve sources to one configuration, by one order of precedence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from djl_trtllm.config.compat.detect import names_configuration, read_model, read_source
from djl_trtllm.config.configuration import Config
from djl_trtllm.config.derive import DERIVATIONS, Draft
from djl_trtllm.config.fetched import within_bounds
from djl_trtllm.config.options import Options
from djl_trtllm.config.options.option import Scope
from djl_trtllm.config.options.registry import OPTIONS, DeclaredOption, find, suggest
from djl_trtllm.config.options.values import NotAValueError, is_quoted, without_comment
from djl_trtllm.config.rules.context import context_of_draft
from djl_trtllm.config.rules.rule import check
from djl_trtllm.config.rules.table import OPTION_RULES
from djl_trtllm.config.sources.environment import read_environment, variables_of
from djl_trtllm.config.sources.origin import Origin, OriginKind
from djl_trtllm.config.sources.properties import Layer, Setting, Source, read_arguments, read_properties
from djl_trtllm.errors import ConfigError

Candidate = tuple[Layer, Setting]

_DEFAULTS = Options()
_DEFAULT_ORIGINS = dict.fromkeys(OPTIONS, Origin.default())


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
    6     SERVING_* variables                    config.properties
    7     plain variables                        serving.properties
    8     config.pbtxt, config.yaml              config.pbtxt, config.yaml
    9     variables of other servers             presets of Triton and Truss
    10    config.properties
    11    presets of Triton and Truss
    ====  =====================================  =====================================  ===========================

    This is DJL Serving's order: a model's file overrides OPTION_*, SageMaker's variables override the file, SERVING_*
    overrides config.properties, and a variable of another server is used only if nothing else sets its option. DJL
    Serving does not read the server's options from a model's file; here the file is the last place for them.
    HF_MODEL_ID replaces the model that a file names, and its revision (DJL Serving would load both models).
    A `config.pbtxt` or `config.yaml` is written for another server, so everything that is for this one overrides it.

    The limits of a compiled engine are below all layers but the presets (`backends.as_built`): the engine is looked at
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
            Layer.SERVER_FILE,
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
        Layer.SERVER_FILE,
        Layer.PRESET,
    )


def load(
    model_dir: Path | None,
    environ: Mapping[str, str],
    *,
    arguments: Iterable[str] = (),
    server_properties: Path | None = None,
    fetched: str | None = None,
) -> Config:
    """Resolve the configuration at `model_dir` (see `detect.read_source`), the environment and a command line.

    If `option.model_id` names another directory, the configuration that its compiler wrote there is read too, as the
    last of its layer.
    `model_dir` may also be a configuration file; then its folder is the model directory. `arguments` are KEY=VALUE
    pairs, `server_properties` is a `config.properties` of the server, if it has one.
    `fetched` is the name of a model whose directory was fetched: its files may set what `config.fetched` lists.
    Raises `ConfigError` with every problem found.
    """
    sources = list(read_environment(environ))
    sources.append(read_arguments(arguments))
    if model_dir is not None:
        of_directory = read_source(model_dir)
        sources += of_directory if fetched is None else [within_bounds(source, fetched) for source in of_directory]
    if server_properties is not None:
        sources.append(read_properties(server_properties, Layer.SERVER_FILE))
    if model_dir is not None and names_configuration(model_dir):
        model_dir = model_dir.parent
    config = resolve(sources, model_dir=model_dir)
    if config.options.model_id is None:
        return config
    of_model = read_model(model_dir, config.options.model_id)
    if fetched is not None:
        of_model = [within_bounds(source, fetched) for source in of_model]
    return resolve([*sources, *of_model], model_dir=model_dir) if of_model else config


def resolve(sources: Iterable[Source], *, model_dir: Path | None = None) -> Config:
    """Decide the value of every option. Pure: reads nothing but its arguments.

    Raises `ConfigError` with every problem found, one line each.
    """
    draft = Draft()
    candidates: dict[str, list[Candidate]] = {}
    unknown: list[Setting] = []
    foreign: list[str] = []
    for source in sources:
        draft.warnings += source.warnings
        draft.notes += source.notes
        draft.problems += source.problems
        foreign += source.unknown
        for setting in source.settings:
            declared = find(setting.key)
            if declared is None:
                unknown.append(setting)
            elif source.layer not in precedence(declared.option.scope):
                draft.problems.append(_forbidden(declared, setting))
            elif not setting.value.strip():
                draft.warnings.append(f"{setting.formatted} is empty: the option is not set")
            else:
                candidates.setdefault(declared.name, []).append((source.layer, setting))

    overridden: dict[str, tuple[Setting, ...]] = {}
    for name, found in candidates.items():
        winner, others = _choose(OPTIONS[name], found, draft)
        draft.chosen[name] = winner
        _parse(OPTIONS[name], winner, draft)
        overridden[name] = tuple(others)
    _serve_the_named_model(draft, overridden)
    _warn_of_overridden(draft, overridden)
    _warn_of_legacy(draft)
    for derivation in DERIVATIONS:
        derivation(draft)
    findings = check(context_of_draft(draft), OPTION_RULES)
    draft.problems += findings.problems
    draft.warnings += findings.warnings
    draft.notes += findings.notes
    _report_unknown(unknown, foreign, draft)
    if draft.problems:
        raise ConfigError(draft.problems, draft.warnings)

    origins = {name: draft.chosen[name].origin for name in draft.chosen} | draft.origins
    return Config(
        # Every value has been checked by its own type; checking all of them again costs more than the rest.
        options=_DEFAULTS.model_copy(update=draft.values),
        origins={**_DEFAULT_ORIGINS, **origins},
        user_set=frozenset(name for name, setting in draft.chosen.items() if setting.origin.is_user),
        warnings=tuple(draft.warnings),
        notes=tuple(draft.notes),
        model_dir=model_dir,
        overridden={name: others for name, others in overridden.items() if others},
    )


def _choose(declared: DeclaredOption, found: Sequence[Candidate], draft: Draft) -> tuple[Setting, list[Setting]]:
    """The setting that is used, and the user's settings that it overrides, in the order of precedence."""
    order = precedence(declared.option.scope)
    ranked = sorted(found, key=lambda candidate: order.index(candidate[0]))
    layer, winner = ranked[0]
    for other_layer, other in ranked[1:]:
        two_names = other_layer is layer and layer.has_own_names
        if two_names and other.value.strip() != winner.value.strip():
            draft.problems.append(
                f"{winner.formatted} and {other.formatted} are two names of one option with different values; keep one"
            )
    return winner, [setting for _, setting in ranked[1:] if setting.origin.is_user]


def _parse(declared: DeclaredOption, setting: Setting, draft: Draft) -> None:
    text = setting.value
    bare = without_comment(text)
    if bare != text and declared.type.is_text:
        draft.warnings.append(
            f"{setting.formatted}: the text from # on is part of the value; comments need their own line"
        )
    elif bare != text:
        draft.warnings.append(
            f"{setting.formatted}: the comment behind the value is ignored; put comments on their own line, because "
            "DJL Serving takes them for part of the value"
        )
        text = bare
    elif declared.type.is_text and is_quoted(text):
        draft.warnings.append(f"{setting.formatted}: the quotes are part of the value; write it without them")
    try:
        draft.values[declared.name] = declared.type.parse(text, declared.option)
    except NotAValueError as error:
        # Other servers write names and values differently.
        example = declared.example if setting.alone else f"{setting.wrote}={declared.example}"
        draft.problems.append(f"{setting.formatted}: {error}; for example {example}")


def _forbidden(declared: DeclaredOption, setting: Setting) -> str:
    (variable, *_) = variables_of(declared.key)
    return (
        f"{setting.formatted}: {declared.key} opens this machine to a model, so it can be set only by the "
        f"environment variable {variable}; remove it here"
    )


def _serve_the_named_model(draft: Draft, overridden: dict[str, tuple[Setting, ...]]) -> None:
    """HF_MODEL_ID replaces the model of other sources; a revision of their model is dropped with it."""
    winner = draft.chosen.get("model_id")
    if winner is None:
        return
    others = [other for other in overridden["model_id"] if other.value.strip() != winner.value.strip()]
    for other in others:
        draft.warnings.append(f"{other.formatted} is overridden by {winner.formatted}: one model is served")
    revision = draft.chosen.get("revision")
    if not others or revision is None or winner.wrote != "HF_MODEL_ID":
        return
    if revision.wrote != "HF_REVISION" and revision.origin.kind is not OriginKind.OVERRIDE:
        draft.warnings.append(
            f"{revision.formatted} is ignored: it is a revision of {others[0].shown}; "
            f"set HF_REVISION for {winner.shown}"
        )
        del draft.chosen["revision"]
        draft.values.pop("revision", None)
        overridden.pop("revision", None)


def _warn_of_overridden(draft: Draft, overridden: Mapping[str, Sequence[Setting]]) -> None:
    for name, settings in overridden.items():
        winner = draft.chosen[name]
        for setting in settings:
            if name != "model_id" and setting.value.strip() != winner.value.strip():
                draft.warnings.append(f"{setting.shown} is overridden by {winner.formatted}")


def _warn_of_legacy(draft: Draft) -> None:
    """Warn of options that no engine has any more, with what they did and what replaces them."""
    for name, setting in draft.chosen.items():
        option = OPTIONS[name].option
        if option.warn and name in draft.values:
            what = option.description[0].lower() + option.description[1:].removesuffix(".")
            draft.warnings.append(f"{setting.formatted} has no effect any more ({what}): {option.legacy}")


def _report_unknown(unknown: Iterable[Setting], foreign: Iterable[str], draft: Draft) -> None:
    strict: Any = draft.values.get("strict", False)
    (draft.problems if strict else draft.warnings).extend(foreign)
    for setting in unknown:
        suggestion = suggest(setting.key)
        name = _spelled_like(setting, suggestion) if suggestion else None
        advice = f"did you mean {name}?" if name else "docs/options.md lists the options"
        # The value is not shown: that of an unknown option may be a secret.
        text = f"{setting.wrote} ({setting.place}) is not an option and has no effect; {advice}"
        (draft.problems if strict else draft.warnings).append(text)


def _spelled_like(setting: Setting, key: str) -> str:
    """`key` as it is written at the place of `setting`: itself in a file, a variable in the environment."""
    return variables_of(key)[0] if setting.origin.kind is OriginKind.ENVIRONMENT else key
