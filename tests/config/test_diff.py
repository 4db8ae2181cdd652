from __future__ import annotations

import io

from rich.console import Console

from djl_trtllm.config.diff import diff_as_json, differences, render_diff
from djl_trtllm.config.masking import MASK

from .helpers import from_text


def test_only_values_that_differ_are_shown() -> None:
    one = from_text("option.max_input_len=8\noption.dtype=fp16")
    other = from_text("option.dtype=half", {"OPTION_MAX_NUM_TOKENS": "4096"})
    names = [found.declared.name for found in differences(one, other)]
    assert names == ["max_input_len", "max_output_len", "max_num_tokens", "max_rolling_batch_size"]
    assert differences(one, one) == ()


def test_both_sides_have_value_and_origin() -> None:
    one, other = from_text("option.max_attention_window=8,16"), from_text("option.max_input_len=4")
    assert diff_as_json(one, other)["max_attention_window"] == {
        "key": "option.max_attention_window",
        "sides": [
            {"value": [8, 16], "origin": "serving.properties:1"},
            {"value": None, "origin": "default"},
        ],
    }
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_diff(one, other, ("a", "b")))
    assert "8,16" in console.export_text()


def test_a_secret_is_masked_and_its_place_is_not() -> None:
    one, other = from_text("option.env=HF_TOKEN=hunter2\noption.rotary_base=1000000"), from_text("")
    shown = diff_as_json(one, other)
    assert shown["env"]["sides"][0] == {"value": f"HF_TOKEN={MASK}", "origin": "serving.properties:1"}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_diff(one, other, ("a", "b")))
    text = console.export_text()
    assert "hunter2" not in text and "1000000" in text
