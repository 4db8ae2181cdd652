"""Compiling ahead of time: `djl-trtllm compile CHECKPOINT OUT`."""

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import javaproperties
import msgspec

from djl_trtllm.backends.planning import plan_fitted
from djl_trtllm.config import Config
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.options.option import as_text
from djl_trtllm.engines.build import build_engine
from djl_trtllm.engines.cache import UNFINISHED, EngineDir, Manifest, sweep
from djl_trtllm.engines.config_overlay import with_rotary_options
from djl_trtllm.engines.plan import DRAFT_FOLDER, EnginePlan
from djl_trtllm.errors import EngineError, EngineMismatchError
from djl_trtllm.model import Layout, inspect
from djl_trtllm.model.tokenizer import load_fitting_tokenizer

log = logging.getLogger(__name__)

PROPERTIES_FILE = "serving.properties"
_CARRIED_GROUPS = ("limits", "kv_cache", "scheduler", "parallelism", "decoding", "lora", "serving")
_CARRIED = ("trust_remote_code", "model_name", "task")
_SPECULATION = "speculation"


def compile_checkpoint(
    config: Config,
    checkpoint: Path,
    out: Path,
    progress: Callable[[str], None] = log.info,
    *,
    tokenizer_dir: Path | None = None,
    draft_dir: Path | None = None,
) -> EngineDir:
    """Compile a local checkpoint into the directory `out`, with a `serving.properties` that serves it.

    `out` may not exist, be empty, or hold an engine of the same checkpoint: that one is kept when it is whole and was
    compiled by the same versions with the same options, and replaced (its serving.properties too) otherwise. The log
    of a failure stays in `OUT.log`, or, where an engine is replaced, in the file that the error names until the next
    compile. `tokenizer_dir` is the tokenizer's directory if it is not the checkpoint's,
    `draft_dir` the draft model's, which is compiled into the folder `draft` of `out` where the backend compiles it.

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
    load_fitting_tokenizer(layout, trust_remote_code=config.options.trust_remote_code)
    asked, (config, plan) = config, plan_fitted(config, layout, compile_only=True)
    for line in config.warnings[len(asked.warnings) :]:
        progress(f"warning: {line}")
    engine = _into(out, plan, progress)
    if plan.draft is not None:
        _compile_draft(plan.draft, layout.draft, out / DRAFT_FOLDER, progress)
    _write_properties(config, plan, out)
    return engine


def _compile_draft(plan: EnginePlan, layout: Layout | None, out: Path, progress: Callable[[str], None]) -> None:
    if layout is not None and layout.kind.is_engine:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(layout.path, out)
    else:
        _into(out, plan, progress)


def _into(out: Path, plan: EnginePlan, progress: Callable[[str], None]) -> EngineDir:
    sweep(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return _replace(plan, out, progress)
    if out.exists():
        out.rmdir()
    engine = build_engine(plan, out, progress)
    out.with_name(f"{out.name}.log").unlink(missing_ok=True)
    return engine


def _replace(plan: EnginePlan, out: Path, progress: Callable[[str], None]) -> EngineDir:
    manifest = _manifest_of(out)
    if manifest is None:
        raise EngineError(f"{out} is not empty and is not an engine this program compiled: choose another directory")
    if differences := manifest.differences(backend=plan.backend.value, checkpoint=plan.checkpoint_identity):
        raise EngineError(
            f"{out} holds another engine ({'; '.join(differences)}): remove it or choose another directory"
        )
    if _is_current(plan, manifest, out):
        manifest = _with_limits(plan, manifest, out)
        progress(f"{out} is up to date")
        return EngineDir(path=out, backend=plan.backend.value, manifest=manifest, tokenizer_dir=out)
    # Built beside it and swapped when done, so that a failure leaves the old engine.
    fresh = out.with_name(f".{out.name}.{os.getpid()}{UNFINISHED}")
    engine = build_engine(plan, fresh, progress)
    shutil.rmtree(out)
    fresh.rename(out)
    fresh.with_name(f"{fresh.name}.log").unlink(missing_ok=True)
    return EngineDir(path=out, backend=engine.backend, manifest=engine.manifest, tokenizer_dir=out)


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


def _with_limits(plan: EnginePlan, manifest: Manifest, out: Path) -> Manifest:
    """Return the manifest with the plan's limits, which change without compiling where the engine's files lack them."""
    if manifest.limits == plan.built_limits:
        return manifest
    if manifest.limits:
        (out / PROPERTIES_FILE).unlink(missing_ok=True)
    manifest = msgspec.structs.replace(manifest, limits=plan.built_limits)
    manifest.write(out)
    return manifest


def _write_properties(config: Config, plan: EnginePlan, out: Path) -> None:
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
    path.write_text(
        javaproperties.dumps(properties, comments="Serves the engine in this directory.", timestamp=False),
        encoding="utf-8",
    )
