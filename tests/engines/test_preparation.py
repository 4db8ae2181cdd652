"""What is served: as it is, bundled, cached. Nothing here compiles for real."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.engines import preparation
from djl_trtllm.engines.cache import EngineCache
from djl_trtllm.engines.compiler import Compiler
from djl_trtllm.engines.manifest import EngineDir, Manifest
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.engines.preparation import prepare_engine
from djl_trtllm.errors import CompilerMissingError, EngineMismatchError, TokenizerError
from djl_trtllm.model import inspect
from tests.engines.helpers import CPU_ONLY, built, configured, write_engine_files
from tests.support.s3_server import Store


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(compiler: Compiler, checkpoint: Path) -> None:
        raise CompilerMissingError(f"{checkpoint} must be compiled")

    monkeypatch.setattr(Compiler, "require", refuse)


def bundle(model: Path, *, quantize: str = "none", manifest: bool = True) -> Path:
    path = write_engine_files(model / "engine")
    shutil.copy(model / "config.json", path)
    if manifest:
        plan = plan_engine(configured(), inspect(model), CPU_ONLY)
        options = plan.build_options | {"quantize": quantize}
        Manifest.of(
            path,
            backend="openvino",
            checkpoint=plan.checkpoint_identity,
            options=options,
            versions=plan.versions,
            platform=plan.platform,
        ).write(path)
    return path


def prepared(path: Path, told: list[str] | None = None, **options: object) -> EngineDir:
    config = configured(engine_cache_dir=path.parent / "cache", **options)
    layout = inspect(path)
    plan = plan_engine(config, layout, CPU_ONLY)
    return prepare_engine(config, layout, (told if told is not None else []).append, plan=plan)


def test_an_engine_directory_is_served_as_it_is(model: Path) -> None:
    path = bundle(model, quantize="int8")
    engine = prepared(path)
    assert engine.path == path
    assert engine.manifest is not None and engine.manifest.options["quantize"] == "int8"
    assert engine.tokenizer_dir == model


def test_an_engine_without_a_manifest_is_served(model: Path) -> None:
    assert prepared(bundle(model, manifest=False), quantize="int8").manifest is None


def test_options_the_engine_was_not_compiled_with_fail_before_loading_with_what_differs(model: Path) -> None:
    path = bundle(model, quantize="int8")
    with pytest.raises(EngineMismatchError) as caught:
        prepared(path, quantize="none", dtype="fp32")
    assert str(caught.value).splitlines() == [
        f"the engine {path} does not fit:",
        "  - option.dtype: engine has fp16, asked for fp32",
        "  - option.quantize: engine has int8, asked for none",
        "change the option, or compile the checkpoint again with `djl-trtllm compile CHECKPOINT OUT`",
    ]


def test_a_truncated_engine_fails_before_loading(model: Path) -> None:
    path = bundle(model)
    (path / "openvino_model.bin").write_bytes(bytes(10))
    with pytest.raises(EngineMismatchError, match=r"openvino_model\.bin: truncated, 10 of 1000 bytes"):
        prepared(path)


@pytest.mark.usefixtures("no_compiler")
def test_a_bundled_engine_that_fits_needs_no_compiler(model: Path) -> None:
    path = bundle(model)
    assert prepared(model).path == path
    assert prepared(model, quantize="none").path == path


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("change", ["options", "checkpoint", "damage"])
def test_a_bundled_engine_that_does_not_fit_is_reported_and_not_used(model: Path, change: str) -> None:
    path = bundle(model)
    options: dict[str, object] = {}
    if change == "options":
        options, reason = {"quantize": "int8"}, "option.quantize: engine has none, asked for int8"
    elif change == "checkpoint":
        (model / "generation_config.json").write_text("{}")
        reason = "checkpoint: engine was made from sha256:"
    else:
        (path / "openvino_model.bin").write_bytes(b"")
        reason = "openvino_model.bin: truncated, 0 of 1000 bytes"
    told: list[str] = []
    with pytest.raises(CompilerMissingError) as caught:
        prepared(model, told, **options)
    assert told[0].startswith(f"not using the bundled engine {path}: ")
    assert reason in told[0]
    assert reason in str(caught.value) and "must be compiled" in str(caught.value)


@pytest.mark.usefixtures("no_compiler")
def test_every_difference_of_a_bundled_engine_is_reported(model: Path) -> None:
    path = bundle(model, manifest=False)
    with pytest.raises(CompilerMissingError, match=r"with option\.dtype=fp16, option\.quantize=int8\n"):
        prepared(model, quantize="int8", dtype="fp16")
    assert path.is_dir()


@pytest.mark.usefixtures("no_compiler")
def test_a_bundled_engine_without_a_manifest_is_used_unless_options_were_asked_for(model: Path) -> None:
    path = bundle(model, manifest=False)
    told: list[str] = []
    assert prepared(model, told).path == path
    assert told == [f"the bundled engine {path} has no manifest and is used unchecked"]
    with pytest.raises(
        CompilerMissingError, match=r"so it is unknown whether it was compiled with option\.quantize=int8"
    ):
        prepared(model, quantize="int8")


# -- through the cache ---------------------------------------------------------------------------------------------


class Compiling:
    """A compiler that is quick; the lines that it prints, and how it was called."""

    def __init__(self) -> None:
        self.calls: list[Path] = []

    def __call__(self, plan: EnginePlan, out: Path, progress: object) -> EngineDir:
        self.calls.append(out)
        return built(plan, out)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Compiling:
    compiling = Compiling()
    monkeypatch.setattr(preparation, "build_engine", compiling)
    return compiling


def test_a_checkpoint_is_compiled_into_the_cache_and_found_there_again(model: Path, compiling: Compiling) -> None:
    told: list[str] = []
    engine = prepared(model, told)
    entry = model.parent / "cache" / plan_engine(configured(), inspect(model), CPU_ONLY).cache_key
    assert engine == EngineDir(entry, "openvino", Manifest.read(entry), model)
    assert engine.manifest is not None
    assert told == [f"compiling {model} for openvino into {entry}: weights fp16"]
    told.clear()
    assert prepared(model, told) == engine
    assert told == [f"using the cached engine {entry}"]
    assert compiling.calls == [entry]


def test_other_options_are_another_engine(model: Path, compiling: Compiling) -> None:
    assert prepared(model).path != prepared(model, quantize="int8").path
    assert len(compiling.calls) == 2


def test_a_bundled_engine_that_does_not_fit_is_compiled_again(model: Path, compiling: Compiling) -> None:
    bundle(model)
    (model / "generation_config.json").write_text("{}")
    told: list[str] = []
    engine = prepared(model, told, quantize="int8")
    assert engine.path.parent == model.parent / "cache"
    assert told[0] == (
        f"not using the bundled engine {model / 'engine'}: the engine {model / 'engine'} does not fit:; "
        "option.quantize: engine has none, asked for int8; "
        "change the option, or compile the checkpoint again with `djl-trtllm compile CHECKPOINT OUT`"
    )


def test_the_cache_keeps_to_its_size(model: Path, compiling: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = []

    def cache(root: Path, max_bytes: int) -> EngineCache:
        bounds.append((root, max_bytes))
        return EngineCache(root, max_bytes)

    monkeypatch.setattr(preparation, "EngineCache", cache)
    prepared(model, engine_cache_max_gb=1.5)
    assert bounds == [(model.parent / "cache", 1_500_000_000)]


def test_without_a_plan_one_is_made_for_this_machine(
    model: Path, compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(engine_cache_dir=model.parent / "cache", backend="openvino")
    layout = inspect(model)
    assert prepare_engine(config, layout, lambda line: None, plan=plan_engine(config, layout)).backend == "openvino"


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_and_an_engine_the_compiler_is_missing(model: Path) -> None:
    with pytest.raises(CompilerMissingError) as caught:
        prepared(model)
    assert str(caught.value) == f"{model} must be compiled"


@pytest.mark.parametrize(("size", "told"), [(2 * 10**9, False), (2 * 10**9 + 1, True)])
def test_reading_much_to_identify_a_checkpoint_is_reported(
    model: Path, compiling: Compiling, monkeypatch: pytest.MonkeyPatch, size: int, told: bool
) -> None:
    config, layout, lines = configured(engine_cache_dir=model.parent / "cache"), inspect(model), list[str]()
    plan = plan_engine(config, layout, CPU_ONLY)
    (model / "more.safetensors").touch()
    os.truncate(model / "more.safetensors", size - (model / "model.safetensors").stat().st_size)
    plan.__dict__["checkpoint_identity"] = "sha256:0"  # which nobody reads here
    prepare_engine(config, layout, lines.append, plan=plan)
    assert ("reading 2.0 GB of weights to identify the checkpoint" in lines) is told


def test_a_check_before_compiling_may_prevent_it(model: Path, compiling: Compiling) -> None:
    def prepare(before_compiling: Callable[[], object]) -> None:
        config, layout = configured(engine_cache_dir=model.parent / "cache"), inspect(model)
        plan = plan_engine(config, layout, CPU_ONLY)
        prepare_engine(config, layout, lambda line: None, plan=plan, before_compiling=before_compiling)

    def refuse() -> None:
        raise TokenizerError("of another model")

    with pytest.raises(TokenizerError):
        prepare(refuse)
    assert not compiling.calls
    prepare(lambda: None)
    prepare(refuse)
    assert len(compiling.calls) == 1


def test_of_a_fleet_one_machine_compiles(model: Path, compiling: Compiling, store: Store, tmp_path: Path) -> None:
    lines: list[str] = []
    for machine in ("a", "b"):
        config = configured(engine_cache_dir=tmp_path / machine, engine_cache="s3://models/engines")
        layout = inspect(model)
        plan = plan_engine(config, layout, CPU_ONLY)
        engine = prepare_engine(config, layout, lines.append, plan=plan)
        assert engine.path.parent == tmp_path / machine and engine.manifest is not None
    assert len(compiling.calls) == 1
    assert any("downloaded the engine from s3://models/engines/" in line for line in lines)


def test_the_wait_for_a_fleet_is_the_option_s(
    model: Path, compiling: Compiling, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from djl_trtllm.engines import fleet_cache

    asked: list[tuple[object, object]] = []

    class Fleet:
        def __init__(self, address: object, *, wait_seconds: float) -> None:
            asked.append((str(address), wait_seconds))

        def provide(self, key: str, out: Path, build: Callable[[Path], None], progress: object) -> None:
            asked.append((key, out.name))
            build(out)

    monkeypatch.setattr(fleet_cache, "FleetCache", Fleet)
    config = configured(
        engine_cache_dir=model.parent / "cache", engine_cache="s3://models/engines", engine_cache_wait=77
    )
    layout = inspect(model)
    plan = plan_engine(config, layout, CPU_ONLY)
    prepare_engine(config, layout, lambda line: None, plan=plan)
    assert asked == [("s3://models/engines", 77), (plan.cache_key, plan.cache_key)]


def test_scripted_loads_no_engine(model: Path) -> None:
    assert prepared(model, backend="scripted").backend == "scripted"
