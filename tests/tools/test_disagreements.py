from __future__ import annotations

from djl_trtllm.backends.options import describe
from djl_trtllm.config import Backend
from djl_trtllm.config.options.registry import OPTIONS
from tools.disagreements import DISAGREEMENTS
from tools.options_docs import pages

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
    fraction = OPTIONS["kv_cache_free_gpu_mem_fraction"]
    assert describe(fraction, Backend.TENSORRT).endswith("0.95 when not set")


def test_each_row_has_two_opinions_a_choice_and_a_reason() -> None:
    lacking = [
        row.option
        for row in DISAGREEMENTS
        if len({value for _, value in row.said}) < 2 or not row.choice or not row.why
    ]
    assert lacking == []


def test_the_choice_is_the_default_or_what_stands_in_its_place() -> None:
    choices = {row.option: row.choice for row in DISAGREEMENTS}
    assert (choices["max_input_len"], choices["enable_kv_cache_reuse"]) == ("1024", "false")
    assert choices["max_num_tokens"] == OPTIONS["max_num_tokens"].option.default_note != ""


def test_the_page_shows_every_row() -> None:
    page = pages()["options/rules.md"]
    first = [f"{row.said[0][1]} (" for row in DISAGREEMENTS]
    assert [cells for cells in first if cells not in page] == []


def test_the_lmi_document_counts_where_it_speaks() -> None:
    said = {
        row.option: (dict(row.said)["lmi-trt-llm.md"], row.choice)
        for row in DISAGREEMENTS
        if "lmi-trt-llm.md" in dict(row.said)
    }
    assert len(said) > 8
    assert [option for option, (text, choice) in said.items() if not choice.startswith(text)] == []
