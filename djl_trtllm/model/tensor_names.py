"""Compare the names of a checkpoint's tensors with its index and its config.json. Reads headers, never weights."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from djl_trtllm.errors import LayoutError
from djl_trtllm.model.json_file import read_object
from djl_trtllm.model.weights import INDEXES, bounded, read_header

# `model.layers.7.mlp.up_proj.weight`, `transformer.h.7.ln_1.weight`, `h.7.ln_1.weight`
_IN_LAYER = re.compile(r"(?P<stack>(?:.*?\.)??(?:layers|layer|h|blocks|block))\.(?P<index>\d+)\.(?P<rest>.+)")


def check_tensors(path: Path, files: tuple[Path, ...], num_layers: int | None, extra_layers: int = 0) -> None:
    """Check the tensors of a Hugging Face checkpoint's safetensors files.

    `num_layers` is the number of layers in config.json; `extra_layers` may follow them (layers that predict several
    tokens). Raises `LayoutError` if the index names tensors that its files do not have, if a layer has no tensors, or
    if there are more layers of the same kind than config.json says.
    """
    if not files or any(file.suffix != ".safetensors" for file in files):
        return
    tensors = {file.name: set(read_header(file)) - {"__metadata__"} for file in files}
    _check_index(path, tensors)
    if num_layers is not None:
        _check_layers(path, set().union(*tensors.values()), num_layers, extra_layers)


def _check_index(path: Path, tensors: Mapping[str, set[str]]) -> None:
    index = path / INDEXES[0]
    weight_map = (read_object(index, LayoutError) or {}).get("weight_map", {})
    missing = sorted(name for name, file in weight_map.items() if name not in tensors[str(file)])
    if missing:
        shown = [f"{name} in {weight_map[name]}" for name in missing]
        raise LayoutError(
            f"{path}: {len(missing)} of {len(weight_map)} tensors named in {index.name} are not in their files: "
            f"{bounded(shown, 5)}; the files are of another checkpoint than the index: download or copy all of them "
            "again"
        )


def _check_layers(path: Path, names: set[str], num_layers: int, extra_layers: int) -> None:
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        if match := _IN_LAYER.fullmatch(name):
            stacks[match["stack"]][int(match["index"])].add(match["rest"])
    wanted = set(range(num_layers))
    if not stacks or any(stack.keys() == wanted for stack in stacks.values()):
        return
    if not any(stack.keys() >= wanted for stack in stacks.values()):
        name, stack = max(stacks.items(), key=lambda item: len(item[1].keys() & wanted))
        missing = sorted(wanted - stack.keys())
        raise LayoutError(
            f"{path}: config.json says {num_layers} layers, and the weight files have no tensors of "
            f"{len(missing)} of them: {bounded([f'{name}.{index}' for index in missing], 5)}; download or copy the "
            "checkpoint again, with the config.json that belongs to it"
        )
    if len(stacks) == 1:
        ((name, stack),) = stacks.items()
        further = sorted(
            index for index in stack if index >= num_layers + extra_layers and stack[index] == stack[num_layers - 1]
        )
        if further:
            raise LayoutError(
                f"{path}: config.json says {num_layers} layers, and the weight files have {len(further)} more: "
                f"{bounded([f'{name}.{index}' for index in further], 5)}; use the config.json that belongs to the "
                "checkpoint"
            )
