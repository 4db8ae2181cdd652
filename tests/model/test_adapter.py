"""LoRA adapters that an engine can load, and those that it cannot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import LayoutError
from djl_trtllm.model.adapter import AdapterLimits, check_adapter
from tests.support.adapters import lora_tensors, write_adapter, write_tensors

LIMITS = AdapterLimits(
    max_rank=8,
    rank_setting="option.max_lora_rank=8",
    modules=frozenset({"q_proj", "o_proj", "w1", "shared_expert.up_proj"}),
    modules_setting="option.lora_target_modules=attn_q",
    hidden=256,
    layers=2,
)
ATTENTION = "base_model.model.model.layers.0.self_attn"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def refusal(folder: Path, limits: AdapterLimits = LIMITS) -> str:
    with pytest.raises(LayoutError) as caught:
        check_adapter(folder, limits)
    return str(caught.value)


@pytest.mark.parametrize(
    "tensors",
    [
        lora_tensors(),
        lora_tensors(["self_attn.q_proj", "self_attn.o_proj"], layers=(0, 1)),
        lora_tensors(["mlp.experts.3.w1", "mlp.shared_expert.up_proj"]),
        {**lora_tensors(), "base_model.model.lm_head.weight": [1000, 256]},
        {**lora_tensors(), f"{ATTENTION}.q_proj.lora_magnitude_vector": [256]},
        lora_tensors(rank=4),
    ],
)
def test_an_adapter_within_the_limits_is_taken(tmp_path: Path, tensors: dict[str, Any]) -> None:
    check_adapter(write_adapter(tmp_path, tensors), LIMITS)


def test_weights_of_pytorch_are_taken_by_the_rank_of_their_configuration(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    check_adapter(tmp_path, LIMITS)
    write_adapter(tmp_path, r=9)
    (tmp_path / WEIGHTS).unlink()
    assert "adapter_config.json: r is 9" in refusal(tmp_path)


def test_what_the_limits_do_not_name_is_not_compared(tmp_path: Path) -> None:
    tensors = lora_tensors(["attention.c_attn"], hidden=99, layers=(70,))
    check_adapter(write_adapter(tmp_path, tensors), AdapterLimits(max_rank=8, rank_setting=""))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"r": None}, "r is None, expected the adapter's rank, a positive integer"),
        ({"r": 0}, "r is 0, expected the adapter's rank, a positive integer"),
        ({"r": True}, "r is True, expected the adapter's rank, a positive integer"),
        ({"r": 16}, "r is 16, the engine takes adapters of rank 8 at most (option.max_lora_rank=8)"),
        ({"lora_alpha": None}, "lora_alpha is None, expected a number"),
        ({"lora_alpha": "16"}, "lora_alpha is '16', expected a number"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused_by_its_key(
    tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    folder = write_adapter(tmp_path)
    write_adapter(tmp_path, **config)
    assert refusal(folder) == f"{folder / CONFIG}: {told}"


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({}, "has no lora_A and lora_B tensors"),
        ({"base_model.model.lm_head.weight": [10, 256]}, "has no lora_A and lora_B tensors"),
        ({"q_proj.weight": [256, 256]}, "tensor 'q_proj.weight' is none of a LoRA adapter"),
        (lora_tensors(["self_attn.k_proj"]), "changes k_proj, the engine was loaded for adapters of o_proj, q_proj, "),
        (lora_tensors(["mlp.experts.3.w2"]), "changes experts.3.w2, the engine was loaded for adapters of"),
        (lora_tensors(layers=(2,)), "is for layer 2, the model has 2 layers; the adapter belongs to another model"),
        (lora_tensors(hidden=128), "is for a model of hidden size 128, the model has 256"),
        (lora_tensors(["self_attn.o_proj"], hidden=128), "is for a model of hidden size 128, the model has 256"),
        (lora_tensors(rank=9), f"the rank of '{ATTENTION}.q_proj' is 9, the engine takes adapters of rank 8 at most"),
        ({f"{ATTENTION}.q_proj.lora_A.weight": [8, 256]}, f"'{ATTENTION}.q_proj.lora_B.weight' is missing"),
        ({f"{ATTENTION}.q_proj.lora_B.weight": [256, 8]}, f"'{ATTENTION}.q_proj.lora_A.weight' is missing"),
        ({f"{ATTENTION}.q_proj.lora_magnitude_vector": [256]}, f"'{ATTENTION}.q_proj.lora_A.weight' is missing"),
        (
            {f"{ATTENTION}.q_proj.lora_A.weight": [8, 256], f"{ATTENTION}.q_proj.lora_B.weight": [256, 4]},
            f"lora_A of '{ATTENTION}.q_proj' has rank 8, its lora_B 4",
        ),
        ({f"{ATTENTION}.q_proj.lora_A.weight": [8]}, "has the shape [8], expected two sizes"),
        ({f"{ATTENTION}.q_proj.lora_A.weight": [0, 256]}, "has the shape [0, 256], expected two sizes"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_their_tensor(
    tmp_path: Path, tensors: dict[str, Any], told: str
) -> None:
    message = refusal(write_adapter(tmp_path, tensors))
    assert message.startswith(str(tmp_path / WEIGHTS))
    assert told in message


def test_an_adapter_without_its_files_is_refused_by_their_names(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} holds no adapter: {CONFIG} is missing"
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    told = f"holds no weights of an adapter: expected {WEIGHTS} or adapter_model.bin"
    assert refusal(tmp_path) == f"{tmp_path} {told}"


def test_broken_files_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    for content, told in ((whole[:-1], "is truncated"), (whole[:4], "is not a safetensors file"), (b"", "is not a")):
        (tmp_path / WEIGHTS).write_bytes(content)
        assert told in refusal(tmp_path)
    write_tensors(tmp_path / WEIGHTS, {})
    (tmp_path / CONFIG).write_text("{")
    assert re.search(rf"{CONFIG} is not valid JSON", refusal(tmp_path))
