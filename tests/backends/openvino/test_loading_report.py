from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.backends.openvino.compiler import COMPILER
from djl_trtllm.backends.openvino.loading_report import (
    MARK,
    IncompleteCheckpointError,
    complete_weights,
    loading_problems,
)


class TinyForCausalLM:
    """A model as far as the report looks at it."""

    config = SimpleNamespace(architectures=["TinyForCausalLM"])


def problems(**info: Any) -> list[str]:
    return loading_problems(TinyForCausalLM(), info)


def test_a_whole_checkpoint_has_no_problems() -> None:
    assert problems(missing_keys=set(), unexpected_keys=[], mismatched_keys=set(), error_msgs=[]) == []
    assert problems() == []


def test_missing_tensors_are_named_in_order_and_bounded() -> None:
    assert problems(missing_keys={"b", "a"}) == [
        "TinyForCausalLM needs 2 tensors that the weight files do not have: a, b"
    ]
    (line,) = problems(missing_keys=[f"layer.{number}" for number in range(10, 30)])
    assert line.endswith("layer.16, layer.17 and 12 more")


def test_surplus_tensors_are_named() -> None:
    assert problems(unexpected_keys=["x"]) == ["the weight files have 1 tensor that TinyForCausalLM does not have: x"]


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "transformer.h.0.attn.bias",
        "transformer.h.0.attn.masked_bias",
        "gpt_neox.layers.0.attention.bias",
        "model.embeddings.position_ids",
    ],
)
def test_buffers_of_older_versions_are_no_surplus(key: str) -> None:
    assert problems(unexpected_keys=[key]) == []
    assert problems(unexpected_keys=[key.replace("bias", "q.bias") if "bias" in key else f"{key}.weight"]) != []


def test_the_rest_of_a_larger_model_is_no_surplus() -> None:
    part = SimpleNamespace(config=SimpleNamespace(architectures=["TinyForConditionalGeneration"]))
    assert loading_problems(part, {"unexpected_keys": ["vision_tower.patch.weight"]}) == []
    assert loading_problems(part, {"missing_keys": ["lm_head.weight"]}) != []


def test_tensors_of_another_shape_are_named_with_both() -> None:
    (line,) = problems(mismatched_keys=[("a.weight", (3, 3), (4, 5))])
    assert line.endswith("have another shape than config.json says: a.weight ([3, 3] in the file, expected [4, 5])")
    assert problems(mismatched_keys=["a.weight"])[0].endswith("says: a.weight")  # transformers 4.57


def test_the_parent_recognises_the_line() -> None:
    found = COMPILER.cause_of(["loading", f"{MARK}/models/m: TinyForCausalLM needs 1 tensor", "later"])
    assert found is not None and found[0].name == "checkpoint does not fit its config.json"


def test_loading_is_checked_inside_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    report = {"missing_keys": ["a"]}
    asked: list[dict[str, Any]] = []

    class Stub:
        config = SimpleNamespace(architectures=[])

        @classmethod
        def from_pretrained(cls, source: str, *args: Any, **kwargs: Any) -> Any:
            asked.append(kwargs)
            return (cls(), report) if kwargs.get("output_loading_info") else cls()

    monkeypatch.setattr(transformers, "PreTrainedModel", Stub)
    original = Stub.__dict__["from_pretrained"]
    with complete_weights():
        with pytest.raises(IncompleteCheckpointError, match=re.escape(f"{MARK}/models/m: Stub needs 1 tensor")):
            Stub.from_pretrained("/models/m", dtype="f32")
        assert asked == [{"dtype": "f32", "output_loading_info": True, "ignore_mismatched_sizes": True}]
        report.clear()
        assert isinstance(Stub.from_pretrained("/models/m"), Stub)
        model, info = Stub.from_pretrained("/models/m", output_loading_info=True)
        assert isinstance(model, Stub) and info is report
    assert Stub.__dict__["from_pretrained"] is original
