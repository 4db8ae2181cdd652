"""Find or compile the engine of a model directory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from djl_trtllm.config import Config
from djl_trtllm.engines.build import build_engine
from djl_trtllm.engines.cache import EngineCache
from djl_trtllm.engines.manifest import EngineDir, Manifest
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import CompilerMissingError, EngineMismatchError
from djl_trtllm.model import Layout
from djl_trtllm.model.remote.progress import format_bytes
from djl_trtllm.model.remote.s3 import S3Address

_WORTH_REPORTING_BYTES = 2 * 10**9


def prepare_engine(
    config: Config,
    layout: Layout,
    progress: Callable[[str], None],
    *,
    plan: EnginePlan,
    before_compiling: Callable[[], object] = lambda: None,
) -> EngineDir:
    """The engine of a model directory, compiled first if the backend needs one and there is none.

    An engine directory is used unchanged. For a checkpoint, the bundled engine is used if it fits, else one from the
    local cache, compiled if necessary. A backend that compiles nothing runs the checkpoint itself. `progress` gets one
    line at a time. `before_compiling` is called only if the engine is compiled, and may raise to prevent it.

    Raises EngineMismatchError for an engine directory that is damaged or differs from this machine or these options,
    and CompilerMissingError, BuildError and EngineError if compiling fails.
    """
    if plan.compiler is None:
        return _found(layout.path, plan, layout, None)
    if layout.kind.is_engine:
        directory = layout.engine_dir or layout.path
        manifest = plan.check_whole(directory)
        plan.check_fit(directory, manifest)
        return _found(directory, plan, layout, manifest)
    refusal = None
    if layout.bundled_engine is not None:
        try:
            return _bundled(plan, layout, layout.bundled_engine, progress)
        except EngineMismatchError as error:
            refusal = "; ".join(line.removeprefix("  - ") for line in str(error).splitlines())
            progress(f"not using the bundled engine {layout.bundled_engine}: {refusal}")
    try:
        return _through_cache(config, plan, layout, progress, before_compiling)
    except CompilerMissingError as error:
        if refusal is None:
            raise
        raise CompilerMissingError(f"the bundled engine is not used: {refusal}\n{error}") from error


def _bundled(plan: EnginePlan, layout: Layout, path: Path, progress: Callable[[str], None]) -> EngineDir:
    manifest = plan.check_whole(path)
    plan.check_fit(path, manifest)
    if manifest is None and plan.asked:
        options = ", ".join(f"option.{name}={value}" for name, value in plan.asked.items())
        raise EngineMismatchError(f"it has no manifest, so it is unknown whether it was compiled with {options}")
    if manifest is None:
        progress(f"the bundled engine {path} has no manifest and is used unchecked")
    elif differences := manifest.differences(checkpoint=_identified(plan, progress)):
        raise EngineMismatchError("; ".join(differences))
    return _found(path, plan, layout, manifest)


def _through_cache(
    config: Config,
    plan: EnginePlan,
    layout: Layout,
    progress: Callable[[str], None],
    before_compiling: Callable[[], object],
) -> EngineDir:
    def build(out: Path) -> None:
        before_compiling()
        progress(f"compiling {plan.source} for {plan.backend} into {out}: {plan.recipe}")
        build_engine(plan, out, progress)

    _identified(plan, progress)
    cache = EngineCache(config.engine_cache_dir, int(config.options.engine_cache_max_gb * 1e9))
    if (path := cache.lookup(plan.cache_key)) is not None:
        progress(f"using the cached engine {path}")
    elif config.options.engine_cache is None:
        path = cache.get_or_build(plan.cache_key, build, progress)
    else:
        # Importing botocore takes a third of a second.
        from djl_trtllm.engines.fleet_cache import FleetCache

        fleet = FleetCache(S3Address.parse(config.options.engine_cache), wait_seconds=config.options.engine_cache_wait)
        provide = partial(fleet.provide, plan.cache_key, build=build, progress=progress)
        path = cache.get_or_build(plan.cache_key, provide, progress)
    return _found(path, plan, layout, Manifest.read(path))


def _identified(plan: EnginePlan, progress: Callable[[str], None]) -> str:
    size = sum(path.stat().st_size for path in plan.source.glob("*.safetensors"))
    if size > _WORTH_REPORTING_BYTES:
        progress(f"reading {format_bytes(size)} of weights to identify the checkpoint")
    return plan.checkpoint_identity


def _found(path: Path, plan: EnginePlan, layout: Layout, manifest: Manifest | None) -> EngineDir:
    return EngineDir(
        path=path, backend=plan.backend.value, manifest=manifest, tokenizer_dir=layout.tokenizer_dir or path
    )
