"""Everything about a model that is known before it runs: files, configuration, how to start its executor."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from djl_trtllm.api.custom.formatters import FILE_NAME as CUSTOM_FILE
from djl_trtllm.api.custom.formatters import CustomFormatters, load_custom
from djl_trtllm.backends.as_built import describe_limits
from djl_trtllm.backends.options import with_effects
from djl_trtllm.backends.planning import plan_fitted, served_as_built
from djl_trtllm.backends.tensorrt_llm.quantization import method_of
from djl_trtllm.batching.limits import BatchLimits
from djl_trtllm.config import Backend, Config, Options, load, names_configuration
from djl_trtllm.config.masking import masked
from djl_trtllm.config.rules.table import check_model
from djl_trtllm.engines.config_overlay import with_rotary_options
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.manifest import Manifest
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.engines.preparation import prepare_engine
from djl_trtllm.errors import ModelError, NotDescribedError
from djl_trtllm.executor.protocol import Start
from djl_trtllm.model import Layout, Tokenizer, handle_requirements, inspect, inspect_config, load_tokenizer, open_model
from djl_trtllm.model.adapter import AdapterLimits
from djl_trtllm.model.remote.fetch import fetch, is_remote
from djl_trtllm.model.remote.s3 import is_s3
from djl_trtllm.model.vocabulary import check_vocabulary, load_fitting_tokenizer, outside, require_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A model directory and its resolved configuration.

    `trusted`: whether Python code in the directory may run. It may in local directories and archives, and in a
    downloaded model only if the environment or the command line allows it.
    """

    name: str
    directory: Path
    config: Config
    trusted: bool = True
    fetched: bool = False
    """Whether the directory comes from the hub or S3."""
    config_only: bool = False
    """Whether only the files that describe a model are fetched: it can be planned, not served."""


class Texts(NamedTuple):
    """What reads the prompts of a model and writes its answers."""

    tokenizer: Tokenizer
    vocab_size: int | None = None
    """The number of ids that the model knows, if the tokenizer has some beyond them."""
    custom: CustomFormatters | None = None


@dataclass(frozen=True)
class Model:
    """Everything that is known before an engine process starts. `directory` holds serving.properties."""

    name: str
    directory: Path
    config: Config
    start: Start
    limits: BatchLimits
    texts: Callable[[], Texts]
    """Loads them at the first call, which takes up to a second, and more where a tokenizer is converted: meanwhile the
    engine process loads the engine. Raises TokenizerError, and ModelError for a model.py that fails."""
    gpus: int
    """GPUs per engine process."""
    backend: Backend
    adapter_limits: AdapterLimits | None = None
    """The LoRA adapters that the engine takes; None where it takes none."""

    @property
    def options(self) -> Options:
        return self.config.options

    @property
    def tokenizer(self) -> Tokenizer:
        return self.texts().tokenizer

    @property
    def vocab_size(self) -> int | None:
        return self.texts().vocab_size

    @property
    def custom(self) -> CustomFormatters | None:
        return self.texts().custom

    @property
    def max_seq_len(self) -> int:
        """The longest sequence, prompt and output together."""
        return self.limits.max_seq_len


def open_source(
    path: Path, environ: Mapping[str, str], arguments: Sequence[str] = (), *, fetched: str | None = None
) -> ModelSource:
    """Open the model at `path`: a directory, an archive, or a configuration file in a directory.

    `arguments` are KEY=VALUE pairs that override all other sources. `fetched` is the name of a model that was fetched
    and is not trusted: its own files may set what `config.fetched` lists.

    Raises ModelError and ConfigError.
    """
    if names_configuration(path):
        directory, config = path.parent, load(path, environ, arguments=arguments, fetched=fetched)
    else:
        # Options decide where archives are extracted, so resolve them first, without the archive's own file. A
        # directory's own file is read now, so that its problems and those of the environment are reported together.
        config = load(path if path.is_dir() else None, environ, arguments=arguments, fetched=fetched)
        directory = open_model(path, config.engine_cache_dir / "models")
        if directory != path:
            config = load(directory, environ, arguments=arguments, fetched=fetched)
    name = config.options.model_name or re.sub(r"\W+", "-", directory.name).strip("-") or "model"
    return ModelSource(name, directory, config)


def open_remote(
    text: str, environ: Mapping[str, str], arguments: Sequence[str] = (), *, config_only: bool = False
) -> ModelSource:
    """Fetch a model from the hub or S3 and open it with the serving.properties that comes with it, if any.

    Its code runs only if `environ` or `arguments` set trust_remote_code; its own files cannot allow it. With
    `config_only` the source can be planned, not served. Raises ModelError and ConfigError.
    """
    # The variable that names the model fetched here does not name another one inside its directory.
    local = {name: value for name, value in environ.items() if name != "HF_MODEL_ID"}
    if local.get("OPTION_MODEL_ID") == text:
        del local["OPTION_MODEL_ID"]
    config = load(None, local, arguments=arguments)
    fetched = fetch_model(text, config, config.options.revision, config_only=config_only)
    trusted = config.options.trust_remote_code
    source = open_source(fetched, local, arguments, fetched=None if trusted else text)
    return replace(
        source,
        name=source.config.options.model_name or remote_name(text),
        trusted=trusted,
        fetched=True,
        config_only=config_only,
    )


def remote_name(text: str) -> str:
    """The name of a model on the hub or in S3, as in DJL Serving: all but letters and digits become `_`."""
    if is_s3(text):
        text = text.rstrip("/").rpartition("/")[2].removesuffix(".tar.gz")
    return re.sub(r"\W", "_", text.removeprefix("hf://"))


def plan(
    source: ModelSource, hardware: Hardware | None = None, *, under_djl: bool = False
) -> tuple[Config, Layout, EnginePlan]:
    """Inspect the model's files and plan its engine for `hardware`, by default this machine's. Raises DjlTrtllmError.

    Returns the source's configuration, checked against the kind of model, its files and the backend; an engine's own
    limits are its defaults. `under_djl` as in `prepare`.
    """
    layout, told = with_rotary_options(source.config, layout_of(source))
    if (tokenizer_dir := tokenizer_files(source)) is not None:
        layout = replace(layout, tokenizer_dir=tokenizer_dir)
    config = check_model(
        replace(source.config, warnings=(*source.config.warnings, *told)),
        layout.shape.model_type,
        layout.kind.is_engine,
        compiled_as=_compiled_as(layout),
    )
    config = served_as_built(config, layout)
    # The description of a remote model does not say whether it has one.
    if not layout.kind.is_engine and layout.weight_files:
        require_tokenizer(layout)
    config, engine_plan = plan_fitted(config, layout, hardware)
    return with_effects(config, engine_plan.backend, engine_plan, under_djl=under_djl), layout, engine_plan


def layout_of(source: ModelSource) -> Layout:
    """The kind of model and its files. Raises ModelError, and NotDescribedError if only a part of it was fetched."""
    files = model_files(source)
    own = source.config.options.model_id is None
    fetched = source.fetched if own else _local(source, source.config.options.model_id or "") is None
    if not (fetched and source.config_only):
        return inspect(files)
    if (described := inspect_config(files)) is not None:
        return described
    raise NotDescribedError("its files are looked at when the model is served")


def prepare(source: ModelSource, *, under_djl: bool = False) -> Model:
    """Find or compile the engine. Compiling takes minutes, and starts only if the tokenizer fits the model.

    `under_djl`: inside DJL Serving, which reads some options that have no effect elsewhere. Raises DjlTrtllmError.
    """
    config, layout, engine_plan = plan(source, under_djl=under_djl)
    options = config.options
    logger.info("%s", engine_plan.describe())
    logger.info("%s", describe_limits(config))
    for line in config.notes:
        logger.info("%s", line)
    for line in (*config.warnings, *engine_plan.notes):
        logger.warning("%s", line)
    handle_requirements(source.directory, options.install_requirements)
    fitting = cache(partial(load_fitting_tokenizer, layout, trust_remote_code=options.trust_remote_code))
    engine = prepare_engine(
        config, layout, lambda line: logger.info("%s", line), plan=engine_plan, before_compiling=fitting
    )
    planned, engine_plan = engine_plan, engine_plan.at(engine.path)
    if _lengths(engine_plan) != _lengths(planned):
        logger.info(
            "limits of the engine %s: %s; planned were %s", engine.path, _lengths(engine_plan), _lengths(planned)
        )
    for line in engine_plan.details():
        logger.info("%s", line)
    start = Start(
        engine_plan.executor,
        engine_plan.executor_options(),
        engine_plan.stream_interval,
        engine_plan.send_interval,
    )
    limits = BatchLimits(
        max_batch_size=engine_plan.max_sequences,
        max_queue_size=options.job_queue_size,
        max_input_len=engine_plan.max_input_len,
        max_output_len=options.max_output_len,
        max_seq_len=engine_plan.max_seq_len,
        max_resumes=options.retry_threshold if options.resume_after_restart else 0,
    )
    if not source.trusted and (code := source.directory / CUSTOM_FILE).is_file():
        logger.warning(
            "%s is not run: it came with a fetched model; if you have read it, set OPTION_TRUST_REMOTE_CODE=true in "
            "the environment, or serve a copy of the directory",
            code,
        )

    @cache
    def texts() -> Texts:
        tokenizer = fitting()
        if tokenizer is None:
            tokenizer = load_tokenizer(engine.tokenizer_dir, trust_remote_code=options.trust_remote_code)
            check_vocabulary(tokenizer, layout)
        custom = None
        if source.trusted:
            custom = load_custom(source.directory, {"tokenizer": tokenizer, "configs": options})
        return Texts(tokenizer, outside(tokenizer, layout), custom)

    return Model(
        source.name,
        source.directory,
        config,
        start,
        limits,
        texts,
        engine_plan.gpus,
        engine_plan.backend,
        engine_plan.adapter_limits,
    )


def _lengths(engine_plan: EnginePlan) -> str:
    return (
        f"{engine_plan.max_sequences} sequences of {engine_plan.max_seq_len} tokens, prompts of at most "
        f"{engine_plan.max_input_len}"
    )


def model_files(source: ModelSource) -> Path:
    """The directory of the checkpoint or engine: `option.model_id`, fetched if needed, else the model directory."""
    model_id = source.config.options.model_id
    if model_id is None:
        return source.directory
    return _found(source, "model_id", model_id, source.config.options.revision)


def tokenizer_files(source: ModelSource) -> Path | None:
    """The directory that `option.tokenizer` names, fetched if needed; None without it."""
    tokenizer = source.config.options.tokenizer
    if tokenizer is None:
        return None
    revision = source.config.options.tokenizer_revision
    return _found(source, "tokenizer", tokenizer, revision, tokenizer_only=not source.config_only)


def _local(source: ModelSource, text: str) -> Path | None:
    return next((directory for directory in (source.directory / text, Path(text)) if directory.is_dir()), None)


def _found(source: ModelSource, option: str, text: str, revision: str | None, *, tokenizer_only: bool = False) -> Path:
    config = source.config
    if (directory := _local(source, text)) is not None:
        return directory
    if not is_remote(text):
        raise ModelError(
            f"option.{option}={masked(f'option.{option}', text)} ({config.origin(option)}) is not a directory on this "
            "machine, nor the name of a model on the Hugging Face hub (owner/name), nor an s3:// address"
        )
    return fetch_model(text, config, revision, tokenizer_only=tokenizer_only, config_only=source.config_only)


def fetch_model(
    text: str,
    config: Config,
    revision: str | None = None,
    *,
    tokenizer_only: bool = False,
    config_only: bool = False,
) -> Path:
    """The local directory of a model on the hub or in S3 (see `is_remote`); an archive is opened.

    With `tokenizer_only` the weights are not fetched, with `config_only` only what describes the model. Raises
    DownloadError, and ArchiveError for a damaged archive.
    """
    hub_cache = None if config.options.download_dir is None else config.options.download_dir / "hub"
    downloads = config.engine_cache_dir / "downloads"
    found = fetch(
        text,
        downloads,
        logger.info,
        revision=revision,
        hub_cache=hub_cache,
        hub_token=config.options.hf_access_token,
        tokenizer_only=tokenizer_only,
        config_only=config_only,
    )
    return open_model(found, config.engine_cache_dir / "models") if found.is_file() else found


def _compiled_as(layout: Layout) -> str | None:
    """The quantisation an engine was compiled with, from its manifest or else its own config.json."""
    engine_dir = layout.engine_dir if layout.kind.is_engine else None
    if engine_dir is None:
        return None
    manifest = Manifest.read(engine_dir)
    if manifest is not None:
        return str(manifest.options.get("quantize"))
    method = method_of(layout.quantization)
    return None if method is None else method.value
