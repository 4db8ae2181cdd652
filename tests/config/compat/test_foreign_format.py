from __future__ import annotations

from djl_trtllm.config import Layer
from djl_trtllm.config.compat.foreign_format import Entry, Reading, presets
from djl_trtllm.config.masking import MASK
from djl_trtllm.config.sources.origin import Origin, OriginKind
from djl_trtllm.config.sources.properties import Setting


def test_an_entry_is_shown_with_secrets_masked_and_long_values_shortened() -> None:
    assert Entry("a", "1", 3).shown == "a=1"
    assert Entry("hf_token", "hunter2", 3).shown == f"hf_token={MASK}"
    assert Entry("a", "x" * 60, 3).shown == "a=" + "x" * 60
    assert Entry("a", "x" * 61, 3).shown == "a=" + "x" * 57 + "..."
    assert Entry("a", "b\n\x1b", 3).shown == r"a=b\n\x1b"


def test_an_entry_sets_a_key_to_its_text_or_to_what_that_means() -> None:
    reading = Reading("f")
    reading.set("option.max_beam_width", Entry("max_beam_width", "2", 3))
    reading.set("option.batch_scheduler_policy", Entry("policy", "old", 4), "new")
    reading.set("option.dtype", Entry("dtype", "same", 5), "same")
    source = reading.source()
    assert source.layer is Layer.DIALECT
    assert source.settings == (
        Setting("option.max_beam_width", "2", Origin.file("f", 3), "max_beam_width", None, alone=True),
        Setting("option.batch_scheduler_policy", "new", Origin.file("f", 4), "policy", "old", alone=True),
        Setting("option.dtype", "same", Origin.file("f", 5), "dtype", None, alone=True),
    )


def test_entries_with_one_answer_share_a_line() -> None:
    reading = Reading("f")
    reading.answer(Entry("a", "1", 3), "not here")
    reading.answer(Entry("b", "", 4), "something else")
    reading.answer(Entry("c", "2", 5), "not here")
    reading.answer(Entry("b", "", 6), "something else")
    source = reading.source()
    assert source.notes == ("f: a=1 (line 3), c=2 (line 5): not here", "f: b (line 4): something else")
    assert source.warnings == ()


def test_an_answer_to_act_on_is_a_warning() -> None:
    reading = Reading("f")
    reading.warn(Entry("a", "1", 2), "look out")
    reading.answer(Entry("hf_token", "hunter2", 3), "set it elsewhere", act=True)
    source = reading.source()
    assert source.warnings == ("a=1 (f:2): look out", "f: hf_token (line 3): set it elsewhere")
    assert source.notes == ()


def test_a_wrong_entry_is_a_problem_with_its_place() -> None:
    reading = Reading("f")
    reading.refuse(Entry("a", "1", 2), "expected 2")
    assert reading.source().problems == ("a=1 (f:2): expected 2",)


def test_what_the_other_server_does_not_have_is_unknown_and_its_value_is_not_shown() -> None:
    reading = Reading("f")
    reading.not_known(Entry("max_beem_width", "hunter2", 2), ["max_beam_width", "max_tokens"], "Triton")
    reading.not_known(Entry("beam_wid", "hunter2", 3), ["max_beam_width"], "Triton")
    assert reading.source().unknown == (
        "max_beem_width (f:2) is nothing that Triton reads and has no effect; did you mean max_beam_width?",
        "beam_wid (f:3) is nothing that Triton reads and has no effect; take it out, or set the option that you mean "
        "in its place",
    )


def test_presets_are_derived_and_set_nothing_but_their_option() -> None:
    source = presets("Truss", {"option.max_num_tokens": "8192"})
    (setting,) = source.settings
    assert source.layer is Layer.PRESET
    assert (setting.key, setting.value, setting.wrote) == ("option.max_num_tokens", "8192", "option.max_num_tokens")
    assert setting.origin.kind is OriginKind.DERIVED
    assert str(setting.origin) == "derived from the presets of Truss"
    assert setting.alone
