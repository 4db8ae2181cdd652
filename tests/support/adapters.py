"""LoRA adapters as PEFT writes them, with zeros for weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = 256
"""The hidden size of the bundled model."""


def lora_tensors(
    modules: Sequence[str] = ("self_attn.q_proj",), *, rank: int = 8, hidden: int = HIDDEN, layers: Sequence[int] = (0,)
) -> dict[str, list[int]]:
    """The names of an adapter's tensors and their shapes."""
    tensors = {}
    for layer in layers:
        for module in modules:
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = [rank, hidden]
            tensors[f"{name}.lora_B.weight"] = [hidden, rank]
    return tensors


def write_tensors(file: Path, tensors: Mapping[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_adapter(folder: Path, tensors: Mapping[str, Any] | None = None, **config: Any) -> Path:
    """An adapter in `folder`. `config` changes its adapter_config.json; None leaves a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **config}
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(kept))
    write_tensors(folder / "adapter_model.safetensors", lora_tensors() if tensors is None else tensors)
    return folder
