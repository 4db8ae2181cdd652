"""An effect describes itself, and an option that a map does not name has none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from djl_trtllm.backends.effects import (
    Derived,
    Effect,
    Effects,
    Fixed,
    Needs,
    NoEffect,
    Passed,
    Target,
    bounded,
    describe,
    deviations,
    effective_value,
    fields,
    has_effect,
    needing,
    without,
)
from djl_trtllm.config import load
from djl_trtllm.config.options.registry import OPTIONS
from tests.config.helpers import from_text

SIZE = Target("LLM", "tensor_parallel_size")
DTYPE = Target("KvCacheConfig", "dtype")


@pytest.mark.parametrize(
    ("effect", "text"),
    [
        (Passed((DTYPE,)), "KvCacheConfig.dtype"),
        (Passed((SIZE, DTYPE)), "LLM(tensor_parallel_size) and KvCacheConfig.dtype"),
        (Passed((DTYPE,), when_set=True), "KvCacheConfig.dtype, when set"),
        (Derived("fp8 only", (DTYPE,)), "KvCacheConfig.dtype: fp8 only"),
        (Derived("limit at admission"), "limit at admission"),
        (NoEffect("one GPU"), "no effect: one GPU"),
        (Fixed(True, "it has no switch"), "always true: it has no switch"),
        (Passed((DTYPE,), needs=Needs("enable_lora", True)), "KvCacheConfig.dtype, with option.enable_lora=true"),
        (
            Derived("limit", bound="max_sequences"),
            "limit, or less where model, engine or memory allow no more",
        ),
    ],
)
def test_an_effect_describes_itself(effect: Effect, text: str) -> None:
    assert str(effect) == text


def test_fields_have_the_names_of_their_options_or_others() -> None:
    assert fields("KvCacheConfig", "host_cache_size", kv_cache_dtype="dtype") == {
        "host_cache_size": Passed((Target("KvCacheConfig", "host_cache_size"),)),
        "kv_cache_dtype": Passed((DTYPE,)),
    }
    assert without("why", "a", "b") == {"a": NoEffect("why"), "b": NoEffect("why")}


def test_an_option_that_a_map_does_not_name_has_no_effect() -> None:
    dtype, strict, legacy = OPTIONS["dtype"], OPTIONS["strict"], OPTIONS["load_by_shard"]
    assert describe(dtype, {}, "abacus") == "no effect on abacus"
    assert describe(dtype, {"dtype": Derived("beads")}, "abacus") == "beads"
    assert describe(strict, {}, "abacus") == strict.option.effect
    assert describe(legacy, {}, "abacus").startswith("no effect any more: ")
    assert [has_effect(option, {}) for option in (dtype, strict, legacy)] == [False, True, False]
    assert not has_effect(dtype, without("why", "dtype"))
    assert has_effect(dtype, fields("C", "dtype"))


def test_options_deviations_are_named_with_value_origin_and_reason() -> None:
    config = load(None, {"OPTION_TOKENS_PER_BLOCK": "128", "OPTION_MAX_INPUT_LEN": "8", "OPTION_MPI_MODE": "true"})
    effects = {"max_input_len": Derived("limit"), **without("blocks are fixed", "tokens_per_block")}
    tokens, mpi_mode = deviations(config, effects, "abacus")
    assert tokens == (
        "option.tokens_per_block = 128 tokens (environment variable OPTION_TOKENS_PER_BLOCK): "
        "no effect: blocks are fixed"
    )
    assert mpi_mode.startswith("option.mpi_mode = true (environment variable OPTION_MPI_MODE): no effect: ")
    assert deviations(config, {}, "abacus")[0].startswith("option.max_input_len = 8 tokens")


def test_an_option_that_is_always_the_same_is_named_where_it_was_to_be_another() -> None:
    effects: Effects = {"tokens_per_block": Fixed(32, "blocks are fixed"), "max_input_len": Derived("limit")}
    other = from_text("option.tokens_per_block=128")
    (line,) = deviations(other, effects, "abacus")
    assert line == "option.tokens_per_block = 128 tokens (serving.properties:1): always 32: blocks are fixed"
    same = from_text("option.tokens_per_block=32\noption.max_input_len=8")
    assert deviations(same, effects, "abacus") == ()
    assert not has_effect(OPTIONS["tokens_per_block"], effects)
    values = [effective_value(other, effects, name) for name in ("tokens_per_block", "max_input_len", "max_seq_len")]
    assert values == [32, 1024, None]


def test_a_limit_is_named_where_the_plan_lowers_it() -> None:
    effects = bounded({"max_seq_len": Derived("limit"), "max_num_tokens": Derived("tokens")})
    config = from_text("option.max_seq_len=50\noption.max_num_tokens=7")
    assert deviations(config, effects, "abacus", SimpleNamespace(max_seq_len=50)) == ()
    assert deviations(config, effects, "abacus") == ()
    (line,) = deviations(config, effects, "abacus", SimpleNamespace(max_seq_len=49))
    assert line == f"option.max_seq_len = 50 tokens (serving.properties:1): 49 tokens here: {effects['max_seq_len']}"
    assert deviations(from_text("option.max_seq_len=none"), effects, "abacus", SimpleNamespace(max_seq_len=9)) == ()


def test_an_option_without_its_switch_is_named() -> None:
    effects = {
        "enable_lora": Derived("adapters"),
        **needing("enable_lora", True, fields("LoraConfig", "max_lora_rank")),
    }
    (line,) = deviations(from_text("option.max_lora_rank=8"), effects, "abacus")
    assert line.endswith("(serving.properties:1): no effect without option.enable_lora=true")
    assert deviations(from_text("option.max_lora_rank=8\noption.enable_lora=true"), effects, "abacus") == ()


def test_an_option_that_is_a_warning_when_it_is_set_is_not_named_again() -> None:
    config = from_text("option.load_by_shard=true")
    assert any("has no effect any more" in warning for warning in config.warnings)
    assert deviations(config, {}, "abacus") == ()


def test_an_option_that_a_warning_or_a_note_of_the_plan_names_is_not_named_again() -> None:
    config = from_text("engine=DeepSpeed")
    assert "another engine of DJL Serving and has no effect" in config.warnings[0]
    assert deviations(config, {}, "abacus") == ()
    config, effects = from_text("option.max_seq_len=50"), bounded({"max_seq_len": Derived("limit")})
    plan = SimpleNamespace(max_seq_len=9, notes=("9 tokens, and not 50 as from option.max_seq_len=50 (serving.prop",))
    assert len(deviations(config, effects, "abacus", plan)) == 1
    plan.notes = ("9 tokens, and not 50 as from option.max_seq_len=50 (serving.properties:1)",)
    assert deviations(config, effects, "abacus", plan) == ()


def test_no_secret_is_shown() -> None:
    config = from_text("keystore_pass=hunter2\noption.env=HF_TOKEN=hunter2")
    lines = deviations(config, {}, "abacus")
    assert len(lines) == 2 and "hunter2" not in "\n".join(lines)
