from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.backends.tensorrt_llm.plans import building, changed, planned, problems, running

LORA = {"enable_lora": "true", "lora_target_modules": "attn_q,attn_v"}
ADAPTER_OPTIONS = {
    "max_lora_rank": ("16", "LoraConfig.max_lora_rank", 16),
    "lora_dir": ("/adapters/one", "LoraConfig.lora_dir", ["/adapters/one"]),
    "lora_ckpt_source": ("nemo", "LoraConfig.lora_ckpt_source", "nemo"),
    "lora_cache_optimal_adapter_size": ("16", "PeftCacheConfig.optimal_adapter_size", 16),
    "lora_cache_max_adapter_size": ("128", "PeftCacheConfig.max_adapter_size", 128),
    "lora_cache_gpu_memory_fraction": ("0.1", "PeftCacheConfig.device_cache_percent", 0.1),
    "lora_cache_host_memory_bytes": ("1000", "PeftCacheConfig.host_cache_size", 1000),
}
"""Option: value, argument, what it becomes. Without option.enable_lora they reach nothing."""


# -- limits ----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_no_iteration_holds_is_refused_at_admission(roomy: Path) -> None:
    options: dict[str, object] = {"backend": "pytorch", "max_num_tokens": 512}
    assert planned(roomy, **options).max_input_len == 512
    assert planned(roomy, **options, max_input_len=4096).max_input_len == 512
    assert planned(roomy, **options, max_input_len=4096, enable_chunked_prefill="true").max_input_len == 4096


def test_the_engine_is_made_for_max_num_sequences_and_runs_the_smaller_batch(roomy: Path) -> None:
    options: dict[str, object] = {"max_rolling_batch_size": 16, "max_num_sequences": 64}
    assert building(roomy, **options)["BuildConfig.max_batch_size"] == 64
    assert running(roomy, **options)["LLM.max_batch_size"] == 16
    assert planned(roomy, **options).max_sequences == 16


def test_the_beams_of_a_request_fit_the_batch_where_every_request_has_them(roomy: Path) -> None:
    options: dict[str, object] = {"max_rolling_batch_size": 4, "max_beam_width": 5}
    (problem,) = problems(roomy, backend="pytorch", **options)
    assert problem == (
        "option.max_beam_width=5 (environment variable OPTION_MAX_BEAM_WIDTH): every request of the pytorch backend "
        "has that many beams, and 4 sequences run together; raise option.max_rolling_batch_size"
    )
    planned(roomy, backend="pytorch", max_rolling_batch_size=5, max_beam_width=5)
    planned(roomy, backend="tensorrt", **options)


# -- parallelism -----------------------------------------------------------------------------------------------------


def test_layers_are_given_for_each_group_of_the_pipeline(roomy: Path) -> None:
    options: dict[str, object] = {"backend": "pytorch", "pipeline_parallel_degree": 2}
    assert running(roomy, **options, pp_partition="1,3")["LLM.pp_partition"] == [1, 3]
    (problem,) = problems(roomy, **options, pp_partition="4")
    assert problem == (
        "option.pp_partition=4 (environment variable OPTION_PP_PARTITION): 1 numbers of layers for 2 groups; give one "
        "for each group of option.pipeline_parallel_degree"
    )


def test_autodeploy_is_reported_the_degree_alone(roomy: Path) -> None:
    (problem,) = problems(roomy, backend="autodeploy", pipeline_parallel_degree=2)
    assert problem == (
        "option.pipeline_parallel_degree=2 (environment variable OPTION_PIPELINE_PARALLEL_DEGREE): AutoDeploy "
        "distributes a model by option.tensor_parallel_degree only; leave it out"
    )
    arguments = running(roomy, backend="autodeploy", tensor_parallel_degree=4)
    assert arguments["LLM.world_size"] == 4
    assert "LLM.tensor_parallel_size" not in arguments


# -- options that belong together ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["enable_kv_cache_reuse", "enable_chunked_prefill"])
def test_what_reads_prompts_from_the_paged_cache_needs_an_engine_for_it(roomy: Path, name: str) -> None:
    (problem,) = problems(roomy, use_paged_context_fmha="false", **{name: "true"})
    assert problem == (
        f"option.{name}=true (environment variable OPTION_{name.upper()}) needs an engine with "
        "option.use_paged_context_fmha, and option.use_paged_context_fmha=false (environment variable "
        "OPTION_USE_PAGED_CONTEXT_FMHA): leave that out"
    )


def test_two_options_of_the_kind_of_cache_must_agree(roomy: Path) -> None:
    agreed = building(roomy, paged_kv_cache="false", kv_cache_type="continuous")
    assert agreed["BuildConfig.kv_cache_type"] == "KVCacheType.CONTINUOUS"
    (problem,) = problems(roomy, paged_kv_cache="false", kv_cache_type="paged")
    assert "contradict each other: leave one of them out" in problem


def test_a_switch_of_its_own_counts_before_the_object_of_switches(roomy: Path) -> None:
    arguments = running(
        roomy,
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
def test_an_object_of_switches_that_is_none_is_refused(roomy: Path, text: str, message: str) -> None:
    (problem,) = problems(roomy, extended_runtime_perf_knob_config=text)
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
def test_cuda_graphs_of_a_checkpoint(roomy: Path, options: dict[str, object], expected: dict[str, Any]) -> None:
    before = running(roomy, backend="pytorch")
    assert changed(before, running(roomy, backend="pytorch", **options)) == expected


def test_contradictions_about_cuda_graphs_are_refused(roomy: Path) -> None:
    (problem,) = problems(roomy, backend="pytorch", use_cuda_graph="false", cuda_graph_max_batch_size=8)
    assert "contradict each other: leave one of them out" in problem
    (problem,) = problems(roomy, backend="pytorch", cuda_graph_batch_sizes="1,2", cuda_graph_max_batch_size=8)
    assert "either the batches or the largest of them" in problem


def test_the_overlap_scheduler_is_named_in_both_ways(roomy: Path) -> None:
    on = running(roomy, backend="pytorch", enable_overlap_scheduler="true")
    off = running(roomy, backend="pytorch", enable_overlap_scheduler="false")
    assert (on["LLM.disable_overlap_scheduler"], off["LLM.disable_overlap_scheduler"]) == (False, True)


# -- guides and adapters ---------------------------------------------------------------------------------------------


def test_guides_are_there_unless_they_are_switched_off(roomy: Path) -> None:
    assert (
        running(roomy, backend="pytorch", guided_decoding_backend="llguidance")["LLM.guided_decoding_backend"]
        == "llguidance"
    )
    assert (
        running(roomy, "1.0.0", backend="pytorch", guided_decoding_backend="xgrammar")["LLM.guided_decoding_backend"]
        == "xgrammar"
    )
    assert "LLM.guided_decoding_backend" not in running(roomy, backend="autodeploy")
    (problem,) = problems(roomy, guided_decoding_backend="llguidance")
    assert "a compiled engine has xgrammar only" in problem


def test_an_adapter_option_becomes_its_argument_where_adapters_are_served(roomy: Path) -> None:
    with_adapters = running(roomy, backend="pytorch", **LORA)
    without = running(roomy, backend="pytorch")
    for name, (value, target, becomes) in ADAPTER_OPTIONS.items():
        served = running(roomy, backend="pytorch", **LORA, **{name: value})
        assert changed(with_adapters, served) == {target: becomes}, name
        assert changed(without, running(roomy, backend="pytorch", **{name: value})) == {}, name


def test_adapters_are_compiled_in_and_have_a_cache(roomy: Path) -> None:
    assert changed(building(roomy), building(roomy, **LORA, max_lora_rank=16)) == {
        "LLM.enable_lora": True,
        "LoraConfig.lora_target_modules": ["attn_q", "attn_v"],
        "LoraConfig.max_lora_rank": 16,
    }
    assert changed(running(roomy), running(roomy, **LORA, lora_cache_max_adapter_size=128)) == {
        "LLM.enable_lora": True,
        "PeftCacheConfig.device_cache_percent": 0.05,
        "PeftCacheConfig.max_adapter_size": 128,
    }


def test_adapters_of_a_checkpoint_have_a_configuration_of_their_own(roomy: Path) -> None:
    arguments = planned(roomy, backend="pytorch", **LORA, lora_dir="/adapters/one").running
    assert arguments["lora_config"] == {
        "class": "LoraConfig",
        "lora_dir": ["/adapters/one"],
        "lora_target_modules": ["attn_q", "attn_v"],
        "max_lora_rank": 64,
    }
    assert arguments["peft_cache_config"] == {"class": "PeftCacheConfig", "device_cache_percent": 0.05}


def test_an_engine_must_know_which_modules_adapters_change(roomy: Path) -> None:
    (problem,) = problems(roomy, enable_lora="true")
    assert problem.startswith("option.enable_lora=true (environment variable OPTION_ENABLE_LORA): a compiled engine")
    assert "option.lora_target_modules" in problem
    planned(roomy, backend="pytorch", enable_lora="true")
