from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.config import load
from djl_trtllm.config.options.option import Scope
from djl_trtllm.config.options.registry import OPTIONS
from djl_trtllm.config.sources.environment import IGNORED_VARIABLES, option_key, serving_key, variables_of
from djl_trtllm.errors import ConfigError


@pytest.mark.parametrize(
    ("variable", "key"),
    [
        ("OPTION_MAX_INPUT_LEN", "option.max_input_len"),
        ("OPTION_KEY2", "option.key2"),
        ("OPTION_modelName", "option.modelName"),
        ("OPTION_ENTRYPOINT", "option.entryPoint"),
        ("OPTION_entryPoint", "option.entryPoint"),
        ("OPTION_ENGINE", "engine"),
    ],
)
def test_option_variables_follow_djls_rule(variable: str, key: str) -> None:
    assert option_key(variable) == key


def test_serving_variables_are_bare_keys_in_lower_case() -> None:
    assert serving_key("SERVING_JOB_QUEUE_SIZE") == "job_queue_size"
    assert serving_key("SERVING_MIN_WORKERS") == "minWorkers"


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"HF_MODEL_ID": "gpt2"}, "model_id", "gpt2"),
        ({"HF_REVISION": "v1"}, "revision", "v1"),
        ({"HF_TASK": "text-generation"}, "task", "text-generation"),
        ({"SM_NUM_GPUS": "4"}, "tensor_parallel_degree", 4),
        ({"MAX_CONCURRENT_REQUESTS": "5"}, "job_queue_size", 5),
        ({"PYTHON_EXECUTABLE": "python3"}, "python_executable", "python3"),
        ({"DJL_CLUSTER_SIZE": "2"}, "cluster_size", 2),
        ({"SAGEMAKER_HEALTH_CHECK_OVERRIDE": "true"}, "health_check_override", True),
        ({"SERVING_HEALTH_CHECK_OVERRIDE": "true"}, "health_check_override", True),
        ({"SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "text/csv"}, "default_accept", "text/csv"),
        ({"SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "9"}, "predict_timeout", 9.0),
        ({"SERVING_DOWNLOAD_DIR": "/d"}, "download_dir", Path("/d")),
        ({"DJL_CACHE_DIR": "/d"}, "cache_dir", Path("/d")),
        ({"SERVING_FEATURES": "trtllm"}, "features", "trtllm"),
        ({"SERVING_PROMETHEUS": "true"}, "prometheus", True),
        ({"SERVING_OPTS": "-Dx"}, "opts", "-Dx"),
        ({"TENSOR_PARALLEL_DEGREE": "max"}, "tensor_parallel_degree", "max"),
        ({"PIPELINE_PARALLEL_DEGREE": "2"}, "pipeline_parallel_degree", 2),
        ({"PREDICT_TIMEOUT": "9"}, "predict_timeout", 9.0),
        ({"MODEL_LOADING_TIMEOUT": "9"}, "model_loading_timeout", 9.0),
        ({"DJL_ENTRY_POINT": "m"}, "entry_point", "m"),
        ({"SAGEMAKER_STARTUP_TIMEOUT": "9"}, "model_loading_timeout", 9.0),
        ({"SAGEMAKER_BIND_TO_PORT": "9"}, "port", 9),
        ({"SAGEMAKER_MAX_REQUEST_SIZE": "9"}, "max_request_size", 9),
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6"}, "max_request_size", 6 * 1024 * 1024),
        ({"SAGEMAKER_NUM_MODEL_WORKERS": "2"}, "min_workers", 2),
        ({"SAGEMAKER_NUM_MODEL_WORKERS": "2"}, "max_workers", 2),
        ({"HF_MODEL_QUANTIZE": "awq"}, "quantize", "awq"),
        ({"HF_MODEL_TRUST_REMOTE_CODE": "true"}, "trust_remote_code", True),
        ({"MAX_BATCH_SIZE": "9"}, "max_rolling_batch_size", 9),
        ({"CUDA_MEMORY_FRACTION": "0.5"}, "kv_cache_free_gpu_mem_fraction", 0.5),
        ({"SERVING_FAIL_FAST": "true"}, "fail_fast", True),
        ({"SERVING_RETRY_THRESHOLD": "0"}, "retry_threshold", 0),
        ({"SERVING_SHUTDOWN_TIMEOUT": "1"}, "shutdown_timeout", 1.0),
    ],
)
def test_each_variable_sets_its_option(environ: dict[str, str], field: str, value: object) -> None:
    config = load(None, environ)
    assert getattr(config.options, field) == value
    assert config.origin(field).where == next(iter(environ))
    assert config.warnings == ()


def test_a_request_size_in_bytes_counts_before_one_in_megabytes() -> None:
    environ = {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6", "SAGEMAKER_MAX_REQUEST_SIZE": "9"}
    assert load(None, environ).options.max_request_size == 9


@pytest.mark.parametrize("text", ["six", "0", "-1", "1.5"])
def test_megabytes_that_are_no_number_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"SAGEMAKER_MAX_PAYLOAD_IN_MB={text}"):
        load(None, {"SAGEMAKER_MAX_PAYLOAD_IN_MB": text})


def test_empty_variables_are_skipped() -> None:
    config = load(None, {"OPTION_MAX_INPUT_LEN": "", "SERVING_JOB_QUEUE_SIZE": " ", "HF_MODEL_ID": ""})
    assert not config.user_set and not config.warnings


def test_zero_gpus_do_not_set_a_parallel_degree() -> None:
    config = load(None, {"SM_NUM_GPUS": "0"})
    assert config.options.tensor_parallel_degree == 1
    assert config.warnings == (
        "SM_NUM_GPUS=0 means that there is no GPU, and does not set option.tensor_parallel_degree",
    )
    assert load(None, {"SM_NUM_GPUS": " 0 "}).warnings != ()


def test_a_memory_fraction_meant_for_another_library_is_said() -> None:
    config = load(None, {"CUDA_MEMORY_FRACTION": "0.5", "SERVING_FEATURES": "VLLM"})
    assert config.options.kv_cache_free_gpu_mem_fraction is None
    assert config.warnings == (
        "CUDA_MEMORY_FRACTION=0.5 has no effect: with SERVING_FEATURES=vllm it configures another library; "
        "set OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION",
    )
    for features in ("trtllm", "vllm,TRTLLM"):
        config = load(None, {"CUDA_MEMORY_FRACTION": "0.5", "SERVING_FEATURES": features})
        assert config.options.kv_cache_free_gpu_mem_fraction == 0.5


def test_a_translated_variable_without_a_counterpart_is_answered_with_what_replaces_it() -> None:
    (warning,) = load(None, {"MAX_BATCH_PREFILL_TOKENS": "9"}).warnings
    assert warning.startswith("MAX_BATCH_PREFILL_TOKENS=9 (environment) has no effect any more")
    assert "option.max_num_tokens" in warning


@pytest.mark.parametrize(("text", "eager"), [("true", False), ("TRUE", False), ("false", True), ("1", True)])
def test_cuda_graphs_are_the_opposite_of_eager(text: str, eager: bool) -> None:
    assert load(None, {"ENABLE_CUDA_GRAPHS": text}).options.enforce_eager is eager


def test_variables_of_the_container_are_answered_by_name() -> None:
    config = load(None, dict.fromkeys(IGNORED_VARIABLES, "x"))
    assert config.warnings == () and not config.user_set
    assert list(config.notes) == [f"{name} has no effect: {why}" for name, why in IGNORED_VARIABLES.items()]
    assert len(config.notes) > 15
    assert len(load(None, {"JAVA_OPTS": "-Xmx1g"}).notes) == 1


def test_the_page_lists_them() -> None:
    page = (Path(__file__).parents[3] / "docs" / "options" / "legacy.md").read_text(encoding="utf-8")
    rows = page.partition("## Variables without effect")[2].partition("\n## ")[0]
    assert [name for name, why in IGNORED_VARIABLES.items() if f"| `{name}` | {why} |" not in rows] == []


@pytest.mark.parametrize(
    ("key", "variables"),
    [
        ("option.max_input_len", ("OPTION_MAX_INPUT_LEN",)),
        ("option.entryPoint", ("OPTION_ENTRYPOINT", "DJL_ENTRY_POINT")),
        ("option.modelName", ("OPTION_MODELNAME",)),
        ("engine", ("OPTION_ENGINE",)),
        ("job_queue_size", ("SERVING_JOB_QUEUE_SIZE", "MAX_CONCURRENT_REQUESTS")),
        ("minWorkers", ("SERVING_MIN_WORKERS", "SAGEMAKER_NUM_MODEL_WORKERS")),
        (
            "max_request_size",
            ("SERVING_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_PAYLOAD_IN_MB"),
        ),
        ("option.model_id", ("OPTION_MODEL_ID", "HF_MODEL_ID")),
        (
            "option.tensor_parallel_degree",
            ("OPTION_TENSOR_PARALLEL_DEGREE", "TENSOR_PARALLEL_DEGREE", "SM_NUM_GPUS"),
        ),
        ("cache_dir", ("SERVING_CACHE_DIR", "DJL_CACHE_DIR")),
    ],
)
def test_the_variables_of_a_key_are_all_that_set_it_the_one_to_prefer_first(
    key: str, variables: tuple[str, ...]
) -> None:
    assert variables_of(key) == variables


def test_a_translated_value_is_shown_as_it_was_written() -> None:
    megabytes = load(None, {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6", "SERVING_MAX_REQUEST_SIZE": "9"})
    assert megabytes.warnings == (
        "SERVING_MAX_REQUEST_SIZE=9 is overridden by SAGEMAKER_MAX_PAYLOAD_IN_MB=6 (environment)",
    )
    graphs = load(None, {"ENABLE_CUDA_GRAPHS": "yes", "OPTION_ENFORCE_EAGER": "false"})
    assert any(line.startswith("ENABLE_CUDA_GRAPHS=yes is overridden") for line in graphs.warnings)


def test_arguments_variables_set_bare_keys() -> None:
    assert load(None, {"ARGS_BATCH_SIZE": "2"}).options.batch_size == 2
    assert load(None, {"ARGS_MINWORKERS": "2", "ARGS_NO_OPTION": "x"}).warnings == ()


def test_foreign_variables_are_left_alone() -> None:
    assert load(None, {"PATH": "/bin", "HF_TOKEN": "x", "SAGEMAKER_REGION": "eu"}).warnings == ()


def test_every_option_but_the_operators_can_be_set_by_its_first_variable() -> None:
    variables = {name: variables_of(declared.key)[0] for name, declared in OPTIONS.items()}
    assert len(set(variables.values())) == len(OPTIONS)
    values = {
        name: declared.example if declared.option.scope is not Scope.OPERATOR else "true"
        for name, declared in OPTIONS.items()
    }
    assert [
        variable for name, variable in variables.items() if load(None, {variable: values[name]}).user_set != {name}
    ] == []
