"""The exact arguments that reach TensorRT-LLM, or the exact message."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.config import Backend
from djl_trtllm.config.registry import OPTIONS, find
from djl_trtllm.config.target import Target, named_targets, read_effect
from djl_trtllm.config.tensorrt_llm_names import KNOWN_VERSIONS, has, members
from djl_trtllm.engine import plan_engine
from djl_trtllm.engine.tensorrt_llm_arguments import LLM_OWNERS
from djl_trtllm.engine.tensorrt_llm_plan import TensorRtEnginePlan, TensorRtLlmPlan
from djl_trtllm.errors import ConfigError, EngineError
from djl_trtllm.model import inspect

from .helpers import configured, gpu_machine
from .tensorrt_llm_cases import ABSENT, CASES, Case

CONTEXT = 8192
DEFAULTS = {"LLM.gather_generation_logits"}
"""Of those that a case names and that are passed anyway."""
# Without enable_lora they reach nothing: option -> value, argument, what it becomes.
ADAPTER_OPTIONS = {
    "max_lora_rank": ("16", "LoraConfig.max_lora_rank", 16),
    "lora_dir": ("/adapters/one", "LoraConfig.lora_dir", ["/adapters/one"]),
    "lora_ckpt_source": ("nemo", "LoraConfig.lora_ckpt_source", "nemo"),
    "lora_cache_optimal_adapter_size": ("16", "PeftCacheConfig.optimal_adapter_size", 16),
    "lora_cache_max_adapter_size": ("128", "PeftCacheConfig.max_adapter_size", 128),
    "lora_cache_gpu_memory_fraction": ("0.1", "PeftCacheConfig.device_cache_percent", 0.1),
    "lora_cache_host_memory_bytes": ("1000", "PeftCacheConfig.host_cache_size", 1000),
}
SMOOTHQUANT_KINDS = {
    ("false", "false"): "W8A8_SQ_PER_TENSOR_PLUGIN",
    ("true", "false"): "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
    ("false", "true"): "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
    ("true", "true"): "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
}
LORA = {"enable_lora": "true", "lora_target_modules": "attn_q,attn_v"}
TOGETHER = {
    # The path of the checkpoint: test_telling_names.py.
    "chatglm_model_version",
    "gpt_model_version",
    *ADAPTER_OPTIONS,
    *LORA,
    "smoothquant_per_token",
    "smoothquant_per_channel",
}
"""Options that mean something with others only, and have tests of their own."""


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, with a context that lengths fit into."""
    path = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("arguments") / "model"))
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (path / "config.json").write_text(json.dumps(config))
    return path


def planned(model: Path, version: str = "1.2.1", *, gpus: int = 8, **options: object) -> TensorRtLlmPlan:
    plan = plan_engine(configured(**options), inspect(model), gpu_machine(version, gpus=gpus))
    assert isinstance(plan, TensorRtLlmPlan)
    check_names(plan, version)
    return plan


def check_names(plan: TensorRtLlmPlan, version: str) -> None:
    """Every argument is one that this version of TensorRT-LLM has."""
    passed = [plan.running, *([plan.building] if isinstance(plan, TensorRtEnginePlan) else [])]
    for arguments in passed:
        for owner, name in names_in(arguments, LLM_OWNERS[plan.backend]):
            assert has(owner, name, version), f"{owner}.{name}"


def names_in(arguments: Mapping[str, Any], owner: str) -> list[tuple[str, str]]:
    found = []
    for name, value in arguments.items():
        if name == "class":
            continue
        found.append((owner, name))
        if isinstance(value, dict):
            found += [(value["enum"], value["name"])] if "enum" in value else names_in(value, value["class"])
    return found


def flat(arguments: Mapping[str, Any], owner: str = "LLM") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, dict) and "class" in value:
            found |= flat(value, value["class"]) or {f"{owner}.{name}": value["class"]}
        elif name != "class":
            found[f"{owner}.{name}"] = f"{value['enum']}.{value['name']}" if isinstance(value, dict) else value
    return found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    differing = {name: value for name, value in after.items() if name not in before or before[name] != value}
    return differing | {name: ABSENT for name in before if name not in after}


def building(model: Path, version: str = "1.2.1", **options: object) -> dict[str, Any]:
    plan = planned(model, version, backend="tensorrt", **options)
    assert isinstance(plan, TensorRtEnginePlan)
    return flat(plan.building)


def running(model: Path, version: str = "1.2.1", **options: object) -> dict[str, Any]:
    return flat(planned(model, version, **{"backend": "tensorrt", **options}).running)


def problems(model: Path, version: str = "1.2.1", **options: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        planned(model, version, **options)
    return caught.value.problems


# -- what is passed when nothing is set ----------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0.0", "1.2.1"])
def test_an_engine_is_built_for_the_documents_limits(model: Path, version: str) -> None:
    assert building(model, version) == {
        "BuildConfig.max_batch_size": 32,
        "BuildConfig.max_input_len": 1024,
        "BuildConfig.max_num_tokens": 8192,
        "BuildConfig.max_seq_len": 1536,
        "PluginConfig.tokens_per_block": 64,
    }


def test_an_engine_is_run_with_the_documents_defaults(model: Path) -> None:
    expected = {
        "KvCacheConfig.enable_block_reuse": False,
        "KvCacheConfig.free_gpu_memory_fraction": 0.95,
        "KvCacheConfig.tokens_per_block": 64,
        "LLM.guided_decoding_backend": "xgrammar",
        "LLM.max_batch_size": 32,
        "LLM.max_num_tokens": 8192,
        "SchedulerConfig.capacity_scheduler_policy": "CapacitySchedulerPolicy.MAX_UTILIZATION",
    }
    assert running(model) == expected
    # There the size of a block is known to the engine only.
    assert running(model, "1.0.0") == {k: v for k, v in expected.items() if k != "KvCacheConfig.tokens_per_block"}


def test_a_checkpoint_is_run_with_the_documents_defaults(model: Path) -> None:
    expected = {
        "KvCacheConfig.enable_block_reuse": False,
        "KvCacheConfig.free_gpu_memory_fraction": 0.95,
        "KvCacheConfig.tokens_per_block": 64,
        "LLM.enable_iter_perf_stats": True,
        "LLM.guided_decoding_backend": "xgrammar",
        "LLM.max_batch_size": 32,
        "LLM.max_input_len": 1024,
        "LLM.max_num_tokens": 8192,
        "LLM.max_seq_len": 1536,
        "SchedulerConfig.capacity_scheduler_policy": "CapacitySchedulerPolicy.MAX_UTILIZATION",
    }
    assert running(model, backend="pytorch") == expected
    # From 1.3 on 1024 is the default of max_input_len itself.
    without_length = {name: value for name, value in expected.items() if name != "LLM.max_input_len"}
    assert running(model, "1.3.0", backend="pytorch") == without_length
    # Neither guides beside the overlap scheduler nor blocks of another size.
    assert running(model, "1.0.0", backend="pytorch") == {
        name: value
        for name, value in expected.items()
        if name not in ("KvCacheConfig.tokens_per_block", "LLM.guided_decoding_backend")
    }


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("backend", ["pytorch", "autodeploy"])
def test_what_is_passed_by_default_every_version_has(model: Path, version: str, backend: str) -> None:
    if members(LLM_OWNERS[Backend(backend)], version):
        planned(model, version, backend=backend)
    else:
        with pytest.raises(EngineError, match=f"TensorRT-LLM {version} has no such backend"):
            planned(model, version, backend=backend)


# -- every option --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.option)
def test_an_option_becomes_exactly_these_arguments_of_an_engine(model: Path, case: Case) -> None:
    option = {case.option: case.value}
    assert changed(building(model), building(model, **option)) == case.building
    assert changed(running(model), running(model, **option)) == case.running


@pytest.mark.parametrize("case", [case for case in CASES if case.option != "quantize"], ids=lambda case: case.option)
def test_an_option_becomes_exactly_these_arguments_of_a_checkpoint(model: Path, case: Case) -> None:
    before = running(model, backend="pytorch")
    assert changed(before, running(model, backend="pytorch", **{case.option: case.value})) == case.pytorch


@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
def test_every_option_with_an_effect_has_a_case(backend: str) -> None:
    cases = {declared.name for case in CASES if (declared := find(f"option.{case.option}")) is not None}
    assert len(cases) == len(CASES)
    for declared in OPTIONS.values():
        option = declared.option
        effect = getattr(option, backend)
        if not option.retired and not option.effect and not effect.startswith(("no effect", "ignored")):
            assert declared.name in cases | TOGETHER, declared.name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.option)
def test_an_effect_that_is_arguments_only_says_the_truth(case: Case) -> None:
    declared = find(f"option.{case.option}")
    assert declared is not None
    option = declared.option
    for text, passed in ((option.tensorrt, case.building | case.running), (option.pytorch, case.pytorch)):
        effect = read_effect(text)
        named = set() if effect is None else {f"{target.owner}.{target.name}" for target in effect.targets}
        assert named <= passed.keys() | DEFAULTS, case.option


# -- texts ---------------------------------------------------------------------------------------------------------


def test_an_effect_that_is_arguments_only_is_the_mapping() -> None:
    both = read_effect("PluginConfig.tokens_per_block and KvCacheConfig.tokens_per_block")
    assert both is not None
    assert both.targets == (Target("PluginConfig", "tokens_per_block"), Target("KvCacheConfig", "tokens_per_block"))
    when_set = read_effect("PluginConfig.use_fused_mlp, when set")
    assert when_set is not None and when_set.when_set
    assert read_effect("LLM(max_input_len), and the limit at admission") is None
    assert named_targets("LLM(max_input_len), and the limit at admission") == (Target("LLM", "max_input_len"),)


# -- quantisation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"quantize": "int8"}, {"QuantConfig.quant_algo": "QuantAlgo.W8A16"}),
        ({"quantize": "int4"}, {"QuantConfig.quant_algo": "QuantAlgo.W4A16"}),
        (
            {"quantize": "awq"},
            {"QuantConfig.quant_algo": "QuantAlgo.W4A16_AWQ", "CalibConfig.calib_batches": 32},
        ),
        (
            {"quantize": "awq", "awq_format": "w4a8_awq", "awq_block_size": 64, "awq_calib_size": 10},
            {
                "QuantConfig.quant_algo": "QuantAlgo.W4A8_AWQ",
                "QuantConfig.group_size": 64,
                "CalibConfig.calib_batches": 10,
            },
        ),
        ({"quantize": "w4a8"}, {"QuantConfig.quant_algo": "QuantAlgo.W4A8_AWQ", "CalibConfig.calib_batches": 32}),
        (
            {"quantize": "smoothquant"},
            {
                "QuantConfig.quant_algo": "QuantAlgo.W8A8_SQ_PER_CHANNEL",
                "QuantConfig.smoothquant_val": 0.8,
                "CalibConfig.calib_batches": 32,
            },
        ),
        (
            {"quantize": "smoothquant", "smoothquant_alpha": 0.6, "calib_size": 50, "calib_batch_size": 8},
            {
                "QuantConfig.quant_algo": "QuantAlgo.W8A8_SQ_PER_CHANNEL",
                "QuantConfig.smoothquant_val": 0.6,
                "CalibConfig.calib_batches": 7,
                "CalibConfig.calib_batch_size": 8,
            },
        ),
        (
            {"quantize": "fp8", "kv_cache_dtype": "fp8"},
            {
                "QuantConfig.quant_algo": "QuantAlgo.FP8",
                "QuantConfig.kv_cache_quant_algo": "QuantAlgo.FP8",
                "CalibConfig.calib_batches": 32,
            },
        ),
        ({"kv_cache_dtype": "int8"}, {"QuantConfig.kv_cache_quant_algo": "QuantAlgo.INT8"}),
        (
            {"quantize": "awq", "quant_algo": "FP8", "calib_batches": 4},
            {"QuantConfig.quant_algo": "QuantAlgo.FP8", "CalibConfig.calib_batches": 4},
        ),
        ({"quantize": "none"}, {}),
    ],
)
def test_a_quantisation_is_an_algorithm_with_its_calibration(
    model: Path, options: dict[str, object], expected: dict[str, Any]
) -> None:
    assert changed(building(model), building(model, **options)) == expected


@pytest.mark.parametrize(
    ("quantize", "offline"), [("none", True), ("int8", True), ("int4", True), ("awq", False), ("fp8", False)]
)
def test_samples_for_a_calibration_come_from_the_hub(model: Path, quantize: str, offline: bool) -> None:
    assert planned(model, quantize=quantize).offline is offline
    assert planned(model, quantize=quantize, calib_dataset=model).offline is True


def quantised(model: Path, to: Path, **config: object) -> Path:
    shutil.copytree(model, to)
    (to / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    return to


def test_a_checkpoint_that_is_quantised_so_already_is_taken_as_it_is(model: Path, tmp_path: Path) -> None:
    path = quantised(model, tmp_path / "m", quant_algo="FP8", kv_cache_quant_algo="FP8")
    assert building(path, quantize="fp8") == building(path) == building(model)
    assert planned(path, quantize="fp8").offline
    assert running(path, backend="pytorch", quantize="fp8") == running(path, backend="pytorch")
    assert planned(path).describe().endswith("weights in FP8")


def test_a_checkpoint_that_is_quantised_otherwise_is_refused(model: Path, tmp_path: Path) -> None:
    path = quantised(model, tmp_path / "m", quant_algo="NVFP4")
    for backend in ("tensorrt", "pytorch"):
        (problem,) = problems(path, backend=backend, quantize="fp8")
        assert problem == (
            "option.quantize=fp8 (environment variable OPTION_QUANTIZE): the checkpoint is quantised already, with "
            "NVFP4; leave the option out, or take a checkpoint that is not"
        )


def test_pytorch_does_not_quantise(model: Path) -> None:
    (problem,) = problems(model, backend="pytorch", quantize="fp8")
    assert problem == (
        "option.quantize=fp8 (environment variable OPTION_QUANTIZE): TensorRT-LLM's pytorch backend does not quantise, "
        "and this checkpoint is not quantised: take one that is (quantised by ModelOpt, with hf_quant_config.json), or "
        "compile an engine with option.backend=tensorrt on TensorRT-LLM 1.2"
    )


@pytest.mark.parametrize(
    ("backend", "dtype", "message"),
    [
        ("tensorrt", "fp32", "TensorRT-LLM keeps the cache in the model's own 16 bits, or in 8 (fp8)"),
        ("pytorch", "fp32", "TensorRT-LLM keeps the cache in the model's own 16 bits, or in 8 (fp8)"),
        ("pytorch", "int8", "TensorRT-LLM's pytorch backend has no such cache; option.kv_cache_dtype=fp8 takes"),
    ],
)
def test_a_number_format_the_cache_cannot_have_is_refused(model: Path, backend: str, dtype: str, message: str) -> None:
    (problem,) = problems(model, backend=backend, kv_cache_dtype=dtype)
    assert problem.startswith(f"option.kv_cache_dtype={dtype} (environment variable OPTION_KV_CACHE_DTYPE): {message}")


def test_a_cache_in_the_models_own_format_needs_nothing(model: Path) -> None:
    assert planned(model, kv_cache_dtype="fp16").notes == ()
    (note,) = planned(model, kv_cache_dtype="fp16", dtype="bf16").notes
    assert note.endswith("TensorRT-LLM keeps the cache in the model's own number format, bfloat16")


# -- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 8192),
        ({"max_rolling_batch_size": 2}, 2 * 1536),
        ({"max_rolling_batch_size": 10_000}, 10_000),
        ({"max_rolling_batch_size": 4000, "max_beam_width": 4}, 16_000),
        ({"max_input_len": 8000, "max_rolling_batch_size": 1, "max_output_len": 100}, 8100),
        ({"max_rolling_batch_size": 1, "max_seq_len": 600}, 600),
        ({"max_num_tokens": 20_000}, 20_000),
    ],
)
def test_an_iteration_holds_what_the_batch_can_use(model: Path, options: dict[str, object], tokens: int) -> None:
    assert running(model, **options)["LLM.max_num_tokens"] == tokens
    assert building(model, **options)["BuildConfig.max_num_tokens"] == tokens


def test_an_iteration_holds_the_longest_prompt_unless_it_is_split(model: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(model, tmp_path / "m"))
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 131072}
    (path / "config.json").write_text(json.dumps(config))
    plan = planned(path, max_input_len=100_000)
    assert plan.facts.max_num_tokens == 100_000
    assert "an iteration holds 100000 tokens, because prompts may be so long and are not split" in plan.notes[0]
    split = planned(path, max_input_len=100_000, enable_chunked_prefill="true")
    assert (split.facts.max_num_tokens, split.notes) == (8192, ())


def test_a_prompt_that_no_iteration_holds_is_refused_at_admission(model: Path) -> None:
    options: dict[str, object] = {"backend": "pytorch", "max_num_tokens": 512}
    assert planned(model, **options).max_input_len == 512
    assert planned(model, **options, max_input_len=4096).max_input_len == 512
    assert planned(model, **options, max_input_len=4096, enable_chunked_prefill="true").max_input_len == 4096


def test_the_engine_is_made_for_max_num_sequences_and_runs_the_smaller_batch(model: Path) -> None:
    options: dict[str, object] = {"max_rolling_batch_size": 16, "max_num_sequences": 64}
    assert building(model, **options)["BuildConfig.max_batch_size"] == 64
    assert running(model, **options)["LLM.max_batch_size"] == 16
    assert planned(model, **options).max_sequences == 16


# -- parallelism ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "gpus", "tensor"),
    [
        ({"tensor_parallel_degree": "max"}, 8, 8),
        ({"tensor_parallel_degree": "max"}, 1, 1),
        ({"tensor_parallel_degree": "max", "pipeline_parallel_degree": 2}, 8, 4),
        ({"tensor_parallel_degree": "max", "pipeline_parallel_degree": 2, "context_parallel_size": 2}, 8, 2),
    ],
)
def test_max_takes_every_gpu(model: Path, options: dict[str, object], gpus: int, tensor: int) -> None:
    assert running(model, gpus=gpus, **options)["LLM.tensor_parallel_size"] == tensor


def test_gpus_of_other_machines_count_where_their_ranks_are_launched(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, object] = {"tensor_parallel_degree": "max", "num_nodes": 2}
    assert running(model, gpus=4, **options)["LLM.tensor_parallel_size"] == 4
    monkeypatch.setenv("TLLM_SPAWN_PROXY_PROCESS", "1")
    assert running(model, gpus=4, **options)["LLM.tensor_parallel_size"] == 8
    assert running(model, gpus=4, tensor_parallel_degree=16)["LLM.tensor_parallel_size"] == 16


def test_more_gpus_than_there_are_is_an_error_before_anything_starts(model: Path) -> None:
    (problem,) = problems(model, gpus=2, tensor_parallel_degree=2, pipeline_parallel_degree=2)
    assert problem == (
        "option.tensor_parallel_degree=2 (environment variable OPTION_TENSOR_PARALLEL_DEGREE) and "
        "option.pipeline_parallel_degree=2 (environment variable OPTION_PIPELINE_PARALLEL_DEGREE) need 4 GPUs, and 2 "
        "can be used here; with GPUs of several machines, start the server with trtllm-llmapi-launch"
    )


def test_autodeploy_is_told_the_degree_alone(model: Path) -> None:
    (problem,) = problems(model, backend="autodeploy", pipeline_parallel_degree=2)
    assert problem == (
        "option.pipeline_parallel_degree=2 (environment variable OPTION_PIPELINE_PARALLEL_DEGREE): AutoDeploy spreads "
        "a model by option.tensor_parallel_degree alone; leave it out"
    )
    arguments = running(model, backend="autodeploy", tensor_parallel_degree=4)
    assert arguments["LLM.world_size"] == 4
    assert "LLM.tensor_parallel_size" not in arguments


# -- options that belong together ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["enable_kv_cache_reuse", "enable_chunked_prefill"])
def test_what_reads_prompts_from_the_paged_cache_needs_an_engine_for_it(model: Path, name: str) -> None:
    (problem,) = problems(model, use_paged_context_fmha="false", **{name: "true"})
    assert problem == (
        f"option.{name}=true (environment variable OPTION_{name.upper()}) needs an engine with "
        "option.use_paged_context_fmha, and option.use_paged_context_fmha=false (environment variable "
        "OPTION_USE_PAGED_CONTEXT_FMHA): leave that out"
    )


def test_two_options_of_the_kind_of_cache_must_agree(model: Path) -> None:
    agreed = building(model, paged_kv_cache="false", kv_cache_type="continuous")
    assert agreed["BuildConfig.kv_cache_type"] == "KVCacheType.CONTINUOUS"
    (problem,) = problems(model, paged_kv_cache="false", kv_cache_type="paged")
    assert "contradict each other: leave one of them out" in problem


def test_a_chunking_policy_without_chunks_is_told(model: Path) -> None:
    (note,) = planned(model, context_chunking_policy="equal_progress").notes
    assert note.endswith("has no effect without option.enable_chunked_prefill=true")
    assert planned(model, context_chunking_policy="equal_progress", enable_chunked_prefill="true").notes == ()


def test_a_switch_of_its_own_counts_before_the_object_of_switches(model: Path) -> None:
    arguments = running(
        model,
        extended_runtime_perf_knob_config='{"multi_block_mode": false, "cuda_graph_mode": true}',
        multi_block_mode="true",
        enforce_eager="true",
    )
    assert arguments["ExtendedRuntimePerfKnobConfig.multi_block_mode"] is True
    assert arguments["ExtendedRuntimePerfKnobConfig.cuda_graph_mode"] is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a JSON object of switches and numbers"),
        ('{"multi_block": true}', "has no ExtendedRuntimePerfKnobConfig.multi_block; leave the option out"),
    ],
)
def test_an_object_of_switches_that_is_none_is_refused(model: Path, text: str, message: str) -> None:
    (problem,) = problems(model, extended_runtime_perf_knob_config=text)
    assert message in problem


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"use_cuda_graph": "false"}, {"LLM.cuda_graph_config": None}),
        ({"enforce_eager": "true", "use_cuda_graph": "true"}, {"LLM.cuda_graph_config": "CudaGraphConfig"}),
        (
            {"use_cuda_graph": "true", "cuda_graph_max_batch_size": 64, "cuda_graph_padding_enabled": "true"},
            {"CudaGraphConfig.max_batch_size": 64, "CudaGraphConfig.enable_padding": True},
        ),
    ],
)
def test_cuda_graphs_of_a_checkpoint(model: Path, options: dict[str, object], expected: dict[str, Any]) -> None:
    before = running(model, backend="pytorch")
    assert changed(before, running(model, backend="pytorch", **options)) == expected


def test_contradictions_about_cuda_graphs_are_refused(model: Path) -> None:
    (problem,) = problems(model, backend="pytorch", use_cuda_graph="false", cuda_graph_max_batch_size=8)
    assert "contradict each other: leave one of them out" in problem
    (problem,) = problems(model, backend="pytorch", cuda_graph_batch_sizes="1,2", cuda_graph_max_batch_size=8)
    assert "either the batches or the largest of them" in problem


def test_the_overlap_scheduler_is_named_in_both_ways(model: Path) -> None:
    on = running(model, backend="pytorch", enable_overlap_scheduler="true")
    off = running(model, backend="pytorch", enable_overlap_scheduler="false")
    assert (on["LLM.disable_overlap_scheduler"], off["LLM.disable_overlap_scheduler"]) == (False, True)


# -- guides, log-probabilities, adapters ---------------------------------------------------------------------------


def test_guides_are_there_unless_they_are_switched_off(model: Path) -> None:
    assert (
        running(model, backend="pytorch", guided_decoding_backend="llguidance")["LLM.guided_decoding_backend"]
        == "llguidance"
    )
    assert (
        running(model, "1.0.0", backend="pytorch", guided_decoding_backend="xgrammar")["LLM.guided_decoding_backend"]
        == "xgrammar"
    )
    assert "LLM.guided_decoding_backend" not in running(model, backend="autodeploy")
    (problem,) = problems(model, guided_decoding_backend="llguidance")
    assert "a compiled engine has xgrammar only" in problem


@pytest.mark.parametrize("kind", SMOOTHQUANT_KINDS)
def test_the_kind_of_smoothquant_is_chosen_by_its_two_options(model: Path, kind: tuple[str, str]) -> None:
    per_token, per_channel = kind
    options = {"smoothquant_per_token": per_token, "smoothquant_per_channel": per_channel}
    arguments = planned(model, quantize="smoothquant", **options).building
    assert arguments["quant_config"]["quant_algo"] == {"enum": "QuantAlgo", "name": SMOOTHQUANT_KINDS[kind]}
    assert "quant_config" not in planned(model, **options).building


@pytest.mark.parametrize("name", ADAPTER_OPTIONS)
def test_an_adapter_option_becomes_its_argument_where_adapters_are_served(model: Path, name: str) -> None:
    value, target, becomes = ADAPTER_OPTIONS[name]
    before = running(model, backend="pytorch", **LORA)
    assert changed(before, running(model, backend="pytorch", **LORA, **{name: value})) == {target: becomes}
    plain = running(model, backend="pytorch")
    assert changed(plain, running(model, backend="pytorch", **{name: value})) == {}


def test_adapters_are_compiled_in_and_have_a_cache(model: Path) -> None:
    assert changed(building(model), building(model, **LORA, max_lora_rank=16)) == {
        "LLM.enable_lora": True,
        "LoraConfig.lora_target_modules": ["attn_q", "attn_v"],
        "LoraConfig.max_lora_rank": 16,
    }
    assert changed(running(model), running(model, **LORA, lora_cache_max_adapter_size=128)) == {
        "LLM.enable_lora": True,
        "PeftCacheConfig.device_cache_percent": 0.05,
        "PeftCacheConfig.max_adapter_size": 128,
    }


def test_adapters_of_a_checkpoint_have_a_configuration_of_their_own(model: Path) -> None:
    arguments = planned(model, backend="pytorch", **LORA, lora_dir="/adapters/one").running
    assert arguments["lora_config"] == {
        "class": "LoraConfig",
        "lora_dir": ["/adapters/one"],
        "lora_target_modules": ["attn_q", "attn_v"],
        "max_lora_rank": 64,
    }
    assert arguments["peft_cache_config"] == {"class": "PeftCacheConfig", "device_cache_percent": 0.05}


def test_an_engine_must_know_which_modules_adapters_change(model: Path) -> None:
    (problem,) = problems(model, enable_lora="true")
    assert problem.startswith("option.enable_lora=true (environment variable OPTION_ENABLE_LORA): a compiled engine")
    assert "option.lora_target_modules" in problem
    planned(model, backend="pytorch", enable_lora="true")


# -- versions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "backend", "option", "value", "missing"),
    [
        ("1.0.0", "tensorrt", "orchestrator_type", "rpc", "LLM(orchestrator_type)"),
        ("1.0.0", "tensorrt", "enable_lm_head_tp_in_adp", "true", "LLM(enable_lm_head_tp_in_adp)"),
        ("1.0.0", "tensorrt", "quant_algo", "W4A16_MXFP4", "QuantAlgo.W4A16_MXFP4"),
        ("1.0.0", "pytorch", "tokens_per_block", "64", "KvCacheConfig.tokens_per_block"),
        ("1.1.0", "pytorch", "max_stats_len", "500", "LLM(max_stats_len)"),
    ],
)
def test_an_argument_the_installed_version_lacks_is_named_with_the_versions_that_have_it(
    model: Path, version: str, backend: str, option: str, value: str, missing: str
) -> None:
    (problem,) = problems(model, version, backend=backend, **{option: value})
    head, since = problem.split(" (it has it from ")
    assert head == (
        f"option.{option}={value} (environment variable OPTION_{option.upper()}): TensorRT-LLM {version} has no "
        f"{missing}"
    )
    assert re.fullmatch(r"1\.[12]\.0\w* on\); leave the option out", since)


def test_of_two_arguments_a_version_may_have_one(model: Path) -> None:
    assert building(model, "1.0.0", tokens_per_block=128)["PluginConfig.tokens_per_block"] == 128
    assert "KvCacheConfig.tokens_per_block" not in running(model, "1.0.0", tokens_per_block=128)


def test_a_version_that_cannot_be_told_is_taken_for_the_stable_one(model: Path) -> None:
    plan = plan_engine(configured(), inspect(model), gpu_machine("of unknown version"))
    assert isinstance(plan, TensorRtLlmPlan)
    assert plan.facts.version == "1.2.1"
    assert plan.notes == ("the version of TensorRT-LLM cannot be told: it is given what 1.2.1 takes",)


def test_all_problems_are_told_at_once(model: Path) -> None:
    assert (
        len(problems(model, backend="pytorch", quantize="fp8", kv_cache_dtype="int8", tensor_parallel_degree=99)) == 3
    )
