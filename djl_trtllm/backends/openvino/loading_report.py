"""Fail when transformers loads a checkpoint that lacks tensors or has others: it only warns, and makes random weights.

Runs in the compiler's process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from djl_trtllm.model.weights import bounded

MARK = "tensors of "
"""How the line starts that the compiler prints and its parent recognises."""

_SHOWN = 8
# What older versions of transformers saved with a checkpoint, or what a training or a quantisation leaves, and no
# forward pass of the model in float uses.
_IGNORED = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|rope_freqs|position_ids|masked_bias|attn\.bias|attention\.bias|_extra_state"
    r"|num_batches_tracked)$"
)


class IncompleteCheckpointError(Exception):
    """The tensors of a checkpoint are not those of its model."""


@contextmanager
def complete_weights() -> Iterator[None]:
    """While the block runs, loading a model raises IncompleteCheckpointError unless every tensor has its place."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.__dict__["from_pretrained"]

    def from_pretrained(cls: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.pop("output_loading_info", False)
        # Tensors of another shape are in the report then, with both shapes; otherwise they are in a table of the log.
        kwargs.setdefault("ignore_mismatched_sizes", True)
        model, info = original.__func__(cls, source, *args, output_loading_info=True, **kwargs)
        problems = loading_problems(model, info)
        if problems:
            raise IncompleteCheckpointError(f"{MARK}{Path(str(source))}: {'; '.join(problems)}")
        return (model, info) if asked else model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original


def loading_problems(model: Any, info: dict[str, Any]) -> list[str]:
    """What is wrong with the tensors that transformers loaded, by its own report; tied weights are none of it."""
    name = type(model).__name__
    missing = sorted(info.get("missing_keys") or ())
    surplus = sorted(key for key in info.get("unexpected_keys") or () if not _IGNORED.search(key))
    reshaped = sorted(_shapes(entry) for entry in info.get("mismatched_keys") or ())
    problems = []
    if reshaped:
        problems.append(f"{_counted(reshaped)} have another shape than config.json says: {_list(reshaped)}")
    if missing:
        problems.append(f"{name} needs {_counted(missing)} that the weight files do not have: {_list(missing)}")
    # A model that is a part of the checkpoint's (the text part of one with images) leaves the rest out.
    if surplus and name in (getattr(model.config, "architectures", None) or ()):
        problems.append(f"the weight files have {_counted(surplus)} that {name} does not have: {_list(surplus)}")
    return problems


def _shapes(entry: Any) -> str:
    # A tuple of name, shape in the file and shape in the model.
    name, *shapes = [entry] if isinstance(entry, str) else entry
    if len(shapes) != 2:
        return str(name)
    stored, wanted = (list(shape) for shape in shapes)
    return f"{name} ({stored} in the file, expected {wanted})"


def _counted(keys: list[str]) -> str:
    return "1 tensor" if len(keys) == 1 else f"{len(keys)} tensors"


def _list(keys: Iterable[str]) -> str:
    return bounded(list(keys), _SHOWN)
