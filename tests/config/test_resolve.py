from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.config import (
    Layer,
    OriginKind,
    Setting,
    Source,
    load,
    resolve,
)
from djl_trtllm.config.options.option import Scope
from djl_trtllm.config.options.registry import OPTIONS
from djl_trtllm.config.resolve import precedence
from djl_trtllm.config.sources.origin import Origin
from djl_trtllm.errors import ConfigError
from tests.config.helpers import from_text, problems_of


def test_file_beats_environment() -> None:
    config = from_text("option.max_input_len=256", {"OPTION_MAX_INPUT_LEN": "512"})
    assert config.options.max_input_len == 256
    assert config.origin("max_input_len") == Origin.file("serving.properties", 1)
    assert [setting.shown for setting in config.overridden["max_input_len"]] == ["OPTION_MAX_INPUT_LEN=512"]


def test_sagemaker_variables_beat_the_file() -> None:
    config = from_text("option.predict_timeout=10", {"SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "50"})
    assert config.options.predict_timeout == 50
    assert config.origin("predict_timeout") == Origin.environment("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS")


def test_a_models_file_beats_the_server_level_for_the_models_own_keys() -> None:
    assert from_text("job_queue_size=7", {"SERVING_JOB_QUEUE_SIZE": "8"}).options.job_queue_size == 7
    assert from_text("", {"SERVING_JOB_QUEUE_SIZE": "8"}, server="job_queue_size=9").options.job_queue_size == 8


def test_the_operator_beats_a_models_file_for_the_servers_keys() -> None:
    config = from_text("inference_port=1", {"SERVING_INFERENCE_PORT": "2"}, server="inference_port=3")
    assert config.options.port == 2
    assert from_text("inference_port=1", server="inference_port=3").options.port == 3
    assert from_text("inference_port=1").options.port == 1


def test_a_variable_of_another_server_counts_only_where_its_target_is_not_set() -> None:
    assert from_text("", {"SM_NUM_GPUS": "4"}).options.tensor_parallel_degree == 4
    environ = {"SM_NUM_GPUS": "4", "TENSOR_PARALLEL_DEGREE": "2"}
    assert from_text("", environ).options.tensor_parallel_degree == 2
    assert from_text("option.tensor_parallel_degree=max", environ).options.tensor_parallel_degree == "max"
    assert from_text("", {"MAX_CONCURRENT_REQUESTS": "5"}).options.job_queue_size == 5


def test_the_command_line_beats_everything(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.predict_timeout=1\n")
    environ = {"SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "2"}
    config = load(tmp_path, environ, arguments=["predict_timeout=3", "job_queue_size=4"])
    assert (config.options.predict_timeout, config.options.job_queue_size) == (3, 4)
    assert str(config.origin("predict_timeout")) == "command line"


def test_the_precedence_table_in_the_docstring_is_the_function() -> None:
    words = {
        Layer.ARGUMENTS: "command line",
        Layer.SAGEMAKER: "SageMaker variables",
        Layer.NAMED_MODEL: "HF_MODEL_ID and HF_REVISION",
        Layer.FILE: "serving.properties",
        Layer.OPTION: "OPTION_* variables",
        Layer.SERVING: "SERVING_* variables",
        Layer.PLAIN: "plain variables",
        Layer.TRANSLATED: "variables of other servers",
        Layer.SERVER_FILE: "config.properties",
        Layer.FOREIGN: "config.pbtxt, config.yaml",
        Layer.PRESET: "presets of Triton and Truss",
    }
    rows = [re.split(r"\s{2,}", line.strip()) for line in (precedence.__doc__ or "").splitlines()]
    ranked = [row for row in rows if row[0].isdigit()]
    for column, scope in ((1, Scope.MODEL), (2, Scope.SERVER), (3, Scope.OPERATOR)):
        cells = [row[column] for row in ranked if len(row) > column]
        assert cells == [words[layer] for layer in precedence(scope)]


@pytest.mark.parametrize("variable", ["OPTION_TRUST_REMOTE_CODE", "HF_MODEL_TRUST_REMOTE_CODE"])
def test_the_operator_takes_back_what_a_model_allows_itself(tmp_path: Path, variable: str) -> None:
    (tmp_path / "serving.properties").write_text("option.trust_remote_code=true\n")
    assert load(tmp_path, {}).options.trust_remote_code
    config = load(tmp_path, {variable: "false"})
    assert not config.options.trust_remote_code
    assert variable in str(config.origin("trust_remote_code"))
    assert any("option.trust_remote_code=true" in warning for warning in config.warnings)


def test_files_of_a_model_come_last_for_permissions() -> None:
    order = precedence(Scope.PERMISSION)
    assert order[-3:] == (Layer.FILE, Layer.FOREIGN, Layer.PRESET)
    assert set(order) == set(precedence(Scope.MODEL))


def test_the_environment_a_command_line_a_directory_and_the_servers_file_are_read(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "serving.properties").write_text("option.max_input_len=1\n")
    server = tmp_path / "config.properties"
    server.write_text("inference_address=http://127.0.0.1:81\njob_queue_size=4\n")
    config = load(model, {"OPTION_MAX_OUTPUT_LEN": "2"}, arguments=["max_seq_len=3"], server_properties=server)
    options = config.options
    assert (options.max_input_len, options.max_output_len, options.max_seq_len) == (1, 2, 3)
    assert (options.job_queue_size, options.port) == (4, 81)
    assert str(config.origin("job_queue_size")) == f"{server}:2"
    assert config.model_dir == model


def test_nothing_at_all_is_the_defaults() -> None:
    config = load(None, {})
    assert config == resolve([])
    assert config.model_dir is None and config.user_set == frozenset()
    assert {origin.kind for origin in config.origins.values()} == {OriginKind.DEFAULT}


def test_a_configuration_file_stands_for_its_directory(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.max_input_len=1\n")
    assert load(tmp_path / "serving.properties", {}) == load(tmp_path, {})


def test_the_repository_that_model_id_names_counts_last_of_its_layer(tmp_path: Path) -> None:
    for name, length in (("here", 1), ("there", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(f"name: 'tensorrt_llm' max_batch_size: {length}\n")
    (tmp_path / "there" / "serving.properties").write_text("option.max_input_len=3\n")
    config = load(tmp_path / "here", {"OPTION_MODEL_ID": "../there"})
    assert config.model_dir == tmp_path / "here"
    assert config.options.max_rolling_batch_size == 1
    assert config.options.max_input_len == 1024
    (tmp_path / "here" / "config.pbtxt").unlink()
    config = load(tmp_path / "here", {"OPTION_MODEL_ID": "../there"})
    assert config.model_dir == tmp_path / "here"
    assert config.options.max_rolling_batch_size == 2
    assert load(None, {"OPTION_MODEL_ID": str(tmp_path / "there")}).options.max_rolling_batch_size == 2


@pytest.mark.parametrize("key", ["install_requirements", "option.install_requirements"])
@pytest.mark.parametrize("value", ["true", "false"])
def test_a_model_cannot_install_its_requirements_by_itself(key: str, value: str) -> None:
    (problem,) = problems_of(f"{key}={value}")
    assert "SERVING_INSTALL_REQUIREMENTS" in problem


def test_the_operator_can_install_requirements_by_one_variable_only() -> None:
    assert from_text("", {"SERVING_INSTALL_REQUIREMENTS": "true"}).options.install_requirements is True
    assert "SERVING_INSTALL_REQUIREMENTS" in problems_of("", {"OPTION_INSTALL_REQUIREMENTS": "true"})[0]
    assert not OPTIONS["install_requirements"].default


_keys = st.sampled_from([spelling for declared in OPTIONS.values() for spelling in declared.spellings])
_values = st.one_of(
    st.text(max_size=12),
    st.integers(-10, 10**7).map(str),
    st.sampled_from(
        ["true", "none", "max", "auto", "int8", "0.5", "1e5", "8 # comment", "\0", "http://[::1", "~nobody"]
    ),
)
_settings = st.lists(st.tuples(_keys | st.text(max_size=12), _values), max_size=6)


@given(by_layer=st.dictionaries(st.sampled_from(list(Layer)), _settings))
def test_resolve_raises_config_error_or_gives_every_value_an_origin(
    by_layer: dict[Layer, list[tuple[str, str]]],
) -> None:
    sources = [
        Source(layer, tuple(Setting(key, value, Origin.file("f", 1), key) for key, value in pairs))
        for layer, pairs in by_layer.items()
    ]
    try:
        config = resolve(sources)
    except ConfigError as error:
        assert error.problems
        return
    assert set(config.origins) == set(OPTIONS)
    for name, declared in OPTIONS.items():
        origin = config.origin(name)
        if origin.kind is OriginKind.DEFAULT:
            assert getattr(config.options, name) == declared.default
        assert declared.type.check(getattr(config.options, name), declared.option) == getattr(config.options, name)
    assert resolve(sources) == config


@given(st.dictionaries(st.text(min_size=1, max_size=12).map(lambda rest: f"OPTION_{rest}"), _values, max_size=5))
def test_any_environment_resolves_or_is_refused(environ: dict[str, str]) -> None:
    try:
        load(None, environ)
    except ConfigError as error:
        assert error.problems
