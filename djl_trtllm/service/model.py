"""Everything about a model that is known before it runs: files, configuration, how to start its executor."""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from djl_trtllm.api.base import RequestParser
from djl_trtllm.api.kept import Kept
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.backends import planning
from djl_trtllm.backends.base import backend_named, this_machine
from djl_trtllm.backends.planning import compile_checkpoint
from djl_trtllm.batching.admission import BatchLimits
from djl_trtllm.config import Backend, Config, Options, Task, load, names_configuration
from djl_trtllm.config.options.option import MOST_GPUS
from djl_trtllm.config.rules import check_model
from djl_trtllm.config.sources import masked
from djl_trtllm.config.speculation import speculation_of
from djl_trtllm.engines.build import prepare_engine
from djl_trtllm.engines.cache import MANIFEST_FILE, EngineCache, Manifest
from djl_trtllm.engines.config_overlay import with_rotary_options
from djl_trtllm.engines.hardware import Gpu, Hardware
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import DjlTrtllmError, DownloadError, ModelError, NotDescribedError
from djl_trtllm.executor.protocol import Start
from djl_trtllm.model import Layout, Tokenizer, handle_requirements, inspect, inspect_config, load_tokenizer, open_model
from djl_trtllm.model.adapter import AdapterLimits
from djl_trtllm.model.archive import ARCHIVE_SUFFIXES
from djl_trtllm.model.chat_template import source_of
from djl_trtllm.model.pooling import check_case
from djl_trtllm.model.remote.fetch import fetch, is_remote, is_remote_destination, upload
from djl_trtllm.model.remote.s3 import S3Address, is_s3
from djl_trtllm.model.tokenizer import check_vocabulary, load_fitting_tokenizer, outside, require_tokenizer
from djl_trtllm.model.vision import Vision
from djl_trtllm.service.work import BoundedCalls, Calls

logger = logging.getLogger(__name__)

_HERE = Calls()


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
    offline: bool = False
    """Whether nothing is fetched: what is on the hub or in S3 is not described."""


class Texts(NamedTuple):
    """A model's tokenizer and its own formatters: they read prompts and write responses."""

    tokenizer: Tokenizer
    vocab_size: int | None = None
    """The number of ids that the model knows, if the tokenizer has some beyond them."""
    custom: RequestParser | None = None


@dataclass(frozen=True)
class Model:
    """Everything that is known before an engine process starts. `directory` holds serving.properties."""

    name: str
    directory: Path
    config: Config
    start: Start
    limits: BatchLimits
    texts: Callable[[], Texts]
    """Loads tokenizer and formatters at the first call, which takes up to a second, or more if a tokenizer is
    converted; the engine process loads the engine meanwhile. Raises TokenizerError, and ModelError for a model.py that
    fails."""
    gpus: int
    """GPUs per engine process."""
    backend: Backend
    kept: Kept = field(compare=False)
    adapter_limits: AdapterLimits | None = None
    """The LoRA adapters that the engine takes; None where it takes none."""
    vision: Vision | None = None
    """How images become tokens of its prompts; None where it takes none, or it is not known how."""

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
    def custom(self) -> RequestParser | None:
        return self.texts().custom

    @property
    def max_seq_len(self) -> int:
        """The longest sequence, prompt and output together."""
        return self.limits.max_seq_len


def open_source(
    path: Path,
    environ: Mapping[str, str],
    arguments: Sequence[str] = (),
    *,
    fetched: str | None = None,
    calls: Calls = _HERE,
) -> ModelSource:
    """Open the model at `path`: a directory, an archive, or a configuration file in a directory.

    `arguments` are KEY=VALUE pairs that override all other sources. `fetched` is the name of a model that was fetched
    and is not trusted: its own files may set what `config/fetched.toml` lists.

    Raises ModelError and ConfigError.
    """
    if names_configuration(path):
        path, config = path.parent, calls(load, path, environ, arguments=arguments, fetched=fetched)
        directory = path
    else:
        # Options decide where archives are extracted, so resolve them first, without the archive's own file. A
        # directory's own file is read now, so that its problems and those of the environment are reported together.
        config = calls(load, path if path.is_dir() else None, environ, arguments=arguments, fetched=fetched)
        directory = open_model(path, config.engine_cache_dir / "models")
        if directory != path:
            config = calls(load, directory, environ, arguments=arguments, fetched=fetched)
    # An archive is extracted to a folder that is named after its content.
    own = directory.name if directory.is_relative_to(path) else _without_suffix(path.name)
    name = config.options.model_name or re.sub(r"\W+", "-", own).strip("-") or "model"
    return ModelSource(name, directory, config)


def _without_suffix(archive: str) -> str:
    return next((archive.removesuffix(suffix) for suffix in ARCHIVE_SUFFIXES if archive.endswith(suffix)), archive)


def configuration(model: str | None, environ: Mapping[str, str], arguments: Sequence[str]) -> Config:
    """The configuration of a model as far as it is known here: what the environment says of one that is elsewhere.

    Raises what `open_source` raises.
    """
    if model is None or is_remote(model):
        return load(None, environ, arguments=arguments)
    return open_source(Path(model), environ, arguments).config


def open_remote(
    text: str,
    environ: Mapping[str, str],
    arguments: Sequence[str] = (),
    *,
    config_only: bool = False,
    calls: Calls = _HERE,
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
    source = open_source(fetched, local, arguments, fetched=None if trusted else text, calls=calls)
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
    layout = replace(layout_of(source), draft=_draft_layout(draft_files(source), config_only=source.config_only))
    return _planned_of(source, layout, tokenizer_files(source), hardware, under_djl=under_djl)


def _plan_files(
    source: ModelSource, files: Path, tokenizer_dir: Path | None, draft: Path | None, *, under_djl: bool
) -> tuple[Config, Layout, EnginePlan]:
    """Do what `plan` does, for a source whose files are all here."""
    layout = replace(inspect(files), draft=_draft_layout(draft))
    return _planned_of(source, layout, tokenizer_dir, under_djl=under_djl)


def _draft_layout(files: Path | None, *, config_only: bool = False) -> Layout | None:
    if files is None:
        return None
    return (inspect_config(files) if config_only else None) or inspect(files)


def _planned_of(
    source: ModelSource,
    layout: Layout,
    tokenizer_dir: Path | None,
    hardware: Hardware | None = None,
    *,
    under_djl: bool,
) -> tuple[Config, Layout, EnginePlan]:
    layout, told = with_rotary_options(source.config, layout)
    if tokenizer_dir is not None:
        layout = replace(layout, tokenizer_dir=tokenizer_dir)
    config = check_model(
        replace(source.config, warnings=(*source.config.warnings, *told)),
        layout.shape.model_type,
        layout.kind.is_engine,
        compiled_as=planning.compiled_quantization(layout),
    )
    config = planning.served_as_built(config, layout)
    # The description of a remote model does not say whether it has one.
    if not layout.kind.is_engine and layout.weight_files:
        require_tokenizer(layout)
    config, engine_plan = planning.plan_fitted(config, layout, hardware)
    return planning.with_effects(config, engine_plan.backend, engine_plan, under_djl=under_djl), layout, engine_plan


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


def prepare_apart(path: str, opened: Callable[..., ModelSource]) -> Model:
    """`prepare` what `opened(calls=...)` returns, whose files may be anybody's; they are read in a process apart.

    It costs 0.75 s of processor time. Raises DjlTrtllmError.
    """
    with BoundedCalls(f"reading the files of {path}") as calls:
        return prepare(opened(calls=calls), calls=calls)


def prepare(source: ModelSource, *, under_djl: bool = False, calls: Calls = _HERE) -> Model:
    """Find or compile the engine. Compiling takes minutes, and starts only if the tokenizer fits the model.

    `under_djl`: inside DJL Serving, which reads some options that have no effect elsewhere. `calls` read the model's
    files, once they are here. Raises DjlTrtllmError.
    """
    files, tokenizer_dir, draft = model_files(source), tokenizer_files(source), draft_files(source)
    config, layout, engine_plan = calls(_plan_files, source, files, tokenizer_dir, draft, under_djl=under_djl)
    options = config.options
    logger.info("%s", engine_plan.describe())
    logger.info("%s", planning.describe_limits(config))
    for line in config.notes:
        logger.info("%s", line)
    for line in (*config.warnings, *engine_plan.notes):
        logger.warning("%s", line)
    handle_requirements(source.directory, options.install_requirements)
    log_line = partial(logger.info, "%s")
    trusting = options.trust_remote_code
    template = _template(source)
    fitting = cache(calls.later(load_fitting_tokenizer, layout, trust_remote_code=trusting, template=template))
    prepared = partial(prepare_engine, before_compiling=fitting, check=_checked_by(calls))
    engine = prepared(config, layout, log_line, plan=engine_plan)
    planned, engine_plan = engine_plan, calls(engine_plan.at, engine)
    if layout.draft is not None and (of_draft := engine_plan.draft) is not None:
        found = prepared(config, layout.draft, log_line, plan=of_draft)
        engine_plan = replace(engine_plan, draft=calls(of_draft.at, found))
    if _lengths(engine_plan) != _lengths(planned):
        logger.info("limits of the engine %s: %s; planned were %s", engine, _lengths(engine_plan), _lengths(planned))
    for line in engine_plan.details():
        logger.info("%s", line)
    start = Start(
        engine_plan.executor,
        engine_plan.executor_options(),
        engine_plan.stream_interval,
        engine_plan.send_interval,
        kernels=str((config.engine_cache_dir / "kernels").absolute()) if engine_plan.gpus else "",
        reasons=engine_plan.reasons,
    )
    limits = BatchLimits(
        max_batch_size=engine_plan.max_sequences,
        max_queue_size=options.job_queue_size,
        max_input_len=engine_plan.max_input_len,
        max_output_len=options.max_output_len,
        max_seq_len=engine_plan.max_seq_len,
        resume=options.resume_after_restart,
    )
    if not source.trusted and (code := source.directory / DEFAULT.formatters_file).is_file():
        logger.warning(
            "%s is not run: it came with a fetched model; if you have read it, set OPTION_TRUST_REMOTE_CODE=true in "
            "the environment, or serve a copy of the directory",
            code,
        )

    of_engine = None
    if layout.tokenizer_dir is None:
        of_engine = cache(calls.later(load_tokenizer, engine, trust_remote_code=trusting, template=template))

    @cache
    def texts() -> Texts:
        tokenizer = fitting()
        if tokenizer is None:
            assert of_engine is not None
            tokenizer = of_engine()
            check_vocabulary(tokenizer, layout)
        if options.task in (Task.EMBED, Task.SCORE):
            import_module("numpy")  # its encoders use it, and no request is to wait for it
            check_case(tokenizer, layout)
        custom = None
        if source.trusted:
            custom = DEFAULT.formatters(source.directory, {"tokenizer": tokenizer, "configs": options})
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
        Kept(options),
        engine_plan.adapter_limits,
        calls(Vision.find, layout.path, layout.config),
    )


def _checked_by(calls: Calls) -> Callable[[EnginePlan, Path], Manifest | None]:
    return lambda engine_plan, directory: calls(EnginePlan.check, engine_plan, directory)


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
    return _found(source, _setting(source.config, "model_id"), model_id, source.config.options.revision)


def tokenizer_files(source: ModelSource) -> Path | None:
    """The directory that `option.tokenizer` names, fetched if needed; None without it."""
    tokenizer = source.config.options.tokenizer
    if tokenizer is None:
        return None
    revision = source.config.options.tokenizer_revision
    setting = _setting(source.config, "tokenizer")
    return _found(source, setting, tokenizer, revision, tokenizer_only=not source.config_only)


def _template(source: ModelSource) -> Callable[[], str] | None:
    """What reads the chat template that `option.chat_template` names; None without it."""
    value = source.config.options.chat_template
    if value is None:
        return None
    return partial(source_of, value, source.directory, _setting(source.config, "chat_template"))


def draft_files(source: ModelSource) -> Path | None:
    """The directory of the draft model that the options name, fetched if needed; None without one."""
    speculation = speculation_of(source.config)
    if speculation is None or speculation.model is None:
        return None
    return _found(source, f"{speculation.setting}: the draft model {speculation.model}", speculation.model, None)


def is_fetched(config: Config) -> bool:
    """Whether the model, its tokenizer or its draft comes from the hub or S3. Raises ConfigError."""
    speculation = speculation_of(config)
    draft = None if speculation is None else speculation.model
    named = (config.options.model_id, config.options.tokenizer, draft)
    return any(name is not None and is_remote(name) for name in named)


def _setting(config: Config, option: str) -> str:
    text = getattr(config.options, option)
    return f"option.{option}={masked(f'option.{option}', text)} ({config.origin(option)})"


def _local(source: ModelSource, text: str) -> Path | None:
    return next((directory for directory in (source.directory / text, Path(text)) if directory.is_dir()), None)


def _found(source: ModelSource, setting: str, text: str, revision: str | None, *, tokenizer_only: bool = False) -> Path:
    if (directory := _local(source, text)) is not None:
        return directory
    if not is_remote(text):
        raise ModelError(
            f"{setting} is not a directory on this machine, nor the name of a model on the Hugging Face hub "
            "(owner/name), nor an s3:// address"
        )
    if source.offline:
        raise _not_looked_at(text)
    return fetch_model(text, source.config, revision, tokenizer_only=tokenizer_only, config_only=source.config_only)


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
        patience=config.options.model_loading_timeout,
    )
    return open_model(found, config.engine_cache_dir / "models") if found.is_file() else found


# -- compiling ahead of time -------------------------------------------------------------------------------------------

_NEO_INPUT = "/opt/ml/model/input"
_NEO_OUTPUT = "/opt/ml/model/compiled"
_NEO_ERRORS = "/opt/ml/compilation/errors/errors.json"


def compile_model(
    model: str,
    out: str,
    environ: Mapping[str, str],
    progress: Callable[[str], None],
    arguments: Sequence[str] = (),
) -> str:
    """Compile a checkpoint (a directory, a hub id or an S3 address) into a directory, S3 or the hub.

    Uses a serving.properties beside a local checkpoint, and what its `option.model_id` names. `arguments` are KEY=VALUE
    pairs that override all other sources. Returns the engine's location. Raises DjlTrtllmError.
    """
    # Before minutes are spent on what has no place to go.
    remote = is_remote_destination(out)
    if is_remote(model):
        config, tokenizer = load(None, environ, arguments=arguments), None
        checkpoint = fetch_model(model, config, config.options.revision)
        source = ModelSource(remote_name(model), checkpoint, config)
    else:
        source = open_source(Path(model), environ, arguments)
        config, checkpoint, tokenizer = source.config, model_files(source), tokenizer_files(source)
    draft = draft_files(source)
    outgoing = EngineCache(config.engine_cache_dir).outgoing
    with outgoing(out, progress) if remote else nullcontext(Path(out)) as local:
        template = _template(source)
        compile_checkpoint(
            config, checkpoint, local, progress, tokenizer_dir=tokenizer, draft_dir=draft, template=template
        )
        if remote:
            upload(local, out, progress, last=MANIFEST_FILE, hub_token=config.options.hf_access_token)
    return out if remote else str(local)


def compile_with_neo(environ: Mapping[str, str], progress: Callable[[str], None]) -> None:
    """Compile as SageMaker Neo's optimisation jobs expect: directories from variables, errors into a file.

    Raises DjlTrtllmError after writing it to the file.
    """
    model = environ.get("SM_NEO_INPUT_MODEL_DIR", _NEO_INPUT)
    out = Path(environ.get("SM_NEO_COMPILED_MODEL_DIR", _NEO_OUTPUT))
    errors = Path(environ.get("SM_NEO_COMPILATION_ERROR_FILE", _NEO_ERRORS))
    variables = dict(environ)
    if cache := environ.get("SM_NEO_CACHE_DIR"):
        variables.setdefault("DJL_CACHE_DIR", cache)
    try:
        compile_model(model, str(out), variables, progress)
    except DjlTrtllmError as error:
        errors.parent.mkdir(parents=True, exist_ok=True)
        errors.write_text(json.dumps({"error": str(error)}))
        raise


# -- previews ----------------------------------------------------------------------------------------------------------

_HANDLERS = ("djl_trtllm.handler", "djl_trtllm.async_handler")


@dataclass(frozen=True)
class Preview:
    """The configuration, and its plan or the reason why it cannot be served.

    With neither plan nor reason there is nothing to plan yet, and the configuration is in order as far as it is known.
    `remarks` say which facts were supposed or not looked at.
    """

    config: Config
    hardware: Hardware
    plan: EnginePlan | None = None
    refusal: str | None = None
    remarks: tuple[str, ...] = ()
    offline: bool = False
    """Whether the model is on the hub or in S3, and nothing of it was fetched."""

    @property
    def under_djl(self) -> bool:
        """Whether the model is meant for DJL Serving: in its container, or by the handler that its options name."""
        return _under_djl(self.config)


@dataclass(frozen=True)
class _Machine:
    """The machine that a plan is for. `asked`: the user names the backend, which is there then."""

    asked: bool = False
    gpus: tuple[Gpu, ...] = ()
    here: Hardware = field(default_factory=lambda: this_machine())

    @property
    def hardware(self) -> Hardware:
        if self.gpus or self.asked:
            return planning.suppose_machine(self.here, self.gpus or self.here.gpus)
        return self.here

    def remarks(self, engine_plan: EnginePlan | None = None) -> tuple[str, ...]:
        """Say which machine the plan supposes, where that is another one than this."""
        if engine_plan is not None and not engine_plan.gpus:
            return (f"no GPU is used: the backend is {engine_plan.backend}",) if self.gpus else ()
        there, here = self.hardware, self.here
        if there.gpus == here.gpus and (there.tensorrt_llm == here.tensorrt_llm or not there.gpus):
            return ()
        names = sorted({gpu.name or "any NVIDIA GPU" for gpu in there.gpus})
        on_vllm = engine_plan is not None and engine_plan.backend is Backend.VLLM
        engine = f"vLLM {there.vllm}" if on_vllm else f"TensorRT-LLM {there.tensorrt_llm}"
        return (f"planned for {len(there.gpus)} x {' and '.join(names)} with {engine}, not for this machine",)


def preview(
    model: str | None,
    environ: Mapping[str, str],
    backend: str | None = None,
    gpus: tuple[Gpu, ...] = (),
    *,
    arguments: Sequence[str] = (),
    offline: bool = False,
) -> Preview:
    """Plan the model as `serve` would; without one, what the environment alone says.

    `arguments` are KEY=VALUE pairs that override other sources. `backend` overrides `option.backend`. With it or with
    `gpus` the plan may be for another machine: one with these GPUs, or with those that the backend needs, and with
    TensorRT-LLM. Of remote models only the files that describe them are fetched, and with `offline` none. Raises
    ModelError if there is no such model here, and ConfigError.
    """
    arguments = [*arguments, *([] if backend is None else [f"option.backend={backend}"])]
    machine = _Machine(asked=backend is not None, gpus=gpus)
    if model is not None and not is_remote(model):
        return _planned(open_source(Path(model), environ, arguments), machine, offline=offline)
    alone = load(None, environ, arguments=arguments)
    model = model or alone.options.model_id
    if model is None:
        return Preview(alone, machine.hardware, remarks=("no model is named: this is what the environment says",))
    try:
        if offline and is_remote(model):
            raise _not_looked_at(model)
        if _is_archive(model):
            return _unopened(model, alone, machine)
        if is_remote(model):
            return _planned(open_remote(model, environ, arguments, config_only=True), machine, offline=offline)
        return _planned(open_source(Path(model), environ, arguments), machine, offline=offline)
    except NotDescribedError as error:
        return Preview(alone, machine.hardware, remarks=(f"not planned: {error}",), offline=offline)
    except DownloadError as error:
        return Preview(alone, machine.hardware, refusal=str(error))


def _not_looked_at(model: str) -> NotDescribedError:
    """The error that says why a model elsewhere is not planned. Raises DownloadError for a malformed address."""
    is_remote_destination(model)
    return NotDescribedError(f"{model} is looked at when it is served (--offline)")


def _planned(source: ModelSource, machine: _Machine, *, offline: bool) -> Preview:
    source = replace(source, config_only=True, offline=offline)
    config = source.config
    try:
        model_id = config.options.model_id
        if model_id is not None and _is_archive(model_id) and not offline:
            return _unopened(model_id, config, machine)
        # The user asks for a backend that needs GPUs, and none are here or named.
        backend = config.options.backend
        on_gpus = backend is not Backend.AUTO and backend_named(backend).has_gpus
        if machine.asked and not machine.hardware.gpus and on_gpus:
            machine = replace(machine, gpus=(Gpu(),) * _ranks(config, layout_of(source)))
        config, layout, engine_plan = plan(source, machine.hardware, under_djl=_under_djl(config))
        # Where it is read in a moment and without code of the model, a tokenizer is refused as `serve` does it.
        if layout.tokenizer_dir is not None and (layout.tokenizer_dir / "tokenizer.json").exists():
            load_fitting_tokenizer(layout, trust_remote_code=False, template=_template(source))
    except NotDescribedError as error:
        return Preview(config, machine.hardware, remarks=(f"not planned: {error}",), offline=offline)
    except DjlTrtllmError as error:
        return Preview(config, machine.hardware, refusal=str(error), remarks=machine.remarks())
    remarks = machine.remarks(engine_plan)
    if not layout.weight_files:
        remarks += ("the weights are fetched and checked when the model is served",)
    return Preview(config, machine.hardware, plan=engine_plan, remarks=remarks)


def _under_djl(config: Config) -> bool:
    return "DJL_SERVING_HOME" in os.environ or config.options.entry_point in _HANDLERS


def _ranks(config: Config, layout: Layout) -> int:
    """The number of GPUs over which the model is spread; `max` counts as one where there are none."""
    options = config.options
    degrees = (
        layout.tensor_parallel or options.tensor_parallel_degree,
        layout.pipeline_parallel or options.pipeline_parallel_degree,
        options.context_parallel_size,
    )
    return min(MOST_GPUS, math.prod(degree for degree in degrees if isinstance(degree, int)))


def _is_archive(model: str) -> bool:
    return is_s3(model) and model.endswith(".tar.gz")


def _unopened(model: str, config: Config, machine: _Machine) -> Preview:
    """The preview of an archive in S3, which is fetched whole or not at all. Raises DownloadError."""
    from djl_trtllm.model.remote.s3_download import list_objects

    list_objects(S3Address.parse(model))
    remark = f"not planned: {model} is opened when it is served, with the serving.properties in it"
    return Preview(config, machine.hardware, remarks=(remark,))
