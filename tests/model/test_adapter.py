"""LoRA adapters that an engine can load, and those that it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import LayoutError
from djl_trtllm.model.adapter import AdapterLimits, check_adapter
from tests.support.adapters import lora_tensors, write_adapter
from tests.support.tables import by_table

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


@by_table("tensors")
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


@by_table("config", "told")
def test_a_configuration_that_cannot_be_used_is_refused_by_its_key(
    tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    folder = write_adapter(tmp_path)
    write_adapter(tmp_path, **config)
    assert refusal(folder) == f"{folder / CONFIG}: {told}"


@by_table("tensors", "told")
def test_weights_that_do_not_fit_are_refused_by_their_tensor(
    tmp_path: Path, tensors: dict[str, Any], told: str
) -> None:
    message = refusal(write_adapter(tmp_path, tensors))
    assert message.startswith(str(tmp_path / WEIGHTS))
    assert told in message


def test_broken_or_missing_files_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} holds no adapter: {CONFIG} is missing"
    write_adapter(tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    for content, told in ((whole[:-1], "is truncated"), (whole[:4], "is not a safetensors file"), (b"", "is not a")):
        (tmp_path / WEIGHTS).write_bytes(content)
        assert told in refusal(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    assert refusal(tmp_path).endswith(f"holds no weights of an adapter: expected {WEIGHTS} or adapter_model.bin")
    (tmp_path / CONFIG).write_text("{")
    assert f"{CONFIG} is not valid JSON" in refusal(tmp_path)
