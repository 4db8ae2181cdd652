from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.config import load, names_configuration
from djl_trtllm.config.compat import detect
from djl_trtllm.config.compat.detect import read_model, read_source
from djl_trtllm.config.compat.foreign_format import ForeignSetting, Reading, presets
from djl_trtllm.config.sources import MASK, Ignored, Layer, Origin, Setting, Source
from djl_trtllm.errors import ConfigError

OLD = Path(__file__).parents[1] / "old"
TRITON = OLD / "triton_llama_workflow" / "model"
TRUSS = OLD / "truss_trt_llm_build" / "model"


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


def test_properties_beat_a_config_pbtxt_beside_them() -> None:
    config = load(OLD / "lmi_031_precompiled_repository" / "model", {})
    assert config.options.kv_cache_free_gpu_mem_fraction == 0.85
    assert [setting.assignment for setting in config.overridden["kv_cache_free_gpu_mem_fraction"]] == [
        "kv_cache_free_gpu_mem_fraction=0.95"
    ]


def test_the_triton_repository_inside_a_truss_is_read() -> None:
    config = load(OLD / "truss_engine_with_repository" / "model", {})
    assert config.options.max_tokens_in_paged_kv_cache == 100000
    assert str(config.origin("max_tokens_in_paged_kv_cache")).endswith("tensorrt_llm/config.pbtxt:28")


def test_a_config_yaml_of_another_program_beside_a_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("encoder:\n  layers: 12\n")
    assert load(tmp_path, {}).warnings == ()
    with pytest.raises(ConfigError, match=r"no config\.yaml of Truss"):
        load(tmp_path / "config.yaml", {})


PBTXT = """
name: "tensorrt_llm"
max_batch_size: 16
parameters { key: "kv_cache_free_gpu_mem_fraction" value: { string_value: "0.7" } }
parameters { key: "gpt_model_path" value: { string_value: "/opt/ml/model/tensorrt_llm/1" } }
parameters { key: "executor_worker_path" value: { string_value: "/opt/worker" } }
"""


def lmi_repository(root: Path, name: str = "tensorrt_llm") -> Path:
    """The configuration of the LMI document's repository in a folder `name`; its engine is not looked at."""
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(PBTXT)
    return root


@pytest.mark.parametrize("folder", [".", "tensorrt_llm"])
def test_an_lmi_repository_is_configuration_from_above_and_from_within(tmp_path: Path, folder: str) -> None:
    config = load(lmi_repository(tmp_path) / folder, {})
    assert config.options.kv_cache_free_gpu_mem_fraction == 0.7
    assert str(config.origin("kv_cache_free_gpu_mem_fraction")) == f"{tmp_path}/tensorrt_llm/config.pbtxt:4"
    assert config.options.max_rolling_batch_size == 16 and config.options.model_id is None


@pytest.mark.parametrize("model_id", ["engines", "engines/tensorrt_llm", "engines/llama", "{root}/engines"])
def test_so_it_is_where_option_model_id_names_it(tmp_path: Path, model_id: str) -> None:
    folder = model_id.removeprefix("engines/") if "/l" in model_id else "tensorrt_llm"
    lmi_repository(tmp_path / "engines", folder)
    (tmp_path / "serving.properties").write_text(f"option.model_id={model_id.format(root=tmp_path)}\n")
    config = load(tmp_path, {})
    assert config.options.kv_cache_free_gpu_mem_fraction == 0.7
    assert str(config.origin("max_rolling_batch_size")).endswith(f"engines/{folder}/config.pbtxt:3")
    assert load(tmp_path / "serving.properties", {}).options == config.options


def test_properties_and_variables_beat_the_repository_that_is_named(tmp_path: Path) -> None:
    lmi_repository(tmp_path / "engines")
    (tmp_path / "serving.properties").write_text("option.model_id=engines\noption.max_rolling_batch_size=8\n")
    config = load(tmp_path, {"OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION": "0.5"})
    assert (config.options.max_rolling_batch_size, config.options.kv_cache_free_gpu_mem_fraction) == (8, 0.5)
    assert any("max_batch_size=16 is overridden" in warning for warning in config.warnings)


def test_a_repository_that_is_named_and_here_is_read_once(tmp_path: Path) -> None:
    lmi_repository(tmp_path)
    (tmp_path / "serving.properties").write_text("option.model_id=tensorrt_llm\n")
    config = load(tmp_path, {})
    assert config.options.max_rolling_batch_size == 16
    assert [note for note in config.notes if "executor_worker_path" in note] == list(config.notes)
    assert len(config.notes) == 1
    assert [setting.value for setting in config.overridden.get("max_rolling_batch_size", ())] == []


def test_what_is_wrong_in_the_repository_that_is_named_is_reported(tmp_path: Path) -> None:
    (lmi_repository(tmp_path / "engines") / "tensorrt_llm" / "config.pbtxt").write_text("max_batch_size: many")
    with pytest.raises(ConfigError, match=r"max_batch_size=many \(.*engines/tensorrt_llm/config\.pbtxt:1\)"):
        load(None, {"OPTION_MODEL_ID": str(tmp_path / "engines")})


@pytest.mark.parametrize("model_id", ["meta-llama/Llama-3.1-8B", "s3://bucket/model", "x" * 5000, "a\0b"])
def test_a_model_that_is_no_directory_here_brings_no_configuration(tmp_path: Path, model_id: str) -> None:
    assert read_model(tmp_path, model_id) == read_model(None, model_id) == []


TRUSS_YAML = "model_metadata:\n  engine_repository: org/engine\n"


@pytest.mark.parametrize("name", ["config.yaml", "other.yaml", "other.yml", "config.pbtxt", "other.properties"])
def test_a_configuration_file_is_known_by_the_end_of_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert not names_configuration(path)
    path.write_text("")
    assert names_configuration(path)
    (tmp_path / "folder" / name).mkdir(parents=True)
    assert not names_configuration(tmp_path / "folder" / name)
    assert not names_configuration(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "layers"),
    [
        ("x.pbtxt", "max_batch_size: 8", [Layer.FOREIGN, Layer.PRESET]),
        ("x.yaml", TRUSS_YAML, [Layer.FOREIGN, Layer.PRESET]),
        ("x.yml", TRUSS_YAML, [Layer.FOREIGN, Layer.PRESET]),
        ("x.properties", "a=1", [Layer.FILE]),
    ],
)
def test_a_file_is_read_by_the_end_of_its_name(tmp_path: Path, name: str, text: str, layers: list[Layer]) -> None:
    (tmp_path / name).write_text(text)
    sources = read_source(tmp_path / name)
    assert [source.layer for source in sources] == layers and sources[0].settings


def test_the_repository_of_a_truss_takes_the_place_of_its_presets(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(TRUSS_YAML)
    assert [source.layer for source in read_source(tmp_path)] == [Layer.FILE, Layer.FOREIGN, Layer.PRESET]
    repository = tmp_path / "packages" / "inflight_batcher_llm"
    for model in ("ensemble", "tensorrt_llm"):
        (repository / model).mkdir(parents=True)
        (repository / model / "config.pbtxt").write_text("max_batch_size: 8")
    for path in (tmp_path, tmp_path / "config.yaml"):
        layers = [source.layer for source in read_source(path)]
        assert layers[-3:] == [Layer.FOREIGN] * 3 and Layer.PRESET not in layers


def test_a_config_yaml_that_cannot_be_read_or_is_no_utf_8_is_looked_at_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_bytes(b"layers: \xff\n")
    assert len(read_source(tmp_path)) == 1
    (tmp_path / "config.yaml").write_text(TRUSS_YAML)

    def denied(path: Path, most: int) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(detect, "read_file", denied)
    assert len(read_source(tmp_path)) == 1


def test_an_entry_becomes_a_setting_or_an_answer() -> None:
    reading = Reading("f")
    reading.set("option.max_beam_width", ForeignSetting("max_beam_width", "2", 3))
    reading.set("option.batch_scheduler_policy", ForeignSetting("policy", "old", 4), "new")
    reading.set("option.dtype", ForeignSetting("dtype", "same", 5), "same")
    # Entries with one answer share a line.
    for name, value, line, reason in (
        ("a", "1", 3, "not"),
        ("b", "", 4, "else"),
        ("c", "2", 5, "not"),
        ("b", "", 6, "else"),
    ):
        reading.ignore(ForeignSetting(name, value, line), reason)
    reading.warn(ForeignSetting("a", "1", 2), "look out")
    reading.ignore(ForeignSetting("hf_token", "hunter2", 3), "set it elsewhere", act=True)
    reading.refuse(ForeignSetting("a", "1", 2), "expected 2")
    reading.unknown_setting(ForeignSetting("max_beem_width", "hunter2", 2), ["max_beam_width", "max_tokens"], "Triton")
    reading.unknown_setting(ForeignSetting("beam_wid", "hunter2", 3), ["max_beam_width"], "Triton")
    none = "it is not a setting of Triton and has no effect;"
    assert reading.source() == Source(
        Layer.FOREIGN,
        (
            Setting("option.max_beam_width", "2", Origin.file("f", 3), "max_beam_width", None, alone=True),
            Setting("option.batch_scheduler_policy", "new", Origin.file("f", 4), "policy", "old", alone=True),
            Setting("option.dtype", "same", Origin.file("f", 5), "dtype", None, alone=True),
        ),
        ("a=1 (f:2): look out", "f: hf_token (line 3): set it elsewhere"),
        ("a=1 (f:2): expected 2",),
        (
            "max_beem_width (f:2) is not a setting of Triton and has no effect; did you mean max_beam_width?",
            "beam_wid (f:3) is not a setting of Triton and has no effect; remove it, or set the option that you mean",
        ),
        ("f: a=1 (line 3), c=2 (line 5): not", "f: b (line 4): else"),
        (
            Ignored("hf_token", Origin.file("f", 3), "set it elsewhere"),
            Ignored("a=1", Origin.file("f", 3), "not"),
            Ignored("c=2", Origin.file("f", 5), "not"),
            Ignored("b", Origin.file("f", 4), "else"),
            Ignored("max_beem_width", Origin.file("f", 2), f"{none} did you mean max_beam_width?", unknown=True),
            Ignored(
                "beam_wid", Origin.file("f", 3), f"{none} remove it, or set the option that you mean", unknown=True
            ),
        ),
    )


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("hf_token", "hunter2", MASK), ("a", "x" * 60, "x" * 60), ("a", "x" * 61, "x" * 57 + "..."), ("a", "b\n", r"b\n")],
)
def test_an_entry_is_shown_with_secrets_masked_and_long_values_shortened(name: str, value: str, shown: str) -> None:
    assert ForeignSetting(name, value, 3).assignment == f"{name}={shown}"


def test_presets_are_derived_and_set_nothing_but_their_option() -> None:
    setting = Setting("option.x", "8", Origin.preset("Truss"), "option.x", alone=True)
    assert presets("Truss", {"option.x": "8"}) == Source(Layer.PRESET, (setting,))
