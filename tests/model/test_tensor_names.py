from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import LayoutError
from djl_trtllm.model import inspect
from tests.model.test_layout import safetensors

PARTS = ("self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight")


def stack(layers: int, name: str = "model.layers", parts: tuple[str, ...] = PARTS) -> dict[str, int]:
    return {f"{name}.{layer}.{part}": 1 for layer in range(layers) for part in parts}


def checkpoint(path: Path, tensors: dict[str, int], layers: int = 4, **config: Any) -> Path:
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers, **config}
    (path / "config.json").write_text(json.dumps(values))
    safetensors(path / "model.safetensors", {"model.embed_tokens.weight": 1, **tensors})
    return path


def sharded(path: Path, shards: dict[str, list[str]], weight_map: dict[str, str]) -> Path:
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, tensors in shards.items():
        safetensors(path / name, dict.fromkeys(tensors, 1))
    return path


def test_a_tensor_of_the_index_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    shards = {"model-1.safetensors": ["a"], "model-2.safetensors": ["b"]}
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    sharded(tmp_path, shards, weight_map)
    with pytest.raises(LayoutError, match=r"1 of 3 tensors named in .* not in their files: c in model-2\.safetensors;"):
        inspect(tmp_path)


def test_shards_may_have_tensors_that_the_index_does_not_name(tmp_path: Path) -> None:
    shards = {"model-1.safetensors": ["a", "rotary_emb.inv_freq"], "model-2.safetensors": ["b"]}
    inspect(sharded(tmp_path, shards, {"a": "model-1.safetensors", "b": "model-2.safetensors"}))


@pytest.mark.parametrize("name", ["model.layers", "transformer.h", "h", "model.decoder.layers", "gpt_neox.layers"])
def test_a_checkpoint_with_all_its_layers_is_whole(tmp_path: Path, name: str) -> None:
    inspect(checkpoint(tmp_path, stack(4, name)))


def test_layers_without_tensors_are_named(tmp_path: Path) -> None:
    tensors = {name: size for name, size in stack(4).items() if ".1." not in name and ".3." not in name}
    with pytest.raises(LayoutError) as caught:
        inspect(checkpoint(tmp_path, tensors))
    assert "config.json says 4 layers, and the weight files have no tensors of 2 of them: " in str(caught.value)
    assert "model.layers.1, model.layers.3; download" in str(caught.value)


def test_more_layers_than_config_json_says_are_named(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"says 4 layers, and the weight files have 1 more: model\.layers\.4; use"):
        inspect(checkpoint(tmp_path, stack(5)))


def test_layers_that_predict_further_tokens_are_no_surplus(tmp_path: Path) -> None:
    inspect(checkpoint(tmp_path, {**stack(4), "model.layers.4.eh_proj.weight": 1}))
    inspect(checkpoint(tmp_path, stack(5), num_nextn_predict_layers=1))


def test_layers_of_other_parts_of_a_model_are_not_counted(tmp_path: Path) -> None:
    inspect(checkpoint(tmp_path, {**stack(4), **stack(6, "vision_tower.encoder.layers")}))
    inspect(checkpoint(tmp_path, {**stack(4), **stack(2, "vision_tower.encoder.layers")}))


def test_experts_are_not_layers(tmp_path: Path) -> None:
    experts = tuple(f"mlp.experts.{expert}.w1.weight" for expert in range(8))
    inspect(checkpoint(tmp_path, stack(4, parts=experts)))


def test_names_without_layers_and_models_without_a_number_of_them_are_not_judged(tmp_path: Path) -> None:
    inspect(checkpoint(tmp_path, {"anything.weight": 1}))
    inspect(checkpoint(tmp_path, stack(7), num_hidden_layers=None))


def test_pytorch_files_have_no_header_to_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 4}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    inspect(tmp_path)
