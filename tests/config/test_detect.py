from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from djl_trtllm.cli import app
from djl_trtllm.config import Layer, load, names_configuration, read_source
from djl_trtllm.errors import ConfigError

OLD = Path(__file__).parent / "old"
TRITON = OLD / "triton_llama_workflow" / "model"
TRUSS = OLD / "truss_trt_llm_build" / "model"


def test_a_directory_with_properties_is_one_source() -> None:
    (source,) = read_source(OLD / "lmi_025_llama2_13b" / "model")
    assert source.layer is Layer.FILE and source.settings


def test_a_directory_with_nothing_is_one_empty_source(tmp_path: Path) -> None:
    (source,) = read_source(tmp_path)
    assert source.settings == () and source.problems == ()


def test_a_triton_repository_is_read_model_by_model() -> None:
    layers = [source.layer for source in read_source(TRITON)]
    assert layers == [Layer.FILE, *[Layer.DIALECT] * 5, Layer.PRESET]


def test_one_model_of_a_repository_is_a_directory_too() -> None:
    assert load(TRITON / "tensorrt_llm", {}).options.kv_cache_free_gpu_mem_fraction == 0.9


@pytest.mark.parametrize(
    ("path", "option", "value"),
    [
        (TRITON / "tensorrt_llm" / "config.pbtxt", "max_rolling_batch_size", 256),
        (TRUSS / "config.yaml", "calib_size", 1024),
        (OLD / "lmi_026_gptj_6b" / "model" / "serving.properties", "rotary_dim", 64),
    ],
)
def test_a_file_may_be_named_itself(path: Path, option: str, value: object) -> None:
    assert names_configuration(path)
    config = load(path, {})
    assert getattr(config.options, option) == value
    assert config.model_dir == path.parent


def test_a_directory_or_an_archive_is_no_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "model.tar.gz").touch()
    assert not names_configuration(tmp_path) and not names_configuration(tmp_path / "model.tar.gz")


def test_properties_beat_a_config_pbtxt_beside_them() -> None:
    config = load(OLD / "lmi_031_precompiled_repository" / "model", {})
    assert config.options.kv_cache_free_gpu_mem_fraction == 0.85
    assert [setting.shown for setting in config.overridden["kv_cache_free_gpu_mem_fraction"]] == [
        "kv_cache_free_gpu_mem_fraction=0.95"
    ]


def test_a_variable_of_this_server_beats_another_servers_file() -> None:
    assert load(TRITON, {"OPTION_MAX_ROLLING_BATCH_SIZE": "8"}).options.max_rolling_batch_size == 8
    assert load(TRUSS, {"OPTION_BACKEND": "openvino"}).options.backend == "openvino"


def test_the_triton_repository_inside_a_truss_is_read() -> None:
    config = load(OLD / "truss_engine_with_repository" / "model", {})
    assert config.options.max_tokens_in_paged_kv_cache == 100000
    assert str(config.origin("max_tokens_in_paged_kv_cache")).endswith("tensorrt_llm/config.pbtxt:28")


def test_a_config_yaml_of_another_program_beside_a_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("encoder:\n  layers: 12\n")
    assert load(tmp_path, {}).warnings == ()
    with pytest.raises(ConfigError, match=r"no config\.yaml of Truss"):
        load(tmp_path / "config.yaml", {})


@pytest.mark.parametrize("name", ["config.pbtxt", "config.yaml"])
def test_a_file_that_is_not_there_or_not_text_is_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(path, {})
    path.write_bytes(b"model_metadata: \xff\xfe")
    with pytest.raises(ConfigError, match="save it as UTF-8"):
        load(path, {})


@pytest.mark.parametrize("source", [TRITON, TRITON / "tensorrt_llm" / "config.pbtxt", TRUSS, TRUSS / "config.yaml"])
def test_the_command_shows_each(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJL_CACHE_DIR", "/nonexistent")
    result = CliRunner().invoke(app, ["config", str(source), "--json"])
    assert result.exit_code == 0, result.output
    options = json.loads(result.stdout)["options"]
    assert options["max_rolling_batch_size"]["value"] == 256
