from __future__ import annotations

from djl_trtllm.config.options.choices import Backend, Choice


def test_a_choice_is_its_word() -> None:
    assert str(Backend.OPENVINO) == Backend.OPENVINO.value == "openvino"
    words = {kind: [member.value.lower() for member in kind] for kind in Choice.__subclasses__()}
    assert len(words) > 20
    assert {kind: all_ for kind, all_ in words.items() if len(set(all_)) < len(all_)} == {}
