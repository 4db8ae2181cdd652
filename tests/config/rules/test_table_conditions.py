"""One test per rule of the table, by the name of the rule."""

from __future__ import annotations

import pytest

from djl_trtllm.config import Config
from djl_trtllm.config.rules.running import RUNNING_RULES
from djl_trtllm.config.rules.table import RULES, check_model
from djl_trtllm.errors import ConfigError
from tests.config.helpers import from_text, problems_of

PLACE = "(serving.properties:1)"


def with_model(text: str, model_type: str | None = None, *, is_engine: bool = False) -> Config:
    return check_model(from_text(text), model_type, is_engine)


def told(lines: tuple[str, ...], part: str) -> bool:
    return any(part in line for line in lines)


def test_engine_of_djl_serving() -> None:
    (warning,) = from_text("engine=DeepSpeed").warnings
    assert warning == (
        f"engine=DeepSpeed {PLACE} is another engine of DJL Serving and has no effect: option.backend chooses the "
        "engine; under DJL Serving write engine=Python"
    )
    for engine in ("Python", "MPI", "mpi"):
        assert from_text(f"engine={engine}").warnings == ()


def test_rotary_scaling_pair() -> None:
    warning = f"option.rotary_scaling_type=linear {PLACE} needs option.rotary_scaling_factor beside it"
    pair = from_text("option.rotary_scaling_type=linear").warnings
    assert told(pair, f"{warning}: write option.rotary_scaling_factor=2, or neither")
    pair = from_text("option.rotary_scaling_factor=2").warnings
    assert told(pair, "needs option.rotary_scaling_type beside it: write option.rotary_scaling_type=linear, or neither")
    both = from_text("option.rotary_scaling_type=dynamic\noption.rotary_scaling_factor=2")
    assert not told(both.warnings, "beside it")
    assert not from_text("").warnings


def test_rotary_scaling_words() -> None:
    (problem,) = problems_of("option.rotary_scaling_type=yarn")
    assert problem.startswith(f"option.rotary_scaling_type=yarn {PLACE}: expected one of linear, dynamic")


def test_rotary_scaling_range() -> None:
    for factor in ("1", "1.0", "0.5", "-2"):
        (problem,) = problems_of(f"option.rotary_scaling_factor={factor}")
        assert "expected a number, greater than 1" in problem
    assert from_text("option.rotary_scaling_factor=1.01").options.rotary_scaling_factor == 1.01


def test_rotary_dim_family() -> None:
    (note,) = with_model("option.rotary_dim=64", "llama").notes
    assert note == f"option.rotary_dim=64 {PLACE} is documented for GPT-J only, and this model is llama"
    assert with_model("option.rotary_dim=64", "gptj").notes == ()
    assert with_model("", "llama").notes == ()
    assert with_model("option.rotary_dim=64", None).notes == ()


def test_rotary_base_family() -> None:
    (note,) = with_model("option.rotary_base=10000", "falcon").notes
    assert "is documented for Llama, InternLM and Qwen only, and this model is falcon" in note
    for family in ("llama", "internlm", "internlm2", "qwen", "qwen2"):
        assert with_model("option.rotary_base=10000", family).notes == ()


def test_use_fused_mlp_family() -> None:
    (note,) = with_model("option.use_fused_mlp=true", "mistral").notes
    assert "is documented for Llama only" in note
    assert with_model("option.use_fused_mlp=true", "llama").notes == ()
    assert with_model("option.use_fused_mlp=false", "mistral").notes == ()


def test_multi_block_mode_family() -> None:
    (note,) = with_model("option.multi_block_mode=true", "qwen2").notes
    assert "early engines did not have it for Qwen (this model is qwen2); today's kernels do" in note
    assert with_model("option.multi_block_mode=true", "llama").notes == ()
    assert with_model("option.multi_block_mode=false", "qwen2").notes == ()


def test_smoothquant_family() -> None:
    (warning,) = with_model("option.quantize=smoothquant", "qwen2").warnings
    assert warning.startswith(
        f"option.quantize=smoothquant {PLACE} is documented for Llama, Mistral, InternLM and Baic"
    )
    assert "option.quantize=fp8" in warning
    for family in ("llama", "mistral", "internlm2", "baichuan"):
        assert with_model("option.quantize=smoothquant", family).warnings == ()
    assert with_model("option.quantize=int8", "qwen2").warnings == ()


def test_smoothquant_parts() -> None:
    (warning,) = from_text("option.smoothquant_alpha=0.5").warnings
    assert warning == (
        f"option.smoothquant_alpha=0.5 {PLACE} has no effect without option.quantize=smoothquant: add that, or leave "
        "it out"
    )
    for name in ("smoothquant_per_token", "smoothquant_per_channel", "multi_query_mode"):
        assert told(from_text(f"option.{name}=true").warnings, "without option.quantize=smoothquant")
        quantised = from_text(f"option.{name}=true\noption.quantize=smoothquant")
        assert not told(quantised.warnings, "without option.quantize")
    assert from_text("option.quantize=smoothquant\noption.smoothquant_alpha=0.5").warnings == ()


def test_awq_family() -> None:
    (note,) = with_model("option.quantize=awq", "qwen2").notes
    assert "for Llama and Mistral only (this model is qwen2); today's compilers take it" in note
    assert with_model("option.quantize=awq", "llama").notes == ()
    assert with_model("option.quantize=awq", "mistral").notes == ()


def test_awq_parts() -> None:
    for line in ("option.awq_format=int4_awq", "option.awq_block_size=64", "option.awq_calib_size=8"):
        assert told(from_text(line).warnings, f"{line} {PLACE} has no effect without option.quantize=awq")
        assert from_text(f"{line}\noption.quantize=awq").warnings == ()
    assert told(from_text("option.awq_calib_size=8\noption.quantize=fp8").warnings, "without option.quantize=awq")
    assert from_text("option.calib_size=8\noption.quantize=fp8").warnings == ()
    assert from_text("option.awq_block_size=64\noption.quant_algo=W4A16_AWQ").warnings == ()


def test_quantize_compiled() -> None:
    with pytest.raises(ConfigError) as caught:
        with_model("option.quantize=awq", "llama", is_engine=True)
    (problem,) = caught.value.problems
    assert problem.startswith(f"option.quantize=awq {PLACE}: the model is a compiled engine")
    assert "remove option.quantize, or serve the checkpoint" in problem
    with pytest.raises(ConfigError, match=r"remove option\.quant_algo"):
        with_model("option.quant_algo=FP8", "llama", is_engine=True)
    with_model("option.quantize=none", "llama", is_engine=True)
    with_model("option.quantize=awq", "llama", is_engine=False)
    # An engine that says it was compiled so is what the option asks for.
    check_model(from_text("option.quantize=awq"), "llama", True, compiled_as="awq")
    with pytest.raises(ConfigError):
        check_model(from_text("option.quantize=awq"), "llama", True, compiled_as="none")


def test_chatglm_version() -> None:
    (note,) = with_model("", "chatglm").notes
    assert note.startswith(
        "option.chatglm_model_version is not set and this model is chatglm: LMI containers require it"
    )
    assert with_model("option.chatglm_model_version=chatglm3_6b", "chatglm").notes == ()
    assert with_model("", "llama").notes == ()


def test_model_version_family() -> None:
    for option, family, other in (
        ("chatglm_model_version=chatglm3_6b", "chatglm", "gpt2"),
        ("gpt_model_version=santacoder", "gpt_bigcode", "llama"),
    ):
        (note,) = with_model(f"option.{option}", other).notes
        assert note.endswith(f"only, and this model is {other}")
        assert with_model(f"option.{option}", family).notes == ()


def test_memory_fraction_range() -> None:
    for fraction in ("0", "0.0", "1", "1.0", "1.5", "-0.1"):
        (problem,) = problems_of(f"option.kv_cache_free_gpu_mem_fraction={fraction}")
        assert "greater than 0 and less than 1; for example option.kv_cache_free_gpu_mem_fraction=0.9" in problem
    assert from_text("option.free_gpu_memory_fraction=0.95").options.kv_cache_free_gpu_mem_fraction == 0.95


def test_cap_and_fraction() -> None:
    text = "option.max_tokens=10000\noption.free_gpu_memory_fraction=0.1"
    (note,) = from_text(text).notes
    assert note.startswith(f"option.max_tokens=10000 {PLACE} and option.free_gpu_memory_fraction=0.1")
    assert "the smaller of 10000 tokens and what fits into 10 % of the memory" in note
    assert from_text("option.max_tokens=10000").notes == ()


def test_a_quantisation_by_tensorrt_llms_name_is_one_by_its_method() -> None:
    """`quant_algo` counts before `quantize`."""
    methods = {
        "W4A16_AWQ": "awq",
        "W4A8_AWQ": "awq",
        "W8A8_SQ_PER_CHANNEL": "smoothquant",
        "FP8": "fp8",
        "FP8_BLOCK_SCALES": "fp8",
        "INT8": None,
        "NO_QUANT": None,
    }
    parts = "option.awq_format=int4_awq\noption.smoothquant_alpha=0.5\noption.calib_size=8\noption.quantize=int4\n"
    found = {}
    for algorithm in methods:
        warnings = from_text(f"{parts}option.quant_algo={algorithm}").warnings
        awq = told(warnings, "without option.quantize=awq: add that, or leave it out")
        smoothquant = told(warnings, "without option.quantize=smoothquant: add that, or leave it out")
        samples = told(warnings, "option.calib_size=8")
        found[algorithm] = {
            (True, False, False): "smoothquant",
            (True, True, False): "fp8",
            (False, True, False): "awq",
            (True, True, True): None,
        }[awq, smoothquant, samples]
    assert found == methods


def test_several_parts_without_their_quantisation_are_reported_together() -> None:
    (warning,) = from_text("option.awq_format=int4_awq\noption.awq_block_size=64").warnings
    assert warning == (
        f"option.awq_format=int4_awq {PLACE} and option.awq_block_size=64 (serving.properties:2) have no effect "
        "without option.quantize=awq: add that, or leave it out"
    )


def test_a_quantisation_is_cited_as_it_was_written() -> None:
    (warning,) = with_model("option.quant_algo=W8A8_SQ_PER_CHANNEL", "qwen2").warnings
    assert warning.startswith(f"option.quant_algo=W8A8_SQ_PER_CHANNEL {PLACE} is documented for Llama, Mistral")
    (note,) = with_model("option.quant_algo=W4A16_AWQ", "qwen2").notes
    assert note.startswith(f"option.quant_algo=W4A16_AWQ {PLACE}: early containers")


def test_a_model_of_unknown_kind_breaks_no_rule_of_families() -> None:
    text = (
        "option.rotary_dim=64\noption.rotary_base=10000\noption.use_fused_mlp=true\noption.multi_block_mode=true\n"
        "option.quantize="
    )
    for method in ("awq", "smoothquant"):
        config = from_text(text + method)
        assert check_model(config, None, False) is config


def test_a_family_is_known_by_the_beginning_of_its_name_however_it_is_written() -> None:
    for kind in ("gptj", "gpt-j", "GPT_J", "gptj-6b"):
        assert with_model("option.rotary_dim=64", kind).notes == ()
    assert len(with_model("option.rotary_dim=64", "agptj").notes) == 1


def test_every_rule_has_its_test() -> None:
    rules = [rule for rule in RULES if rule not in RUNNING_RULES]
    assert len(rules) > 10
    assert [rule.name for rule in rules if f"test_{rule.name}" not in globals()] == []
