"""What each option becomes on TensorRT-LLM: a field that is really there, or a reason why it has no effect."""

from __future__ import annotations

import pytest

from djl_trtllm.config import Backend
from djl_trtllm.config.registry import OPTIONS, DeclaredOption
from djl_trtllm.config.target import named_targets
from djl_trtllm.config.tensorrt_llm_names import has, members

VERSION = "1.2.1"

# What TensorRT-LLM calls it, for options that carry one value straight to one field.
RENAMED = {
    "tensor_parallel_degree": "LLM(tensor_parallel_size)",
    "pipeline_parallel_degree": "LLM(pipeline_parallel_size)",
    "batch_scheduler_policy": "SchedulerConfig.capacity_scheduler_policy",
    "kv_cache_free_gpu_mem_fraction": "KvCacheConfig.free_gpu_memory_fraction, 0.95 when not set",
    "max_tokens_in_paged_kv_cache": "KvCacheConfig.max_tokens",
    "enable_kv_cache_reuse": "KvCacheConfig.enable_block_reuse, and the engine needs use_paged_context_fmha",
    "tokens_per_block": "PluginConfig.tokens_per_block and KvCacheConfig.tokens_per_block",
    "max_num_sequences": "BuildConfig.max_batch_size, and LLM(max_batch_size) where it is below max_rolling_batch_size",
    "max_rolling_batch_size": "LLM(max_batch_size), and BuildConfig.max_batch_size where max_num_sequences is not set",
    "max_num_tokens": "BuildConfig.max_num_tokens and LLM(max_num_tokens)",
    "smoothquant_alpha": "QuantConfig.smoothquant_val, with smoothquant",
    "awq_block_size": "QuantConfig.group_size",
    "calib_device": "CalibConfig.device",
    "context_fmha_fp32_acc": "ExtendedRuntimePerfKnobConfig.enable_context_fmha_fp32_acc",
}


@pytest.mark.parametrize("declared", OPTIONS.values(), ids=lambda declared: declared.name)
@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
def test_every_target_on_tensorrt_llm_is_a_field_it_has(backend: str, declared: DeclaredOption) -> None:
    for target in named_targets(getattr(declared.option, backend)):
        owner = f"LLM.{backend}" if target.owner == "LLM" else target.owner
        assert has(owner, target.name, VERSION), str(target)


@pytest.mark.parametrize(("name", "target"), RENAMED.items())
def test_options_of_the_documents_reach_the_field_of_todays_name(name: str, target: str) -> None:
    assert OPTIONS[name].option.tensorrt == target


def test_an_option_with_tensorrt_llms_own_name_reaches_that_field() -> None:
    for holder in ("KvCacheConfig", "SchedulerConfig", "BuildConfig", "PluginConfig", "CalibConfig", "QuantConfig"):
        for name in members(holder, VERSION).keys() & OPTIONS.keys():
            option = OPTIONS[name].option
            text = f"{option.effect_on(Backend.TENSORRT)} {option.effect_on(Backend.PYTORCH)}"
            reached = {target.name for target in named_targets(text)}
            assert name in reached or "no effect" in text, name


def test_an_option_reaches_a_backend_or_says_why_not() -> None:
    for declared in OPTIONS.values():
        option = declared.option
        if option.retired or option.effect:
            continue
        for text in (option.tensorrt, option.pytorch):
            reason = text.startswith(("no effect: ", "ignored: ", "refused ")) and len(text) > 20
            assert (
                reason
                or named_targets(text)
                or declared.name in ("trust_remote_code", "logits_dtype", "kv_cache_dtype")
            ), declared.name
