from __future__ import annotations

from djl_trtllm.config import Layer
from djl_trtllm.config.compat.foreign_format import ForeignSetting, Reading, presets
from djl_trtllm.config.masking import MASK
from djl_trtllm.config.sources.origin import Origin, OriginKind
from djl_trtllm.config.sources.properties import Setting


def test_an_entry_is_shown_with_secrets_masked_and_long_values_shortened() -> None:
    assert ForeignSetting("a", "1", 3).shown == "a=1"
    assert ForeignSetting("hf_token", "hunter2", 3).shown == f"hf_token={MASK}"
    assert ForeignSetting("a", "x" * 60, 3).shown == "a=" + "x" * 60
    assert ForeignSetting("a", "x" * 61, 3).shown == "a=" + "x" * 57 + "..."
    assert ForeignSetting("a", "b\n\x1b", 3).shown == r"a=b\n\x1b"


def test_an_entry_sets_a_key_to_its_text_or_to_what_that_means() -> None:
    reading = Reading("f")
    reading.set("option.max_beam_width", ForeignSetting("max_beam_width", "2", 3))
    reading.set("option.batch_scheduler_policy", ForeignSetting("policy", "old", 4), "new")
    reading.set("option.dtype", ForeignSetting("dtype", "same", 5), "same")
    source = reading.source()
    assert source.layer is Layer.FOREIGN
    assert source.settings == (
        Setting("option.max_beam_width", "2", Origin.file("f", 3), "max_beam_width", None, alone=True),
        Setting("option.batch_scheduler_policy", "new", Origin.file("f", 4), "policy", "old", alone=True),
        Setting("option.dtype", "same", Origin.file("f", 5), "dtype", None, alone=True),
    )


def test_entries_with_one_answer_share_a_line() -> None:
    reading = Reading("f")
    reading.ignore(ForeignSetting("a", "1", 3), "not here")
    reading.ignore(ForeignSetting("b", "", 4), "something else")
    reading.ignore(ForeignSetting("c", "2", 5), "not here")
    reading.ignore(ForeignSetting("b", "", 6), "something else")
    source = reading.source()
    assert source.notes == ("f: a=1 (line 3), c=2 (line 5): not here", "f: b (line 4): something else")
    assert source.warnings == ()


def test_an_answer_to_act_on_is_a_warning() -> None:
    reading = Reading("f")
    reading.warn(ForeignSetting("a", "1", 2), "look out")
    reading.ignore(ForeignSetting("hf_token", "hunter2", 3), "set it elsewhere", act=True)
    source = reading.source()
    assert source.warnings == ("a=1 (f:2): look out", "f: hf_token (line 3): set it elsewhere")
    assert source.notes == ()


def test_a_wrong_entry_is_a_problem_with_its_place() -> None:
    reading = Reading("f")
    reading.refuse(ForeignSetting("a", "1", 2), "expected 2")
    assert reading.source().problems == ("a=1 (f:2): expected 2",)


def test_what_the_other_server_does_not_have_is_unknown_and_its_value_is_not_shown() -> None:
    reading = Reading("f")
    reading.unknown_setting(ForeignSetting("max_beem_width", "hunter2", 2), ["max_beam_width", "max_tokens"], "Triton")
    reading.unknown_setting(ForeignSetting("beam_wid", "hunter2", 3), ["max_beam_width"], "Triton")
    assert reading.source().unknown == (
        "max_beem_width (f:2) is not a setting of Triton and has no effect; did you mean max_beam_width?",
        "beam_wid (f:3) is not a setting of Triton and has no effect; remove it, or set the option that you mean",
    )


def test_presets_are_derived_and_set_nothing_but_their_option() -> None:
    source = presets("Truss", {"option.max_num_tokens": "8192"})
    (setting,) = source.settings
    assert source.layer is Layer.PRESET
    assert (setting.key, setting.value, setting.wrote) == ("option.max_num_tokens", "8192", "option.max_num_tokens")
    assert setting.origin.kind is OriginKind.DERIVED
    assert str(setting.origin) == "derived from the presets of Truss"
    assert setting.alone
