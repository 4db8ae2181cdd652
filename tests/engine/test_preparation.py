"""What is served: as it is, bundled, cached. Nothing here compiles for real."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from djl_trtllm.engine import EngineDir, Manifest, plan_engine, prepare
from djl_trtllm.engine.compiler import Compiler
from djl_trtllm.errors import CompilerMissingError, EngineMismatchError
from djl_trtllm.model import inspect

from .helpers import CPU_ONLY, configured, write_engine_files


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
    return prepare(config, layout, (told if told is not None else []).append, plan=plan)


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
def test_a_bundled_engine_that_does_not_fit_is_told_and_not_used(model: Path, change: str) -> None:
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
def test_a_bundled_engine_without_a_manifest_is_used_unless_options_were_asked_for(model: Path) -> None:
    path = bundle(model, manifest=False)
    told: list[str] = []
    assert prepared(model, told).path == path
    assert told == [f"the bundled engine {path} has no manifest and is used unchecked"]
    with pytest.raises(CompilerMissingError, match=r"nothing says whether it was compiled with option\.quantize=int8"):
        prepared(model, quantize="int8")


def test_scripted_loads_no_engine(model: Path) -> None:
    assert prepared(model, backend="scripted").backend == "scripted"
