from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from djl_trtllm.config import load
from djl_trtllm.engine import EngineDir, Manifest, compile_checkpoint
from djl_trtllm.engine import build as build_module
from djl_trtllm.errors import BuildError, EngineError

from .helpers import configured, write_engine_files


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, fake_compiler: Callable[..., list[str]]) -> list[str]:
    """Replace the compiler by a fake; the list's one word is what the fake does."""
    behaviour = ["succeed"]

    def build(plan: object, out: Path, progress: object) -> EngineDir:
        return build_module.build_engine(plan, out, progress, command=fake_compiler(*behaviour))  # type: ignore[arg-type]

    monkeypatch.setattr("djl_trtllm.engine.compilation.build_engine", build)
    return behaviour


@pytest.mark.usefixtures("compiler")
def test_the_output_has_a_serving_properties_that_serves_it(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = configured(quantize="int8", max_rolling_batch_size=8, enable_kv_cache_reuse="true")
    engine = compile_checkpoint(config, model, out)
    assert engine.path == out
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(("out", ".out"))] == ["out"]
    served = load(out, {})
    assert served.options.backend == "openvino"
    assert served.options.quantize == "int8"
    assert served.options.dtype == "fp16"
    assert served.options.max_rolling_batch_size == 8
    assert served.options.enable_kv_cache_reuse is True
    assert not served.is_set("max_num_tokens")
    assert not served.warnings


@pytest.mark.usefixtures("compiler")
def test_a_directory_with_something_else_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letters.txt").write_text("dear")
    with pytest.raises(EngineError, match="is not empty and is not an engine"):
        compile_checkpoint(configured(), model, tmp_path / "out")
    with pytest.raises(EngineError, match="is not empty and is not an engine"):
        compile_checkpoint(configured(), model, model)


@pytest.mark.usefixtures("compiler")
def test_an_engine_of_another_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    compile_checkpoint(configured(), model, tmp_path / "out")
    (model / "generation_config.json").write_text("{}")
    with pytest.raises(EngineError, match=r"holds another engine \(checkpoint: engine was made from"):
        compile_checkpoint(configured(), model, tmp_path / "out")


def test_the_same_engine_is_kept(model: Path, tmp_path: Path, compiler: list[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    compile_checkpoint(configured(), model, out)
    (out / "serving.properties").write_text("option.max_rolling_batch_size=4")
    compiler[0] = "fail"
    told: list[str] = []
    compile_checkpoint(configured(), model, out, told.append)
    assert told == [f"{out} is up to date"]
    assert (out / "serving.properties").read_text() == "option.max_rolling_batch_size=4"


def test_other_options_or_damage_replace_the_engine_and_a_failure_leaves_it(
    model: Path, tmp_path: Path, compiler: list[str]
) -> None:
    out = tmp_path / "out"
    compile_checkpoint(configured(), model, out)
    compiler[0] = "fail"
    with pytest.raises(BuildError):
        compile_checkpoint(configured(quantize="int8"), model, out)
    manifest = Manifest.read(out)
    assert manifest is not None and manifest.verify(out) == []
    compiler[0] = "succeed"
    compile_checkpoint(configured(quantize="int8"), model, out)
    manifest = Manifest.read(out)
    assert manifest is not None and manifest.options["quantize"] == "int8"
    assert load(out, {}).options.quantize == "int8"
    (out / "openvino_model.bin").write_bytes(b"")
    compile_checkpoint(configured(quantize="int8"), model, out)
    assert manifest.verify(out) == []


def test_an_engine_is_not_compiled_again(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is a compiled OpenVINO engine: there is nothing to compile"):
        compile_checkpoint(configured(), write_engine_files(tmp_path / "engine"), tmp_path / "out")
