"""Compiling ahead of time, between local directories, the hub and S3."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from djl_trtllm.backends.compilation import compile_checkpoint
from djl_trtllm.config import load
from djl_trtllm.engines.manifest import MANIFEST_FILE
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.model.remote.fetch import is_remote
from djl_trtllm.model.remote.upload import is_remote_destination, upload
from djl_trtllm.model.work_directory import marked
from djl_trtllm.service.model import fetch_model, model_files, open_source, remote_name, tokenizer_files

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
    else:
        source = open_source(Path(model), environ, arguments)
        config, checkpoint, tokenizer = source.config, model_files(source), tokenizer_files(source)
    if not remote:
        return str(compile_checkpoint(config, checkpoint, Path(out), progress, tokenizer_dir=tokenizer).path)
    # Kept if the upload fails, so that the next run uploads it without compiling.
    local = config.engine_cache_dir / "outgoing" / remote_name(out)
    compile_checkpoint(config, checkpoint, local, progress, tokenizer_dir=tokenizer)
    with marked(local):
        upload(local, out, progress, last=MANIFEST_FILE, hub_token=config.options.hf_access_token)
    shutil.rmtree(local, ignore_errors=True)
    return out


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
