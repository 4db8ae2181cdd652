from __future__ import annotations

import pytest

from djl_trtllm.config.disagreements import DISAGREEMENTS, Disagreement
from djl_trtllm.config.docs import options_page
from djl_trtllm.config.registry import OPTIONS

CHOSEN = {
    "max_input_len": 1024,
    "max_output_len": 512,
    "max_num_tokens": None,
    "max_rolling_batch_size": 32,
    "max_num_sequences": None,
    "kv_cache_free_gpu_mem_fraction": None,
    "max_tokens_in_paged_kv_cache": None,
    "batch_scheduler_policy": "max_utilization",
    "tokens_per_block": 64,
    "enable_kv_cache_reuse": False,
    "enable_trt_overlap": False,
    "enable_overlap_scheduler": None,
    "enable_chunked_prefill": False,
    "calib_size": 32,
    "calib_batch_size": 1,
    "smoothquant_alpha": 0.8,
    "multi_block_mode": False,
    "context_fmha_fp32_acc": False,
    "normalize_log_probs": False,
    "enable_build_cache": True,
    "cross_kv_cache_fraction": None,
    "predict_timeout": 240.0,
    "model_loading_timeout": 1200.0,
}


def test_the_defaults_are_the_choices() -> None:
    assert {row.option: OPTIONS[row.option].default for row in DISAGREEMENTS} == CHOSEN
    fraction = OPTIONS["kv_cache_free_gpu_mem_fraction"].option
    assert fraction.tensorrt.endswith("0.95 when not set") and fraction.pytorch.endswith("0.95 when not set")


@pytest.mark.parametrize("row", DISAGREEMENTS, ids=lambda row: row.option)
def test_each_row_has_two_opinions_a_choice_and_a_reason(row: Disagreement) -> None:
    assert len({value for _, value in row.said}) > 1
    assert row.choice and row.why
    assert f"| `{OPTIONS[row.option].key}` | {row.said[0][1]}" in options_page()


def test_the_lmi_document_counts_where_it_speaks() -> None:
    for row in DISAGREEMENTS:
        said = dict(row.said).get("lmi-trt-llm.md")
        if said is not None:
            assert row.choice.startswith(said), row.option
