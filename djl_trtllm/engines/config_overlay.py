"""The rotary options: a checkpoint with another `config.json`, as a folder of links beside a changed file.

`option.rotary_base`, `rotary_dim` and `rotary_scaling_*` were arguments of early conversion scripts. Today every engine
reads these values from the checkpoint's `config.json`. A checkpoint may be a read-only mount or a download that others
share, so it stays as it is. The overlay has its own content, hence its own engine in every cache.
"""

import copy
import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from djl_trtllm.config import Config
from djl_trtllm.engines.cache import MANIFEST_FILE
from djl_trtllm.errors import EngineError
from djl_trtllm.model import Layout, ModelKind, inspect
from djl_trtllm.model.work_directory import link_with_changes

log = logging.getLogger(__name__)

_OPTIONS = ("rotary_base", "rotary_dim", "rotary_scaling_type", "rotary_scaling_factor")
_FOLDER = "overlays"
# Their config.json may leave the two keys out. transformers 4.57, configuration_*.py; TensorRT-LLM 1.2,
# models/{llama,qwen}/config.py.
_WITH_ROPE = ("llama", "internlm", "qwen", "mistral", "mixtral", "gemma", "phi3", "falcon", "baichuan")
_WITH_DIMENSIONS = ("gptj", "codegen")


def with_rotary_options(config: Config, layout: Layout) -> tuple[Layout, tuple[str, ...]]:
    """The model with the rotary options that the user set: itself, or an overlay.

    Also returns a line for each option that cannot have an effect, and for an engine that is not used because of them.
    Raises EngineError if the overlay cannot be written.
    """
    given = [name for name in _OPTIONS if config.is_set(name) and getattr(config.options, name) is not None]
    if not given:
        return layout, ()
    if layout.kind.is_engine:
        why = "the model is a compiled engine, which has the values it was compiled with"
        return layout, tuple(f"{config.format_setting(name)} has no effect: {why}" for name in given)
    changed, told = _change(config, layout, given)
    if changed == layout.config:
        return layout, told
    if not layout.weight_files:  # only described: there is nothing to run
        return replace(layout, config=changed), told
    overlay = _overlay(layout.path, changed, config.engine_cache_dir / _FOLDER)
    log.info("the engine reads %s as %s, whose config.json has the rotary options", layout.path, overlay)
    found = inspect(overlay)
    bundled = found.bundled_engine
    if bundled is not None and not (bundled / MANIFEST_FILE).is_file():
        found = replace(found, bundled_engine=None)
        asked = " and ".join(config.format_setting(name) for name in given)
        told += (
            f"the {bundled.name} folder beside the checkpoint is not used: it has no {MANIFEST_FILE}, "
            f"so it is unknown whether it was compiled with {asked}",
        )
    return found, told


def _change(config: Config, layout: Layout, given: list[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    changed = copy.deepcopy(layout.config or {})
    nested = changed.get("text_config")
    part = nested if isinstance(nested, dict) else changed
    if layout.kind is ModelKind.TENSORRT_CHECKPOINT:
        keys = {"base": "rotary_base", "dimensions": "rotary_dim", "scaling": "rotary_scaling"}
    else:
        keys = _keys(part)
    options = config.options
    values: dict[str, tuple[str, str, Any]] = {
        "rotary_base": ("base", "rope_theta", options.rotary_base),
        "rotary_dim": ("dimensions", "rotary_dim", options.rotary_dim),
    }
    kind, factor = options.rotary_scaling_type, options.rotary_scaling_factor
    # A rule asks for the other one where there is one.
    if kind is not None and factor is not None:
        scaling = {"type": kind, "rope_type": kind, "factor": factor}
        values["rotary_scaling_type"] = ("scaling", "rope_scaling", scaling)
    told = []
    for name, (place, usual, value) in values.items():
        if name in given and place in keys:
            _set(part, keys[place], value)
        elif name in given:
            why = f"{part.get('model_type')} has no {usual} to change"
            told.append(f"{config.format_setting(name)} has no effect: {why}")
    return changed, tuple(told)


def _keys(part: dict[str, Any]) -> dict[str, str]:
    """The keys of base, dimensions and scaling in the config.json of a Hugging Face checkpoint."""
    kind = str(part.get("model_type"))
    keys = {}
    parameters = part.get("rope_parameters")
    if isinstance(parameters, dict) and "rope_theta" in parameters:  # transformers 5
        keys = {"base": "rope_parameters.rope_theta", "scaling": "rope_parameters"}
    elif "rope_theta" in part or "rope_scaling" in part or kind.startswith(_WITH_ROPE):
        keys = {"base": "rope_theta", "scaling": "rope_scaling"}
    if "rotary_emb_base" in part:  # GPT-NeoX, the first Qwen
        keys["base"] = "rotary_emb_base"
    if "rotary_dim" in part or kind in _WITH_DIMENSIONS:
        keys["dimensions"] = "rotary_dim"
    return keys


def _set(part: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = key.split(".")
    for name in outer:
        part = part[name]
    if last == "rope_parameters":
        part[last] = {**part[last], "rope_type": value["rope_type"], "factor": value["factor"]}
    else:
        part[last] = value


def _overlay(checkpoint: Path, changed: dict[str, Any], folder: Path) -> Path:
    """A folder of the checkpoint's name with links to its files and the changed config.json.

    Its path follows from both, so that processes share it. It is never removed: its only file of its own is
    config.json.
    """
    text = json.dumps(changed, indent=2)
    key = hashlib.sha256(f"{checkpoint.resolve()}\n{text}".encode()).hexdigest()[:32]
    overlay = folder / key / (checkpoint.resolve().name or "checkpoint")
    try:
        link_with_changes(checkpoint, overlay, {"config.json": text})
    except OSError as error:
        raise EngineError(
            f"the rotary options need a changed copy of {checkpoint / 'config.json'}, which cannot be written to "
            f"{overlay}: {error}; set option.engine_cache_dir to a folder that can be written"
        ) from error
    return overlay
