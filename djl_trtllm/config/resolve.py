"""From sources to one configuration: the precedence, and nothing else decides it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from djl_trtllm.config.compat.detect import names_configuration, read_model, read_source
from djl_trtllm.config.configuration import Config
from djl_trtllm.config.derive import RULES, Draft
from djl_trtllm.config.options import Options
from djl_trtllm.config.options.option import Scope
from djl_trtllm.config.options.registry import OPTIONS, DeclaredOption, find, suggest
from djl_trtllm.config.options.values import NotAValueError, is_quoted, without_comment
from djl_trtllm.config.rules.context import subject_of_draft
from djl_trtllm.config.rules.table import OPTION_RULES, check
from djl_trtllm.config.sources.environment import read_environment, variables_of
from djl_trtllm.config.sources.origin import Origin, OriginKind
from djl_trtllm.config.sources.properties import Layer, Setting, Source, read_arguments, read_properties
from djl_trtllm.errors import ConfigError

Candidate = tuple[Layer, Setting]

_DEFAULTS = Options()
_DEFAULT_ORIGINS = dict.fromkeys(OPTIONS, Origin.default())


_FILES_OF_A_MODEL = (Layer.FILE, Layer.DIALECT, Layer.PRESET)


def precedence(scope: Scope) -> tuple[Layer, ...]:
    """The layers that may set an option, the strongest first.

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
    9     variables of other servers
    10    config.properties
    11    presets of Triton and Truss
    ====  =====================================  =====================================  ===========================

    This is DJL Serving's order: a model's file beats OPTION_*, SageMaker's variables beat the file, SERVING_* beats
    config.properties, and a variable of another server counts only where its target is not set. What is about the
    server DJL Serving does not read from a model's file at all; here the file may still set what nothing else sets.
    HF_MODEL_ID names the model that is served, and only that one: it comes before the model that a file names, beside
    which DJL Serving would load it as a second one, and a revision of the file's model does not become its own.
    A `config.pbtxt` or `config.yaml` is not written for this server, and everything that is comes before it.

    Permissions (`option.trust_remote_code`) are options of a model that every other layer may take back: the files of a
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
            Layer.DIALECT,
        )
    return (
        Layer.ARGUMENTS,
        Layer.SAGEMAKER,
        Layer.NAMED_MODEL,
        Layer.FILE,
        Layer.OPTION,
        Layer.SERVING,
        Layer.PLAIN,
        Layer.DIALECT,
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
) -> Config:
    """Resolve the configuration at `model_dir` (see `detect.read_source`), the environment and a command line.

    Where `option.model_id` names another directory, what its compiler configured there counts too, last of its layer.
    `model_dir` may also be a configuration file; then its folder is the model directory. `arguments` are KEY=VALUE
    pairs, `server_properties` is a `config.properties` of the server, if it has one.
    Raises `ConfigError` with every problem found.
    """
    sources = list(read_environment(environ))
    sources.append(read_arguments(arguments))
    if model_dir is not None:
        sources += read_source(model_dir)
    if server_properties is not None:
        sources.append(read_properties(server_properties, Layer.SERVER_FILE))
    if model_dir is not None and names_configuration(model_dir):
        model_dir = model_dir.parent
    config = resolve(sources, model_dir=model_dir)
    if config.options.model_id is None:
        return config
    of_model = read_model(model_dir, config.options.model_id)
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
                draft.warnings.append(f"{setting.cited} is empty and counts as not set")
            else:
                candidates.setdefault(declared.name, []).append((source.layer, setting))

    overridden: dict[str, tuple[Setting, ...]] = {}
    for name, found in candidates.items():
        winner, beaten = _choose(OPTIONS[name], found, draft)
        draft.chosen[name] = winner
        _parse(OPTIONS[name], winner, draft)
        overridden[name] = tuple(beaten)
    _serve_the_named_model(draft, overridden)
    _warn_of_beaten(draft, overridden)
    _warn_of_legacy(draft)
    for rule in RULES:
        rule(draft)
    findings = check(subject_of_draft(draft), OPTION_RULES)
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
        overridden={name: beaten for name, beaten in overridden.items() if beaten},
    )


def _choose(declared: DeclaredOption, found: Sequence[Candidate], draft: Draft) -> tuple[Setting, list[Setting]]:
    """The setting that counts, and those of users that it beats, the strongest first."""
    order = precedence(declared.option.scope)
    ranked = sorted(found, key=lambda candidate: order.index(candidate[0]))
    layer, winner = ranked[0]
    for other_layer, other in ranked[1:]:
        two_names = other_layer is layer and layer.has_own_names
        if two_names and other.value.strip() != winner.value.strip():
            draft.problems.append(
                f"{winner.cited} and {other.cited} are two names of one option with different values; keep one"
            )
    return winner, [setting for _, setting in ranked[1:] if setting.origin.is_user]


def _parse(declared: DeclaredOption, setting: Setting, draft: Draft) -> None:
    text = setting.value
    bare = without_comment(text)
    if bare != text and declared.type.is_text:
        draft.warnings.append(f"{setting.cited}: the text from # on is part of the value; comments need their own line")
    elif bare != text:
        draft.warnings.append(
            f"{setting.cited}: the comment after the value is left off; comments need their own line, as DJL Serving "
            "takes them for part of the value"
        )
        text = bare
    elif declared.type.is_text and is_quoted(text):
        draft.warnings.append(f"{setting.cited}: the quotes are part of the value; write it without them")
    try:
        draft.values[declared.name] = declared.type.parse(text, declared.option)
    except NotAValueError as error:
        # How a name and its value are written differs from server to server.
        example = declared.example if setting.alone else f"{setting.wrote}={declared.example}"
        draft.problems.append(f"{setting.cited}: {error}; for example {example}")


def _forbidden(declared: DeclaredOption, setting: Setting) -> str:
    (variable, *_) = variables_of(declared.key)
    return (
        f"{setting.cited}: {declared.key} lets a model run code on this machine, so it can be set only by the "
        f"environment variable {variable}; remove it here"
    )


def _serve_the_named_model(draft: Draft, overridden: dict[str, tuple[Setting, ...]]) -> None:
    """HF_MODEL_ID names the only model that is served; what another source says about its own model goes with that."""
    winner = draft.chosen.get("model_id")
    if winner is None:
        return
    others = [beaten for beaten in overridden["model_id"] if beaten.value.strip() != winner.value.strip()]
    for beaten in others:
        draft.warnings.append(f"{beaten.cited} does not count: one model is served, that of {winner.cited}")
    revision = draft.chosen.get("revision")
    if not others or revision is None or winner.wrote != "HF_MODEL_ID":
        return
    if revision.wrote != "HF_REVISION" and revision.origin.kind is not OriginKind.OVERRIDE:
        draft.warnings.append(
            f"{revision.cited} does not count: it is a revision of {others[0].shown}; "
            f"the revision of {winner.shown} is HF_REVISION"
        )
        del draft.chosen["revision"]
        draft.values.pop("revision", None)
        overridden.pop("revision", None)


def _warn_of_beaten(draft: Draft, overridden: Mapping[str, Sequence[Setting]]) -> None:
    """A value that somebody wrote and that does not count is told, or they will look for it elsewhere."""
    for name, beaten in overridden.items():
        winner = draft.chosen[name]
        for setting in beaten:
            if name != "model_id" and setting.value.strip() != winner.value.strip():
                draft.warnings.append(f"{setting.shown} does not count: {winner.cited} is stronger")


def _warn_of_legacy(draft: Draft) -> None:
    """Warn of options that no engine has any more, with what they did and what replaces them."""
    for name, setting in draft.chosen.items():
        option = OPTIONS[name].option
        if option.warn and name in draft.values:
            what = option.description[0].lower() + option.description[1:].removesuffix(".")
            draft.warnings.append(f"{setting.cited} has no effect any more ({what}): {option.legacy}")


def _report_unknown(unknown: Iterable[Setting], foreign: Iterable[str], draft: Draft) -> None:
    strict: Any = draft.values.get("strict", False)
    (draft.problems if strict else draft.warnings).extend(foreign)
    for setting in unknown:
        suggestion = suggest(setting.key)
        name = _spelled_like(setting, suggestion) if suggestion else None
        advice = f"did you mean {name}?" if name else "see docs/options.md for the options there are"
        # Values are not shown: of an unknown option nobody knows whether its value is a secret.
        text = f"{setting.wrote} ({setting.place}) is not an option and has no effect; {advice}"
        (draft.problems if strict else draft.warnings).append(text)


def _spelled_like(setting: Setting, key: str) -> str:
    """`key` as it is written where `setting` stands: as itself in a file, as a variable in the environment."""
    return variables_of(key)[0] if setting.origin.kind is OriginKind.ENVIRONMENT else key
