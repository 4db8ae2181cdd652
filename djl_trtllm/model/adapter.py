"""Checks of LoRA adapters as PEFT stores them: `adapter_config.json` alone does not say whether an engine can load one.

An engine loads an adapter at its first request, and one that it cannot load may end it. So all that loading depends on
is read before, from the header of the weights. The rules are those of TensorRT-LLM's `lora_manager.py` (about 1.2).
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from djl_trtllm.errors import LayoutError
from djl_trtllm.files import open_file
from djl_trtllm.model.checkpoint import Header, StoredTensor, bounded, check_whole, read_header, read_object

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")

_TENSOR = re.compile(
    r"(?P<module>.*\.(?P<layer>\d{1,9})\.(?P<part>\w+)\.(?P<name>\w+(?:\.\w+)?|\w+\.\d+\.\w+))"
    r"\.(?:lora_(?:(?P<side>[AB])\.weight|magnitude_vector)|weight_m_wdecomp\.weight)"
)
_WHOLE_TENSORS = ("lm_head", "embed_tokens")
"""Parts of the model that an adapter may hold as a whole. TensorRT-LLM does not load these tensors."""

_TAKES_HIDDEN = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
_GIVES_HIDDEN = ("o_proj", "down_proj")
_EXPERT = re.compile(r"\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class AdapterLimits:
    """Limits of the adapters that an engine takes; None: no limit. Modules have Hugging Face's names.

    `rank_setting` and `modules_setting` say where the limits come from.
    """

    max_rank: int
    rank_setting: str
    modules: frozenset[str] | None = None
    modules_setting: str = ""
    hidden: int | None = None
    layers: int | None = None


def description_bytes(folder: Path) -> int:
    """The number of bytes that `check_adapter` reads. A header of weights begins with its own length."""
    total = 0
    with contextlib.suppress(OSError):
        total += (folder / CONFIG_FILE).stat().st_size
        with open_file(folder / WEIGHT_FILES[0]) as weights:
            total += int.from_bytes(weights.read(8), "little")
    return total


def check_adapter(folder: Path, limits: AdapterLimits) -> None:
    """Raise LayoutError, which names the file, the key and what was expected, for an adapter that cannot be loaded."""
    config = read_object(folder / CONFIG_FILE, LayoutError)
    if config is None:
        raise LayoutError(f"{folder} holds no adapter: {CONFIG_FILE} is missing")
    _check_config(folder / CONFIG_FILE, config, limits)
    found = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    if not found:
        raise LayoutError(f"{folder} holds no weights of an adapter: expected {' or '.join(WEIGHT_FILES)}")
    check_whole((found[0],))
    if found[0].suffix == ".safetensors":
        _check_tensors(found[0], read_header(found[0]), limits)


def _check_config(file: Path, config: Mapping[str, Any], limits: AdapterLimits) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise LayoutError(f"{file}: peft_type is {kind!r}, expected 'LORA'")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise LayoutError(f"{file}: r is {rank!r}, expected the adapter's rank, a positive integer")
    if type(alpha) not in (int, float):
        raise LayoutError(f"{file}: lora_alpha is {alpha!r}, expected a number")
    _check_rank(f"{file}: r", rank, limits)


def _check_rank(what: str, rank: int, limits: AdapterLimits) -> None:
    if rank > limits.max_rank:
        raise LayoutError(
            f"{what} is {rank}, the engine takes adapters of rank {limits.max_rank} at most ({limits.rank_setting})"
        )


def _check_tensors(file: Path, header: Header, limits: AdapterLimits) -> None:
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, match, entry in _tensors(file, header):
        _check_place(file, key, match, limits)
        sides = modules.setdefault(match["module"], {})
        if match["side"] is not None:
            if len(entry.shape) != 2 or 0 in entry.shape:
                shape = list(entry.shape)
                raise LayoutError(f"{file}: tensor {key!r} has the shape {shape}, expected two sizes")
            sides[match["side"]] = entry.shape
    if not modules:
        raise LayoutError(f"{file} has no lora_A and lora_B tensors: it changes no module of the model")
    for module, sides in modules.items():
        _check_module(file, module, sides, limits)


def _tensors(file: Path, header: Header) -> Iterator[tuple[str, re.Match[str], StoredTensor]]:
    for key, entry in header.items():
        match = _TENSOR.fullmatch(key)
        if match is not None:
            yield key, match, entry
        elif not any(name in key for name in _WHOLE_TENSORS):
            raise LayoutError(
                f"{file}: tensor {key!r} is none of a LoRA adapter; expected names such as "
                "'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'"
            )


def _check_place(file: Path, key: str, match: re.Match[str], limits: AdapterLimits) -> None:
    if limits.layers is not None and int(match["layer"]) >= limits.layers:
        raise LayoutError(
            f"{file}: {key!r} is for layer {match['layer']}, the model has {limits.layers} layers; the adapter belongs "
            "to another model"
        )
    name, last = f"{match['part']}.{match['name']}", match["name"].rpartition(".")[2]
    known = (_EXPERT.sub(".", name), match["name"], last if _EXPERT.search(name) else match["name"])
    if limits.modules is not None and not limits.modules.intersection(known):
        raise LayoutError(
            f"{file}: {key!r} changes {match['name']}, the engine was loaded for adapters of "
            f"{bounded(sorted(limits.modules))} ({limits.modules_setting})"
        )


def _check_module(file: Path, module: str, sides: Mapping[str, tuple[int, ...]], limits: AdapterLimits) -> None:
    missing = [side for side in "AB" if side not in sides]
    if missing:
        raise LayoutError(f"{file}: '{module}.lora_{missing[0]}.weight' is missing, expected lora_A and lora_B of it")
    (rank, taken), (given, inner) = sides["A"], sides["B"]
    if rank != inner:
        raise LayoutError(f"{file}: lora_A of {module!r} has rank {rank}, its lora_B {inner}; expected the same")
    _check_rank(f"{file}: the rank of {module!r}", rank, limits)
    name = module.rpartition(".")[2]
    for names, size in ((_TAKES_HIDDEN, taken), (_GIVES_HIDDEN, given)):
        if name in names and limits.hidden is not None and size != limits.hidden:
            raise LayoutError(
                f"{file}: {module!r} is for a model of hidden size {size}, the model has {limits.hidden}; the adapter "
                "belongs to another model"
            )
