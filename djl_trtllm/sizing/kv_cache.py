"""Bytes that sequences take in the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.conditions import Conditions
from djl_trtllm.sizing.formats import cache_bits
from djl_trtllm.sizing.layer_caches import LayerCache
from djl_trtllm.sizing.sharding import stage_of


@dataclass(frozen=True)
class StageCache:
    """The cache of one rank of a pipeline stage.

    `windows` are pairs: bytes per token of the layers with a window, and the window. `state` are the bytes of each
    sequence whatever its length.
    """

    per_token: int
    windows: tuple[tuple[int, int | None], ...]
    state: int

    def sequence(self, length: int) -> int:
        """Bytes of a sequence of `length` tokens."""
        kept = sum(size * (length if window is None else min(length, window)) for size, window in self.windows)
        return kept + self.state


def stage_caches(sizes: CheckpointSizes, conditions: Conditions) -> tuple[StageCache, ...]:
    """The caches of all pipeline stages; a draft model's is part of the last one's."""
    stages = conditions.pipeline_parallel
    split: list[list[tuple[int, LayerCache]]] = [[] for _ in range(stages)]
    for index, layer in enumerate(sizes.layers):
        split[stage_of(index, len(sizes.layers), stages)].append((index, layer))
    caches = [_of(layers, _bits(sizes, conditions), _windows(conditions), conditions) for layers in split]
    if conditions.draft is not None:
        draft = list(enumerate(conditions.draft.layers))
        more = _of(draft, _bits(conditions.draft, conditions), (), conditions)
        last = caches[-1]
        caches[-1] = StageCache(
            last.per_token + more.per_token, (*last.windows, *more.windows), last.state + more.state
        )
    return tuple(caches)


def model_windows(sizes: CheckpointSizes) -> tuple[int, ...]:
    """The windows of config.json as a value of option.max_attention_window; empty if the model has none.

    Layers without a window get 0 here: the option wants the longest sequence for them.
    """
    attending = [layer.window or 0 for layer in sizes.layers if layer.kind in ("attention", "latent")]
    return tuple(attending) if any(attending) else ()


def _bits(sizes: CheckpointSizes, conditions: Conditions) -> float:
    given = conditions.kv_dtype if conditions.kv_dtype not in (None, "auto") else sizes.kv_quantization
    if given is not None:
        return cache_bits(given)
    return 32.0 if (conditions.dtype or sizes.shape.dtype) in ("float32", "float") else 16.0


def _windows(conditions: Conditions) -> tuple[int, ...]:
    return conditions.attention_windows or ()


def _of(
    layers: Sequence[tuple[int, LayerCache]], bits: float, windows: tuple[int, ...], conditions: Conditions
) -> StageCache:
    by_window: dict[int | None, float] = {}
    state = 0
    for index, layer in layers:
        window = windows[index % len(windows)] or None if windows else None
        size = layer.per_token(conditions.tensor_parallel) * bits / 8
        if size:
            by_window[window] = by_window.get(window, 0) + size
        state += layer.per_sequence(conditions.tensor_parallel)
    pairs = tuple((-int(-size // 1), window) for window, size in by_window.items())
    return StageCache(sum(size for size, _ in pairs), pairs, state)
