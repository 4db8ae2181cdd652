"""Plans a server's start: its options, its models, and the folder from which more may be registered."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from djl_trtllm.config import Options, load
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.model.remote.fetch import is_remote
from djl_trtllm.service import Model, open_remote, open_source, prepare, remote_name

MULTI_MODEL = "SAGEMAKER_MULTI_MODEL"
_VARIABLE = "SERVING_MODEL_STORE"
_MULTI_MODEL_STORE = Path("/opt/ml/models")
_LOAD_MODELS = "SERVING_LOAD_MODELS"
_ALL = "ALL"
# DJL Serving's NAME:VERSION:ENGINE:DEVICES=ADDRESS, of which all but the name may be empty (ModelStore.java, 0.36).
_ADDRESSED = re.compile(r"\[?([^?=:\]]+)[^?=\]]*\]?=(.+)")


class Startup(NamedTuple):
    """A model of the server's start: its name, where it comes from, and what prepares it."""

    name: str
    source: str
    prepare: Callable[[], Model]


Plan = tuple[Options, list[Startup], Path | None]


def plan_startup(
    model: str | None, environ: Mapping[str, str], arguments: Sequence[str] = (), *, found: str | None = None
) -> Plan:
    """Plan the start from the model named on the command line, if any, and the environment. Raises DjlTrtllmError.

    `arguments` are KEY=VALUE pairs that override all other sources, for the server and for every model of its start.

    `found` is the model in SageMaker's place or of a variable; it is served if neither the command line nor
    SERVING_LOAD_MODELS has an address. A SageMaker multi-model endpoint starts without a model; SageMaker registers
    models when requests need them.
    """
    multi_model = environ.get(MULTI_MODEL, "").lower() == "true"
    store = _store(environ, multi_model)
    if model is None and not multi_model:
        if addressed := _addressed(environ.get(_LOAD_MODELS, "")):
            return _at_addresses(addressed, environ, arguments, store)
        model = found
    if model is not None and not multi_model:
        return _single(model, environ, arguments, store)
    if store is None:
        raise DjlTrtllmError(
            "no model given, and there is none in /opt/ml/model: name a model directory, a model.tar.gz, a model of "
            "the Hugging Face hub or an s3:// address, on the command line or by HF_MODEL_ID or OPTION_MODEL_ID, or a "
            "folder of models with --model-store"
        )
    local = {name: value for name, value in environ.items() if name != "HF_MODEL_ID"}
    options = load(None, environ, arguments=arguments).options
    return options, [_of_store(store / name, local, arguments) for name in _names(store, options.load_models)], store


def _store(environ: Mapping[str, str], multi_model: bool) -> Path | None:
    """The folder of models. Only the operator sets it: a model directory cannot."""
    named = environ.get(_VARIABLE)
    if not named:
        return _MULTI_MODEL_STORE if multi_model else None
    store = Path(named)
    if not store.is_dir():
        raise ConfigError([f"{_VARIABLE}={named} (environment): there is no such folder"])
    return store


def _addressed(wanted: str) -> list[tuple[str, str]]:
    """The models of `load_models` that have an address (`NAME::ENGINE=ADDRESS`): name and address."""
    entries = (_ADDRESSED.fullmatch(entry) for entry in re.split(r"[,\s]+", wanted))
    return [(entry[1], entry[2]) for entry in entries if entry is not None]


def _at_addresses(
    addressed: Sequence[tuple[str, str]], environ: Mapping[str, str], arguments: Sequence[str], store: Path | None
) -> Plan:
    if len(addressed) == 1:
        ((name, address),) = addressed
        return _single(_opened(address, environ), environ, arguments, store, name=name)
    # HF_MODEL_ID would replace each of them.
    local = {name: value for name, value in environ.items() if name != "HF_MODEL_ID"}
    plans = [_single(_opened(address, local), local, arguments, store, name=name) for name, address in addressed]
    options = load(None, environ, arguments=arguments).options
    return options, [startup for _, startups, _ in plans for startup in startups], store


def _opened(address: str, environ: Mapping[str, str]) -> str:
    """The model at the address. A folder without content may stand for the model that a variable names."""
    path = Path(unquote(urlsplit(address).path) if address.startswith("file:") else address)
    named = environ.get("HF_MODEL_ID") or environ.get("OPTION_MODEL_ID")
    if named and not is_remote(address) and not (path.exists() and (path.is_file() or any(path.iterdir()))):
        return named
    return str(path) if address.startswith("file:") else address


def _single(
    model: str, environ: Mapping[str, str], arguments: Sequence[str], store: Path | None, *, name: str | None = None
) -> Plan:
    if is_remote(model):
        # The server listens while the model is fetched, so a remote serving.properties cannot configure it.
        options = load(None, environ, arguments=arguments).options
        remote = name or options.model_name or remote_name(model)

        def fetched() -> Model:
            source = open_remote(model, environ, arguments)
            return prepare(source if name is None else replace(source, name=name))

        return options, [Startup(remote, model, fetched)], store
    source = open_source(Path(model), environ, arguments)
    if name is not None:
        source = replace(source, name=name)
    return source.config.options, [Startup(source.name, model, lambda: prepare(source))], store


def _of_store(path: Path, environ: Mapping[str, str], arguments: Sequence[str]) -> Startup:
    return Startup(path.name.removesuffix(".tar.gz"), str(path), lambda: prepare(open_source(path, environ, arguments)))


def _names(store: Path, wanted: str | None) -> list[str]:
    """The models of the store that `load_models` names; none if it is not set."""
    if wanted is None or wanted.upper() == "NONE":
        return []
    there = sorted(path.name for path in store.iterdir() if path.is_dir() or path.name.endswith(".tar.gz"))
    if wanted.upper() == _ALL:
        return there
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if unknown := [name for name in names if name not in there]:
        raise ConfigError([f"load_models names {', '.join(unknown)}: in {store} are {', '.join(there) or 'none'}"])
    return names
