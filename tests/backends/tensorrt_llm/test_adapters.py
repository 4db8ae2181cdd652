"""Which LoRA adapters an engine of TensorRT-LLM takes."""

from __future__ import annotations

from typing import Any

from djl_trtllm.backends.tensorrt_llm.adapters import adapter_limits
from djl_trtllm.config import Backend, Config, Options
from djl_trtllm.model import ModelShape
from djl_trtllm.model.adapter import AdapterLimits

SHAPE = ModelShape(num_layers=2, hidden=256)


def limits(backend: Backend = Backend.PYTORCH, **options: Any) -> AdapterLimits | None:
    return adapter_limits(Config(Options(**options)), SHAPE, backend)


def test_an_engine_without_lora_takes_none() -> None:
    assert limits() is None


def test_rank_and_sizes_are_the_engines_and_the_models() -> None:
    found = limits(enable_lora=True, max_lora_rank=16)
    assert found is not None
    assert (found.max_rank, found.hidden, found.layers) == (16, 256, 2)
    assert found.rank_setting.startswith("option.max_lora_rank=16 (")


def test_modules_have_hugging_faces_names_and_without_the_option_all_are_taken() -> None:
    chosen = limits(enable_lora=True, lora_target_modules=("attn_q", "mlp_gate", "own"))
    assert chosen is not None
    assert chosen.modules == frozenset({"q_proj", "up_proj", "own"})
    assert chosen.modules_setting.startswith("option.lora_target_modules=attn_q,mlp_gate,own (")
    every = limits(enable_lora=True)
    assert every is not None and every.modules is not None
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "gate"} < every.modules


def test_the_modules_of_a_compiled_engine_are_not_compared() -> None:
    found = limits(Backend.TENSORRT, enable_lora=True, lora_target_modules=("attn_q",))
    assert found is not None
    assert found.modules is None
