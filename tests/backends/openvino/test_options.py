from __future__ import annotations

from djl_trtllm.backends.effects import Derived, Fixed, NoEffect, Passed, Target, has_effect
from djl_trtllm.backends.openvino.options import EFFECTS
from djl_trtllm.config.options.registry import OPTIONS


def test_the_options_that_openvino_has() -> None:
    effective = {name for name in EFFECTS if has_effect(OPTIONS[name], EFFECTS)}
    assert effective == {
        "awq_format",
        "dtype",
        "enable_kv_cache_reuse",
        "inference_num_threads",
        "kv_cache_dtype",
        "kv_cache_free_gpu_mem_fraction",
        "max_input_len",
        "max_num_sequences",
        "max_num_tokens",
        "max_output_len",
        "max_rolling_batch_size",
        "max_seq_len",
        "max_tokens_in_paged_kv_cache",
        "quantize",
        "stream_interval",
        "trust_remote_code",
    }


def test_targets_are_fields_of_its_scheduler() -> None:
    targets = {
        target for effect in EFFECTS.values() if isinstance(effect, Passed | Derived) for target in effect.targets
    }
    names = ("enable_prefix_caching", "max_num_batched_tokens", "num_kv_blocks")
    assert targets == {Target("SchedulerConfig", name) for name in names}


def test_every_reason_is_given() -> None:
    assert all(len(effect.reason) > 5 for effect in EFFECTS.values() if isinstance(effect, NoEffect | Fixed))
