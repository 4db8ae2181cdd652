from __future__ import annotations

from djl_trtllm.config.diff import diff_as_json, differences, render_diff
from djl_trtllm.config.explain import shown_value
from djl_trtllm.config.masking import MASK
from djl_trtllm.config.options.registry import OPTIONS
from tests.config.helpers import from_text, items, printed


def test_only_values_that_differ_are_shown() -> None:
    one = from_text("option.max_input_len=8\noption.dtype=fp16")
    other = from_text("option.dtype=half", {"OPTION_MAX_NUM_TOKENS": "4096"})
    names = [declared.name for declared in differences(one, other)]
    assert names == ["max_input_len", "max_output_len", "max_num_tokens", "max_rolling_batch_size"]
    assert differences(one, one) == []


def test_both_sides_have_value_and_origin() -> None:
    one, other = from_text("option.max_attention_window=8,16"), from_text("option.max_input_len=4")
    assert diff_as_json(one, other)["max_attention_window"] == {
        "key": "option.max_attention_window",
        "sides": [
            {"value": [8, 16], "origin": "serving.properties:1"},
            {"value": None, "origin": "default"},
        ],
    }
    text = printed(render_diff(one, other, ("a", "b")))
    assert text.splitlines()[0] == "a and b: 2 options differ"
    assert items(text) == {
        "option.max_input_len": {"first": "1024 tokens (default)", "second": "4 tokens (serving.properties:1)"},
        "option.max_attention_window": {
            "first": "8,16 (serving.properties:1)",
            "second": "not set: the longest sequence (default)",
        },
    }
    assert printed(render_diff(one, one, ("a", "b"))).strip() == "a and b: the same"


def test_a_secret_is_masked_and_its_place_is_not() -> None:
    one, other = from_text("option.env=HF_TOKEN=hunter2\noption.rotary_base=1000000"), from_text("")
    shown = diff_as_json(one, other)
    assert shown["env"]["sides"][0] == {"value": f"HF_TOKEN={MASK}", "origin": "serving.properties:1"}
    text = printed(render_diff(one, other, ("a", "b")))
    assert "hunter2" not in text and "1000000" in text


def test_a_narrow_list_breaks_no_word() -> None:
    path = "/" + "x" * 60
    one, other = from_text(f"option.model_id={path}"), from_text("", {"OPTION_MODEL_ID": path[1:]})
    lines = render_diff(one, other, ("a", "b"), 70).plain.splitlines()
    assert [line.strip() for line in lines[3:]] == [
        f"first   {shown_value(OPTIONS['model_id'], path)}",
        "(serving.properties:1)",
        f"second  {path[1:]}",
        "(environment variable OPTION_MODEL_ID)",
    ]


def test_text_in_brackets_is_shown_as_it_is() -> None:
    one, other = from_text("option.model_id=[red]m[/red]"), from_text("")
    assert "[red]m[/red]" in printed(render_diff(one, other, ("a", "b")))
