"""Plans a server's start: its options, its models, and the folder from which more may be registered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from djl_trtllm.config import Options, load
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.model.remote.fetch import is_remote
from djl_trtllm.server.app import Startup
from djl_trtllm.service import open_remote, open_source, prepare, remote_name

MULTI_MODEL = "SAGEMAKER_MULTI_MODEL"
_VARIABLE = "SERVING_MODEL_STORE"
_MULTI_MODEL_STORE = Path("/opt/ml/models")
_ALL = "ALL"


def plan_startup(model: str | None, environ: Mapping[str, str]) -> tuple[Options, list[Startup], Path | None]:
    """Plan the start from the model named on the command line, if any, and the environment. Raises DjlTrtllmError.

    A SageMaker multi-model endpoint starts without a model; SageMaker registers models when requests need them.
    """
    multi_model = environ.get(MULTI_MODEL, "").lower() == "true"
    store = _store(environ, multi_model)
    if model is not None and not multi_model:
        return _single(model, environ, store)
    if store is None:
        raise DjlTrtllmError(
            "no model given, and there is none in /opt/ml/model: name a model directory, a model.tar.gz, a model of "
            "the Hugging Face hub or an s3:// address, or a folder of models with --model-store"
        )
    local = {name: value for name, value in environ.items() if name != "HF_MODEL_ID"}
    options = load(None, environ).options
    return options, [_of_store(store / name, local) for name in _names(store, options.load_models)], store


def _store(environ: Mapping[str, str], multi_model: bool) -> Path | None:
    """The folder of models. Only the operator sets it: a model directory cannot."""
    named = environ.get(_VARIABLE)
    if not named:
        return _MULTI_MODEL_STORE if multi_model else None
    store = Path(named)
    if not store.is_dir():
        raise ConfigError([f"{_VARIABLE}={named} (environment): there is no such folder"])
    return store


def _single(model: str, environ: Mapping[str, str], store: Path | None) -> tuple[Options, list[Startup], Path | None]:
    if is_remote(model):
        # The server listens while the model is fetched, so a remote serving.properties cannot configure it.
        options = load(None, environ).options
        name = options.model_name or remote_name(model)
        return options, [Startup(name, model, lambda: prepare(open_remote(model, environ)))], store
    source = open_source(Path(model), environ)
    return source.config.options, [Startup(source.name, model, lambda: prepare(source))], store


def _of_store(path: Path, environ: Mapping[str, str]) -> Startup:
    return Startup(path.name.removesuffix(".tar.gz"), str(path), lambda: prepare(open_source(path, environ)))


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
