"""Loading adapters: `lora_manager.py` and `lora_helper.py` of about 1.2."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

_PATTERN = re.compile(r"(.*)\.(\d+)\.(\w+)\.(\w+|\w+\.\w+|(\w+)\.(\d+)\.(\w+))\.(?:lora_(?:(A|B)\.weight))")
_MODULES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_dense": "o_proj",
    "mlp_h_to_4h": "gate_proj",
    "mlp_4h_to_h": "down_proj",
    "mlp_gate": "up_proj",
    "moe_h_to_4h": "w1",
    "moe_4h_to_h": "w2",
    "moe_gate": "w3",
    "moe_router": "gate",
}


def load_adapter(folder: Path) -> tuple[int, int | None]:
    """The largest rank and what its first modules take; raises whatever the real one does."""
    config = json.loads((folder / "adapter_config.json").read_text())
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        if not (folder / "adapter_model.bin").is_file():
            raise ValueError(f"Failed to load adapter_model from {folder}")
        return int(config["r"]), None
    shapes = _shapes(file)
    modules: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for key, shape in shapes.items():
        match = _PATTERN.match(key)
        if match is None:
            if "lm_head" not in key and "embed_tokens" not in key:
                raise KeyError(f"unsupported key {key} from HF LoRA weights")
            continue
        module = match[7] or match[4]
        assert module in _MODULES.values(), f"hf_module {module} is not in supported list {set(_MODULES.values())}"
        modules[key.rpartition(".lora_")[0]][match[8]] = shape
    for name, sides in modules.items():
        if missing := {"A", "B"} - sides.keys():
            raise ValueError(f"{name} is missing required matrices: {missing}")
    float(config["lora_alpha"])
    return max(sides["A"][0] for sides in modules.values()), next(iter(modules.values()))["A"][1]


def _shapes(file: Path) -> dict[str, list[int]]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    if 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0) != len(content):
        raise OSError("Error while deserializing header: incomplete metadata, file not fully covered")
    return {name: entry["shape"] for name, entry in header.items()}
