"""Plans of engines and checkpoints that TensorRT-LLM runs."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.tensorrt_llm.compiler import TensorRtLlmSpec
from djl_trtllm.backends.tensorrt_llm.plan import CheckpointPlan, TensorRtEnginePlan, TensorRtLlmPlan
from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.manifest import EngineDir, Manifest
from djl_trtllm.engines.preparation import prepare_engine
from djl_trtllm.errors import EngineMismatchError
from djl_trtllm.model import inspect
from tests.engines.helpers import CONTEXT, configured, gpu_machine, write_tensorrt_engine


def planned(path: Path, hardware: Hardware | None = None, /, **options: object) -> TensorRtLlmPlan:
    plan = plan_engine(configured(**options), inspect(path), hardware or gpu_machine())
    assert isinstance(plan, TensorRtLlmPlan)
    return plan


def engine_plan(path: Path, hardware: Hardware | None = None, /, **options: object) -> TensorRtEnginePlan:
    plan = planned(path, hardware, **options)
    assert isinstance(plan, TensorRtEnginePlan)
    return plan


def prepared(path: Path, hardware: Hardware, **options: object) -> EngineDir:
    config = configured(engine_cache_dir=path.parent / "cache", **options)
    layout = inspect(path)
    return prepare_engine(config, layout, print, plan=plan_engine(config, layout, hardware))


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path) -> Path:
    """A compiled engine with the tokenizer beside it."""
    path = write_tensorrt_engine(tmp_path / "engine")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, path)
    return path


# -- an engine that is there ---------------------------------------------------------------------------------------


def test_a_compiled_engines_limits_are_the_plans(engine: Path) -> None:
    plan = engine_plan(engine)
    assert (plan.max_sequences, plan.max_seq_len, plan.max_input_len) == (16, 192, 160)
    assert plan.executor_options() == {
        "backend": "tensorrt",
        "model": str(engine),
        "tokenizer": str(engine),
        "arguments": {
            "guided_decoding_backend": "xgrammar",
            "kv_cache_config": {
                "class": "KvCacheConfig",
                "enable_block_reuse": False,
                "free_gpu_memory_fraction": 0.95,
            },
            "max_batch_size": 16,
            "max_num_tokens": 160,
            "scheduler_config": {
                "class": "SchedulerConfig",
                "capacity_scheduler_policy": {"enum": "CapacitySchedulerPolicy", "name": "MAX_UTILIZATION"},
            },
        },
        "environment": {"TRTLLM_NO_USAGE_STATS": "1"},
        "max_sequences": 16,
        "lookahead": 4,
        "max_seq_len": 192,
        "max_prompt_len": 160,
        "tokens_per_block": 32,
        "hang_timeout": 60.0,
        "iteration_stats": True,
        "logprobs": False,
        "lora": False,
        "max_beam_width": 2,
        "max_lora_rank": 64,
        "stop_in_engine": True,
        "accept_ignored_seeds": False,
    }


def test_smaller_limits_are_the_users(engine: Path) -> None:
    plan = engine_plan(engine, max_rolling_batch_size=4, max_seq_len=100, max_input_len=60)
    assert (plan.max_sequences, plan.max_seq_len, plan.max_input_len) == (4, 100, 60)
    assert engine_plan(engine, max_num_tokens=150).running["max_num_tokens"] == 150


@pytest.mark.parametrize(
    ("options", "mismatch"),
    [
        ({"max_num_sequences": 64}, "option.max_num_sequences=64 (environment variable OPTION_MAX_NUM_SEQUENCES)"),
        ({"max_seq_len": 200}, "option.max_seq_len=200 (environment variable OPTION_MAX_SEQ_LEN)"),
        ({"tensor_parallel_degree": 2}, "option.tensor_parallel_degree=2"),
        ({"dtype": "bf16"}, "option.dtype=bf16"),
    ],
)
def test_what_the_engine_was_not_compiled_for_fails_before_loading(
    engine: Path, options: dict[str, object], mismatch: str
) -> None:
    with pytest.raises(EngineMismatchError) as caught:
        planned(engine, gpu_machine(gpus=2), **options)
    assert mismatch in str(caught.value)


def test_a_length_above_the_models_context_is_not_asked_of_the_engine(tmp_path: Path) -> None:
    path = write_tensorrt_engine(tmp_path / "engine", max_seq_len=CONTEXT, max_num_tokens=2048)
    plan = engine_plan(path, max_seq_len=4096, max_input_len=2048)
    assert plan.max_seq_len == CONTEXT
    assert "the longest sequence is 256 tokens, the model's context, and not 4096" in plan.notes[0]


def test_log_probabilities_are_there_where_their_logits_are_kept(engine: Path) -> None:
    assert engine_plan(engine).executor_options()["logprobs"] is False
    assert engine_plan(engine, gather_generation_logits="true").executor_options()["logprobs"] is True


def test_an_engine_is_served_as_it_is(engine: Path) -> None:
    found = prepared(engine, gpu_machine())
    assert (found.path, found.backend, found.manifest, found.tokenizer_dir) == (engine, "tensorrt", None, engine)


def test_a_repository_serves_the_engine_inside_it(checkpoint: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository" / "tensorrt_llm"
    write_tensorrt_engine(repository / "1")
    (repository / "config.pbtxt").write_text('name: "tensorrt_llm"\n')
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, repository)
    found = prepared(repository.parent, gpu_machine())
    assert (found.path, found.tokenizer_dir) == (repository / "1", repository)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    path = write_tensorrt_engine(tmp_path / "engine", ranks=2)
    plan = engine_plan(path, gpu_machine(gpus=2))
    (path / "rank1.engine").unlink()
    with pytest.raises(EngineMismatchError, match=r"is damaged:\n  - rank1\.engine: missing"):
        plan.check_whole(path)


def test_a_truncated_engine_is_found_by_its_manifest(engine: Path) -> None:
    plan = engine_plan(engine)
    manifest = Manifest.of(
        engine, backend="tensorrt", checkpoint="", options={}, versions=plan.versions, platform=plan.platform
    )
    manifest.write(engine)
    assert plan.check_whole(engine) == manifest
    (engine / "rank0.engine").write_bytes(b"")
    with pytest.raises(EngineMismatchError, match=r"rank0\.engine: truncated, 0 of 6 bytes"):
        plan.check_whole(engine)


# -- an engine that is to be compiled ------------------------------------------------------------------------------


def test_a_plan_to_compile_has_no_executor_yet(checkpoint: Path, engine: Path) -> None:
    plan = engine_plan(checkpoint)
    with pytest.raises(ValueError, match="no engine yet"):
        plan.executor_options()
    assert plan.at(engine).executor_options()["model"] == str(engine)


def test_the_compiler_is_reported_everything(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / ".out.partial"
    spec = engine_plan(checkpoint, quantize="int8").compile_spec(out)
    assert spec == TensorRtLlmSpec(
        checkpoint=str(checkpoint),
        tokenizer_dir=str(checkpoint),
        out=str(out),
        workspace=str(out / "workspace"),
        arguments={
            "build_config": {
                "class": "BuildConfig",
                "max_batch_size": 32,
                "max_input_len": CONTEXT,
                "max_num_tokens": 8192,
                "max_seq_len": CONTEXT,
                "plugin_config": {"class": "PluginConfig", "tokens_per_block": 64},
            },
            "quant_config": {"class": "QuantConfig", "quant_algo": {"enum": "QuantAlgo", "name": "W8A16"}},
        },
    )
    elsewhere = engine_plan(checkpoint, workspace=tmp_path / "fast").compile_spec(out)
    assert elsewhere.workspace == str(tmp_path / "fast" / "djl-trtllm.out.partial")


def test_the_options_of_a_build_are_its_arguments(checkpoint: Path) -> None:
    assert engine_plan(checkpoint, quantize="fp8", dtype="bf16").build_options == {
        "dtype": "bfloat16",
        "quantize": "fp8",
        "build_config.max_batch_size": 32,
        "build_config.max_input_len": CONTEXT,
        "build_config.max_num_tokens": 8192,
        "build_config.max_seq_len": CONTEXT,
        "build_config.plugin_config.tokens_per_block": 64,
        "calib_config.calib_batches": 32,
        "quant_config.quant_algo": "FP8",
    }


@pytest.mark.parametrize(
    "options",
    [
        {"max_rolling_batch_size": 8},
        {"max_num_tokens": 4096},
        {"tokens_per_block": 32},
        {"quantize": "int8"},
        {"dtype": "bf16"},
        {"gemm_plugin": "auto"},
        {"tensor_parallel_degree": 2},
        {"max_beam_width": 2},
    ],
)
def test_what_changes_the_engine_changes_its_place_in_the_cache(checkpoint: Path, options: dict[str, object]) -> None:
    two = gpu_machine(gpus=2)
    assert planned(checkpoint, two, **options).cache_key != planned(checkpoint, two).cache_key


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_free_gpu_mem_fraction": 0.5},
        {"batch_scheduler_policy": "guaranteed_no_evict"},
        {"enable_kv_cache_reuse": "true"},
        {"workspace": "/tmp"},
        {"job_queue_size": 5},
    ],
)
def test_what_only_runs_the_engine_does_not(checkpoint: Path, options: dict[str, object]) -> None:
    assert planned(checkpoint, **options).cache_key == planned(checkpoint).cache_key


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": (Gpu("NVIDIA H100", (9, 0), 80 * 10**9),)},
        {"gpus": (Gpu("NVIDIA A100", (8, 0), 80 * 10**9),)},
        {"driver": "570.10"},
        {"tensorrt_llm": "1.2.0"},
        {"tensorrt": "10.14"},
    ],
)
def test_another_machine_has_engines_of_its_own(checkpoint: Path, change: dict[str, object]) -> None:
    other = dataclasses.replace(gpu_machine(), **change)  # type: ignore[arg-type]
    assert planned(checkpoint, other).cache_key != planned(checkpoint).cache_key


def test_a_patch_of_the_driver_keeps_the_engines(checkpoint: Path) -> None:
    patched = dataclasses.replace(gpu_machine(), driver="580.120")
    assert planned(checkpoint, patched).cache_key == planned(checkpoint).cache_key


# -- a checkpoint that is run as it is -----------------------------------------------------------------------------


def test_a_checkpoint_is_run_as_it_is(checkpoint: Path) -> None:
    plan = planned(checkpoint, gpu_machine("1.3.0"))
    assert isinstance(plan, CheckpointPlan)
    assert plan.compiler is None
    assert prepared(checkpoint, gpu_machine("1.3.0")).path == checkpoint
    options = plan.at(checkpoint).executor_options()
    arguments = options.pop("arguments")
    assert arguments["max_seq_len"] == CONTEXT and arguments["enable_iter_perf_stats"] is True
    assert options == {
        "backend": "pytorch",
        "model": str(checkpoint),
        "tokenizer": str(checkpoint),
        "environment": {"TRTLLM_NO_USAGE_STATS": "1"},
        "max_sequences": 32,
        "lookahead": 8,
        "max_seq_len": CONTEXT,
        "max_prompt_len": 8192,
        "tokens_per_block": 64,
        "hang_timeout": 60.0,
        "iteration_stats": True,
        "logprobs": True,
        "lora": False,
        "max_beam_width": 1,
        "max_lora_rank": 64,
        "stop_in_engine": True,
        "accept_ignored_seeds": False,
    }


def test_with_chunked_prefill_a_prompt_may_be_longer_than_an_iteration(engine: Path, checkpoint: Path) -> None:
    chunked = planned(checkpoint, backend="pytorch", enable_chunked_prefill="true")
    assert chunked.executor_options()["max_prompt_len"] == 0
    assert planned(checkpoint, backend="pytorch", max_num_tokens="500").executor_options()["max_prompt_len"] == 500
    assert engine_plan(engine, max_num_tokens=150).executor_options()["max_prompt_len"] == 150


def test_statistics_that_are_switched_off_are_not_asked_for(checkpoint: Path) -> None:
    plan = planned(checkpoint, backend="pytorch", enable_iter_perf_stats="false")
    assert plan.executor_options()["iteration_stats"] is False


@pytest.mark.parametrize(
    ("version", "options", "expected"),
    [
        ("0.21.0", {}, False),
        ("1.0.0", {}, True),
        ("1.2.1", {}, True),
        ("1.2.1", {"stop_in_engine": "false"}, False),
        ("0.21.0", {"stop_in_engine": "true"}, True),
    ],
)
def test_stops_go_to_engines_that_do_not_lose_memory_with_them(
    checkpoint: Path, version: str, options: dict[str, object], expected: bool
) -> None:
    plan = planned(checkpoint, backend="pytorch", **options)
    plan = dataclasses.replace(plan, inputs=dataclasses.replace(plan.inputs, version=version))
    assert plan.executor_options()["stop_in_engine"] is expected


# -- messages ------------------------------------------------------------------------------------------------------


def test_the_plan_in_one_line_has_the_backend_its_reason_and_the_sizes(checkpoint: Path) -> None:
    assert planned(checkpoint, gpu_machine(gpus=2), tensor_parallel_degree=2).describe() == (
        "backend tensorrt: TensorRT-LLM 1.2.1 is installed and there is a GPU; on 2 GPUs, up to 32 sequences of 256 "
        "tokens, 8192 tokens per iteration (option.max_num_tokens is not set), KV cache in blocks of 64 tokens"
    )


def test_the_details_are_what_one_would_write_in_python(checkpoint: Path) -> None:
    compiles, runs = planned(checkpoint, quantize="int8").details()
    assert compiles == (
        "TensorRT-LLM compiles LLM(build_config=BuildConfig(max_batch_size=32, max_input_len=256, max_num_tokens=8192, "
        "max_seq_len=256, plugin_config=PluginConfig(tokens_per_block=64)), "
        "quant_config=QuantConfig(quant_algo=QuantAlgo.W8A16))"
    )
    assert runs.startswith("TensorRT-LLM runs LLM(guided_decoding_backend='xgrammar', ")
