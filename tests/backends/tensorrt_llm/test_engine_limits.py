"""What an engine's config.json says, as options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.as_built import Bound, Built
from djl_trtllm.backends.tensorrt_llm.built_engine import BuiltEngine, read_built_engine
from djl_trtllm.backends.tensorrt_llm.engine_limits import built_limits
from tests.engines.helpers import configured, write_tensorrt_engine

SIZES: dict[str, Any] = {
    "max_batch_size": 256,
    "max_input_len": 2048,
    "max_seq_len": 3072,
    "max_num_tokens": 8192,
    "max_beam_width": 1,
}


def limits(built: dict[str, Any] | None = None, **options: object) -> Built:
    return built_limits(configured(**options), BuiltEngine(Path("/engine"), **SIZES | (built or {})))


def test_batch_lengths_tokens_and_beams_are_the_engines() -> None:
    built = limits()
    assert built.where == "build_config in /engine/config.json"
    assert built.defaults == {
        "max_rolling_batch_size": 256,
        "max_input_len": 3071,
        "max_output_len": 3071,
        "max_seq_len": 3072,
        "max_num_tokens": 8192,
        "max_beam_width": 1,
    }
    assert built.bounds == {
        "max_rolling_batch_size": Bound(256, "max_batch_size"),
        "max_num_sequences": Bound(256, "max_batch_size"),
        "max_num_tokens": Bound(8192, "max_num_tokens"),
        "max_seq_len": Bound(3072, "max_seq_len"),
        "max_input_len": Bound(3071, "a longest prompt of"),
        "max_output_len": Bound(3071, "a longest output of"),
    }


@pytest.mark.parametrize(
    ("built", "longest"),
    [
        ({"remove_input_padding": False}, 2048),
        ({"context_fmha": False}, 2048),
        ({"max_num_tokens": 1024}, 1024),
        ({"max_num_tokens": 1024, "use_paged_context_fmha": False}, 1024),
        ({"max_num_tokens": 1024, "use_paged_context_fmha": True}, 3071),
        ({"max_num_tokens": 2048, "use_paged_context_fmha": True}, 2048),
        ({"max_num_tokens": None}, 3071),
    ],
)
def test_the_longest_prompt_is_what_the_runtime_takes(built: dict[str, Any], longest: int) -> None:
    assert limits(built).defaults["max_input_len"] == longest
    assert limits(built).bounds["max_input_len"] == Bound(longest, "a longest prompt of")


def test_prompts_are_split_where_the_engine_was_compiled_for_longer_ones_than_an_iteration() -> None:
    built = {"max_num_tokens": 1024, "use_paged_context_fmha": True}
    assert limits(built).defaults["enable_chunked_prefill"] is True
    assert "enable_chunked_prefill" not in limits({**built, "max_input_len": 1024}).defaults
    assert "enable_chunked_prefill" not in limits({**built, "max_input_len": None}).defaults
    assert "enable_chunked_prefill" not in limits({**built, "remove_input_padding": False}).defaults
    refused = limits(built, enable_chunked_prefill="false")
    assert refused.defaults["max_input_len"] == 1024 and "enable_chunked_prefill" not in refused.defaults


def test_a_users_smaller_sequence_or_iteration_bounds_the_other_defaults() -> None:
    shorter = limits(max_seq_len=512)
    assert (shorter.defaults["max_input_len"], shorter.defaults["max_output_len"]) == (511, 511)
    assert limits(max_num_tokens=256).defaults["max_input_len"] == 256
    assert limits(max_num_tokens=256, enable_chunked_prefill="true").defaults["max_input_len"] == 3071


def test_what_a_users_smaller_sequence_or_iteration_bounds_is_not_the_engines() -> None:
    shorter = limits(max_seq_len=512).bounds
    assert shorter["max_input_len"] == Bound(511, "a longest prompt of", "max_seq_len")
    assert shorter["max_output_len"] == Bound(511, "a longest output of", "max_seq_len")
    assert limits(max_num_tokens=256).bounds["max_input_len"] == Bound(256, "a longest prompt of", "max_num_tokens")
    assert limits(max_num_tokens=9999, max_seq_len=9999).bounds == limits().bounds


def test_a_users_smaller_batch_of_the_engine_is_that_of_the_server_too() -> None:
    assert limits(max_num_sequences=64).defaults["max_rolling_batch_size"] == 64
    assert limits(max_num_sequences=300).defaults["max_rolling_batch_size"] == 256
    assert limits(max_batch_size=64).defaults["max_rolling_batch_size"] == 64
    assert "max_rolling_batch_size" not in limits({"max_batch_size": None}, max_num_sequences=64).defaults


def test_what_config_json_does_not_have_stays_as_it_is() -> None:
    built = built_limits(configured(), BuiltEngine(Path("/engine")))
    assert built.defaults == {} and built.bounds == {}
    assert "max_num_sequences" not in limits().defaults
    assert "max_lora_rank" not in limits({"max_lora_rank": 16}).defaults
    assert limits({"lora": True, "max_lora_rank": 16}).defaults["max_lora_rank"] == 16


def test_an_engine_of_before_0_11_has_prompt_and_output_and_no_sum_of_them(tmp_path: Path) -> None:
    path = write_tensorrt_engine(
        tmp_path / "engine", max_seq_len=None, max_input_len=2048, max_output_len=1024, max_num_tokens=None
    )
    engine = read_built_engine(path)
    assert (engine.max_seq_len, engine.max_output_len) == (3072, 1024)
    built = built_limits(configured(), engine)
    assert (built.defaults["max_seq_len"], built.defaults["max_output_len"]) == (3072, 1024)
    assert read_built_engine(write_tensorrt_engine(path, max_seq_len=None, max_input_len=2048)).max_seq_len is None
