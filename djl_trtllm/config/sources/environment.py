"""The environment as sources: `OPTION_*`, `SERVING_*`, SageMaker's variables and those of other servers.

The rules are DJL Serving's: its model server's for `OPTION_*`, `SERVING_*` and `SAGEMAKER_*`, its container's start
script for the variables it translates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from djl_trtllm.config.options.access import PROTECTING
from djl_trtllm.config.options.registry import find
from djl_trtllm.config.sources.origin import Origin
from djl_trtllm.config.sources.properties import Layer, Setting, Source
from djl_trtllm.config.tables import read_table

OPTION_PREFIX = "OPTION_"
SERVING_PREFIX = "SERVING_"
ARGUMENT_PREFIX = "ARGS_"
_PLAIN_UPPER = re.compile(r"[A-Z_0-9]+")
_MEBIBYTE = 1024 * 1024

OPTION_SPECIALS: Mapping[str, str] = {"entrypoint": "option.entryPoint", "engine": "engine"}
"""`OPTION_ENTRYPOINT` and `OPTION_ENGINE`, lower-cased, and the keys they mean."""

SERVING_SPECIALS: Mapping[str, str] = {"min_workers": "minWorkers", "max_workers": "maxWorkers"}
"""`SERVING_*` variables whose key is not their name in lower case."""

_TABLE = read_table("variables.toml")


def _pairs(name: str) -> tuple[tuple[str, str], ...]:
    return tuple((variable, key) for variable, key in _TABLE[name])


SAGEMAKER, NAMED_MODEL, PLAIN, TRANSLATED = map(_pairs, ("sagemaker", "named_model", "plain", "translated"))
IGNORED_VARIABLES: Mapping[str, str] = _TABLE["ignored"]


def read_environment(environ: Mapping[str, str]) -> tuple[Source, ...]:
    """One source per kind of variable. Empty variables, except those that protect, and other variables are ignored."""
    problems = tuple(
        f"{name} is empty, and the server would be open without it: give it a value, or remove it from the environment"
        for name, value in sorted(environ.items())
        if not value.strip() and name.startswith(SERVING_PREFIX) and serving_key(name) in PROTECTING
    )
    present = {name: value for name, value in environ.items() if value.strip()}
    # Without HF_MODEL_ID, HF_REVISION is a revision of a model that is named elsewhere.
    named = tuple(_named(present, NAMED_MODEL)) if "HF_MODEL_ID" in present else ()
    revision = () if named else tuple(_named(present, NAMED_MODEL[1:]))
    notes = tuple(f"{name} has no effect: {why}" for name, why in IGNORED_VARIABLES.items() if name in present)
    return (
        _sagemaker(present),
        Source(Layer.NAMED_MODEL, named),
        Source(Layer.OPTION, tuple(_options(present))),
        Source(Layer.SERVING, tuple(_serving(present)), problems=problems),
        Source(Layer.PLAIN, (*revision, *_named(present, PLAIN)), notes=notes),
        _translated(present),
    )


def option_key(variable: str) -> str:
    """The key that an `OPTION_*` variable sets: in lower case unless the name has lower-case letters already."""
    rest = variable[len(OPTION_PREFIX) :]
    name = rest.lower() if _PLAIN_UPPER.fullmatch(rest) else rest
    return OPTION_SPECIALS.get(name, f"option.{name}")


def serving_key(variable: str) -> str:
    name = variable[len(SERVING_PREFIX) :].lower()
    return SERVING_SPECIALS.get(name, name)


def variables_of(key: str) -> tuple[str, ...]:
    """The variables that set `key`, the one to prefer first."""
    names = []
    special = {target: name for name, target in (*OPTION_SPECIALS.items(), *SERVING_SPECIALS.items())}
    if key.startswith("option.") or key in OPTION_SPECIALS.values():
        names.append(OPTION_PREFIX + special.get(key, key.removeprefix("option.")).upper())
    else:
        names.append(SERVING_PREFIX + special.get(key, key).upper())
    names += [name for name, target in (*SAGEMAKER, *NAMED_MODEL, *PLAIN, *TRANSLATED) if target == key]
    return tuple(dict.fromkeys(names))


def _setting(name: str, key: str, value: str, wrote_value: str | None = None) -> Setting:
    return Setting(key, value, Origin.environment(name), name, wrote_value)


def _named(environ: Mapping[str, str], table: tuple[tuple[str, str], ...]) -> Iterator[Setting]:
    return (_setting(name, key, environ[name]) for name, key in table if name in environ)


def _options(environ: Mapping[str, str]) -> Iterator[Setting]:
    for name, value in sorted(environ.items()):
        if name.startswith(OPTION_PREFIX):
            yield _setting(name, option_key(name), value)
        elif name.startswith(ARGUMENT_PREFIX):
            key = name[len(ARGUMENT_PREFIX) :].lower()
            if find(key := SERVING_SPECIALS.get(key, key)) is not None:
                yield _setting(name, key, value)


def _serving(environ: Mapping[str, str]) -> Iterator[Setting]:
    for name, value in sorted(environ.items()):
        if name.startswith(SERVING_PREFIX):
            yield _setting(name, serving_key(name), value)


def _sagemaker(environ: Mapping[str, str]) -> Source:
    settings: list[Setting] = []
    problems: list[str] = []
    for setting in _named(environ, SAGEMAKER):
        if setting.wrote != "SAGEMAKER_MAX_PAYLOAD_IN_MB":
            settings.append(setting)
        elif re.fullmatch(r"\s*[1-9][0-9]{0,8}\s*", setting.value):
            size = str(int(setting.value) * _MEBIBYTE)
            settings.append(_setting(setting.wrote, setting.key, size, wrote_value=setting.value))
        else:
            problems.append(f"{setting.shown}: expected a whole number (megabytes), at least 1")
    return Source(Layer.SAGEMAKER, tuple(settings), problems=tuple(problems))


def _translated(environ: Mapping[str, str]) -> Source:
    settings: list[Setting] = []
    warnings: list[str] = []
    features = environ.get("SERVING_FEATURES", "trtllm").lower()
    for setting in _named(environ, TRANSLATED):
        if setting.wrote == "SM_NUM_GPUS" and setting.value.strip() == "0":
            warnings.append("SM_NUM_GPUS=0 means that there is no GPU, and does not set option.tensor_parallel_degree")
        elif setting.wrote == "CUDA_MEMORY_FRACTION" and "trtllm" not in features:
            warnings.append(
                f"{setting.shown} has no effect: with SERVING_FEATURES={features} it configures another library; "
                "set OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION"
            )
        elif setting.wrote == "ENABLE_CUDA_GRAPHS":
            eager = "false" if setting.value.strip().lower() == "true" else "true"
            settings.append(_setting(setting.wrote, setting.key, eager, wrote_value=setting.value))
        else:
            settings.append(setting)
    return Source(Layer.TRANSLATED, tuple(settings), tuple(warnings))
