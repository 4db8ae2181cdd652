from __future__ import annotations

import re

import pytest

from djl_trtllm.config import (
    Quantization,
    SchedulerPolicy,
)
from tests.config.helpers import from_text, problems_of


def test_the_lmi_documents_block_resolves() -> None:
    config = from_text(
        "option.model_id=gpt2\noption.tensor_parallel_degree=1\n"
        "option.max_rolling_batch_size=16 # default is 32\n"
        "option.max_input_len=256 # default is 1024\noption.max_output_len=256 # default is 512\n"
    )
    options = config.options
    assert (options.max_rolling_batch_size, options.max_input_len, options.max_output_len) == (16, 256, 256)
    assert [re.findall(r"serving\.properties:\d", warning) for warning in config.warnings] == [
        [f"serving.properties:{line}"] for line in (3, 4, 5)
    ]


@pytest.mark.parametrize("text", ["true", "TRUE", "1", "yes", "On"])
def test_true_in_many_spellings(text: str) -> None:
    assert from_text(f"option.trust_remote_code={text}").options.trust_remote_code is True


@pytest.mark.parametrize("text", ["false", "False", "0", "no", "OFF"])
def test_false_is_false(text: str) -> None:
    assert from_text(f"option.trust_remote_code={text}").options.trust_remote_code is False


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("option.max_input_len=lots", "a whole number (tokens), at least 1"),
        ("option.max_input_len=0", "at least 1"),
        ('option.max_input_len="256"', "without quotes"),
        ("option.max_input_len=4_096", "in digits only"),
        ("option.max_input_len=" + "9" * 5000, "a whole number"),
        ("option.trust_remote_code=maybe", "true or false"),
        ("option.kv_cache_free_gpu_mem_fraction=1.0", "greater than 0 and less than 1"),
        ("option.kv_cache_free_gpu_mem_fraction=0", "greater than 0 and less than 1"),
        ("option.predict_timeout=nan", "a number (seconds), greater than 0"),
        ("option.predict_timeout=1e999", "a number (seconds), greater than 0"),
        ("option.backend=tensorflow", "one of auto, tensorrt, pytorch"),
        ("option.tensor_parallel_degree=all", "at least 1 or max"),
        ("inference_address=https://0.0.0.0:8080", "for TLS set certificate_file"),
        ("inference_address=0.0.0.0:8080", "http://HOST:PORT"),
        ("inference_address=http://host:99999", "http://HOST:PORT"),
        ("inference_port=65536", "at most 65535"),
    ],
)
def test_a_wrong_value_names_key_value_place_and_expectation(line: str, expected: str) -> None:
    (problem,) = problems_of(f"# one line before\n{line}")
    key, _, value = line.partition("=")
    assert problem.startswith(f"{key}={value[:20]}")
    assert "serving.properties:2" in problem
    assert expected in problem


def test_a_wrong_variable_is_named() -> None:
    (problem,) = problems_of("", {"OPTION_MAX_INPUT_LEN": "x"})
    assert problem.startswith("OPTION_MAX_INPUT_LEN=x (environment): expected a whole number")


@pytest.mark.parametrize("text", ["MAX_UTILIZATION", "max_utilization"])
def test_words_in_either_case(text: str) -> None:
    config = from_text(f"option.batch_scheduler_policy={text}")
    assert config.options.batch_scheduler_policy is SchedulerPolicy.MAX_UTILIZATION


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("int8_weight_only", Quantization.INT8),
        ("int4_weight_only", Quantization.INT4),
        ("AWQ", Quantization.AWQ),
        ("none", None),
    ],
)
def test_quantize_by_any_of_its_names(word: str, meaning: Quantization | None) -> None:
    assert from_text(f"option.quantize={word}").options.quantize is meaning


def test_old_rolling_batch_names_are_accepted() -> None:
    for word in ("auto", "trtllm", "disable", "vllm", "lmi-dist", "deepspeed", "scheduler"):
        assert from_text(f"option.rolling_batch={word}").options.rolling_batch == word
    for word in ("trt-llm", "TensorRT-LLM", "trt_llm"):
        assert from_text(f"option.rolling_batch={word}").options.rolling_batch == "trtllm"


@pytest.mark.parametrize(
    "flag",
    [
        "remove_input_padding",
        "paged_kv_cache",
        "context_fmha",
        "use_paged_context_fmha",
        "context_fmha_fp32_acc",
        "multi_block_mode",
    ],
)
def test_flags_as_trtllm_build_writes_them(flag: str) -> None:
    """The Triton document builds with `--NAME=enable`."""
    for word, value in (("enable", True), ("disable", False)):
        assert getattr(from_text(f"option.{flag}={word}").options, flag) is value


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,2", (1, 2)), ("[1, 2]", (1, 2)), ("7", (7,)), ("7,", (7,)), ("1 , 2 # both", (1, 2)), ("none", None)],
)
def test_lists_of_numbers(text: str, value: tuple[int, ...] | None) -> None:
    assert from_text(f"option.max_attention_window={text}").options.max_attention_window == value


@pytest.mark.parametrize("text", ["1,x", "0", "[", "[]", "{}", "[[1]]", "[true]", ",", "1;2", "[1.5]", "1,,2"])
def test_what_is_no_list_of_numbers(text: str) -> None:
    (problem,) = problems_of(f"option.max_attention_window={text}")
    assert "whole numbers (tokens) with commas between them, each at least 1" in problem


def test_lists_of_names() -> None:
    assert from_text('option.exclude_modules=["lm_head", "a.b"]').options.exclude_modules == ("lm_head", "a.b")
    assert from_text("option.lora_target_modules=attn_q,attn_v").options.lora_target_modules == ("attn_q", "attn_v")
    assert from_text("option.clamp_val=[-1200.0,1200]").options.clamp_val == (-1200.0, 1200.0)
