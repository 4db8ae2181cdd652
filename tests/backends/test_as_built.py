"""An engine's own limits below what the user set, and within what the engine can do."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.backends.as_built import Bound, Built, apply, describe_limits
from djl_trtllm.config import Config, load
from tests.engines.helpers import configured

BUILT = Built(
    "build_config in /engine/config.json",
    {"max_rolling_batch_size": 256, "max_seq_len": 3072},
    {name: Bound(256, "max_batch_size") for name in ("max_rolling_batch_size", "max_num_sequences")},
    ("a note",),
)


def limits(config: Config) -> tuple[int, int | None]:
    return config.options.max_rolling_batch_size, config.options.max_seq_len


def test_what_nobody_set_is_the_engines_and_says_so() -> None:
    config = apply(configured(), BUILT)
    assert limits(config) == (256, 3072)
    assert str(config.origin("max_seq_len")) == "derived from build_config in /engine/config.json"
    assert not config.is_set("max_seq_len") and config.warnings == () and config.notes == ("a note",)


def test_what_the_user_set_below_the_engines_limit_stays(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.max_rolling_batch_size=64\n")
    config = apply(load(tmp_path, {"OPTION_MAX_SEQ_LEN": "1000"}), BUILT)
    assert limits(config) == (64, 1000)
    assert str(config.origin("max_rolling_batch_size")) == f"{tmp_path}/serving.properties:1"
    assert config.warnings == ()


def test_what_the_user_set_above_a_bound_is_lowered_to_it_and_reported() -> None:
    asked = configured(max_rolling_batch_size=512, max_seq_len=9000)
    config = apply(asked, BUILT)
    assert limits(config) == (256, 9000)  # nothing bounds the second
    (warning,) = config.warnings
    assert warning == (
        "option.max_rolling_batch_size=512 (environment variable OPTION_MAX_ROLLING_BATCH_SIZE): the engine was "
        "compiled with max_batch_size 256, which applies; leave the option out, or compile the checkpoint again for "
        "more"
    )
    assert str(config.origin("max_rolling_batch_size")) == (
        "derived from build_config in /engine/config.json, which lowers 512 (environment variable "
        "OPTION_MAX_ROLLING_BATCH_SIZE)"
    )
    assert config.is_set("max_rolling_batch_size")
    assert apply(configured(max_rolling_batch_size=256), BUILT).warnings == ()


def test_what_another_option_of_the_user_bounds_is_not_said_of_the_engine() -> None:
    built = Built("build_config", {}, {"max_input_len": Bound(1024, "a longest prompt of", "max_num_tokens")})
    config = apply(configured(max_num_tokens=1024, max_input_len=3000), built)
    assert config.options.max_input_len == 1024
    (warning,) = config.warnings[-1:]
    assert warning == (
        "option.max_input_len=3000 (environment variable OPTION_MAX_INPUT_LEN): option.max_num_tokens=1024 "
        "(environment variable OPTION_MAX_NUM_TOKENS) leaves a longest prompt of 1024, which applies; change one of "
        "them"
    )
    assert str(config.origin("max_input_len")) == (
        "derived from option.max_num_tokens=1024 (environment variable OPTION_MAX_NUM_TOKENS), which lowers 3000 "
        "(environment variable OPTION_MAX_INPUT_LEN)"
    )


def test_the_presets_of_another_server_give_way_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model_metadata:\n  engine_repository: acme/engine\n")
    preset = load(tmp_path, {})
    assert preset.options.max_rolling_batch_size == 128
    assert limits(apply(preset, BUILT)) == (256, 3072)


def test_limits_are_reported_with_their_origins() -> None:
    config = apply(configured(max_num_tokens=4096, max_input_len=100), BUILT)
    assert describe_limits(config) == (
        "limits: option.max_rolling_batch_size=256, option.max_seq_len=3072 (derived from build_config in "
        "/engine/config.json); option.max_input_len=4096 (derived from option.max_num_tokens=4096 (environment "
        "variable OPTION_MAX_NUM_TOKENS), which raises 100 (environment variable OPTION_MAX_INPUT_LEN)); "
        "option.max_output_len=4096 (derived from option.max_num_tokens=4096 (environment variable "
        "OPTION_MAX_NUM_TOKENS)); option.max_num_tokens=4096 (environment variable OPTION_MAX_NUM_TOKENS); "
        "option.max_beam_width=1 (default)"
    )
