"""The engine backend: the bundled model compiled, ahead of time and on the first start, and served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trtllm.conftest import START_SECONDS, Installation, MakeModel, ask, run_cli, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_SECONDS)]


@pytest.fixture(autouse=True)
def _engine_backend(installation: Installation) -> None:
    if not installation.has("tensorrt"):
        pytest.skip(f"TensorRT-LLM {installation.version} has no engine backend")


def test_compile_writes_an_engine_directory(installation: Installation, compiled: Path) -> None:
    files = {path.name for path in compiled.iterdir()}
    assert {"config.json", "rank0.engine", "manifest.json", "serving.properties", "tokenizer.json"} <= files
    config = json.loads((compiled / "config.json").read_text())
    assert config["version"] == installation.version
    assert config["pretrained_config"]["mapping"]["world_size"] == 1
    build = config["build_config"]
    assert (build["max_batch_size"], build["max_seq_len"]) == (2, 1536)
    assert build["plugin_config"]["tokens_per_block"] == 64


def test_the_first_start_compiles_and_the_second_finds_the_engine(
    installation: Installation, make_model: MakeModel, tmp_path: Path
) -> None:
    own_cache = replace(installation, environ={**installation.environ, "DJL_CACHE_DIR": str(tmp_path / "cache")})
    model = make_model("tensorrt")
    with serving(own_cache, model) as first:
        answer = ask(first, "once upon a time", max_new_tokens=16).json()
    (engine,) = (tmp_path / "cache").rglob("rank0.engine")
    written = engine.stat().st_mtime_ns
    with serving(own_cache, model) as second:
        assert ask(second, "once upon a time", max_new_tokens=16).json() == answer
    assert list((tmp_path / "cache").rglob("rank0.engine")) == [engine]
    assert engine.stat().st_mtime_ns == written


def test_weights_quantised_without_calibration_are_served(
    installation: Installation, make_model: MakeModel, tmp_path: Path
) -> None:
    out = tmp_path / "int8"
    result = run_cli(installation, "compile", str(make_model("tensorrt", quantize="int8")), str(out))
    assert result.returncode == 0, result.stderr
    config = json.loads((out / "config.json").read_text())
    assert config["pretrained_config"]["quantization"]["quant_algo"] == "W8A16"
    with serving(installation, out) as server:
        assert ask(server, "once upon a time", max_new_tokens=16).status_code == 200
