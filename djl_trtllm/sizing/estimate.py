"""How much of a GPU's memory a model takes, and how many tokens fit into the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from djl_trtllm.sizing import buffers
from djl_trtllm.sizing.buffers import FITTED, GIB, EngineConstants
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.conditions import Conditions, LoraSlots
from djl_trtllm.sizing.kv_cache import StageCache, stage_caches
from djl_trtllm.sizing.weights import lora_bytes, weights_by_stage

__all__ = ["GIB", "MOST", "Conditions", "Estimate", "LoraSlots", "estimate"]

MOST = 16_384
"""The recommended max_num_tokens is at most this: more hardly makes an engine faster (docs/sizing.md)."""

_WIDENED = 4096
_WIDENED_BATCH = 256
_BOUND = 1 << 26


@dataclass(frozen=True)
class Estimate:
    """Bytes are of one GPU; with pipeline stages, of the GPU with most weights unless said otherwise."""

    sizes: CheckpointSizes
    conditions: Conditions
    constants: EngineConstants = FITTED

    @cached_property
    def weights(self) -> int:
        return max(self._weights)

    @cached_property
    def _weights(self) -> tuple[int, ...]:
        """By pipeline stage, with the draft model's and the adapters'."""
        conditions = self.conditions
        own = list(weights_by_stage(self.sizes, conditions))
        if conditions.draft is not None:
            own[-1] += sum(weights_by_stage(conditions.draft, conditions))
        adapters = self.lora
        return tuple(stage + adapters for stage in own)

    @cached_property
    def lora(self) -> int:
        """The part of `weights` that is for LoRA adapters."""
        conditions = self.conditions
        return lora_bytes(self.sizes.shape, conditions.lora, conditions.tensor_parallel, conditions.pipeline_parallel)

    @cached_property
    def logits(self) -> int:
        return buffers.logits(self.sizes, self.conditions)

    @cached_property
    def communication(self) -> int:
        return buffers.communication(self.conditions, self.constants)

    @cached_property
    def overhead(self) -> int:
        return buffers.overhead(self.conditions, self.constants)

    def activations(self, max_num_tokens: int) -> int:
        conditions = self.conditions
        if conditions.backend == "pytorch":
            return buffers.pytorch_activations(self.sizes, conditions.tensor_parallel, max_num_tokens)
        per_token = buffers.engine_activations_per_token(self.sizes, conditions.tensor_parallel, self.constants.scale)
        return int(per_token * max_num_tokens)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the pipeline stage whose layers keep most."""
        return max(cache.per_token for cache in self._caches)

    @property
    def state_bytes_per_sequence(self) -> int:
        """What Mamba and linear attention keep of each sequence whatever its length."""
        return max(cache.state for cache in self._caches)

    @cached_property
    def _caches(self) -> tuple[StageCache, ...]:
        return stage_caches(self.sizes, self.conditions)

    def _kv_bytes(self, stage: int, max_num_tokens: int) -> int:
        """Bytes of the cache on one GPU of a stage; 0 if nothing is left."""
        used = self._weights[stage] + self.logits + self.communication + self.overhead
        left = self.conditions.gpu_memory - used - self.activations(max_num_tokens)
        reserved = buffers.PYTORCH_RESERVED if self.conditions.backend == "pytorch" else 0
        adapters = 0.0 if self.conditions.lora is None else self.conditions.lora.free_share
        return max(0, int(left * (1 - adapters) * self.conditions.fraction * (1 - reserved)))

    def kv_bytes(self, max_num_tokens: int) -> int:
        """Bytes of the KV cache beside an engine of `max_num_tokens`, on the GPU with least left."""
        return min(self._kv_bytes(stage, max_num_tokens) for stage in range(len(self._weights)))

    def kv_tokens(self, max_num_tokens: int) -> int:
        """Tokens that the KV cache holds beside an engine of `max_num_tokens`: of one long sequence, without windows.

        0 if nothing is left, or if no layer keeps anything per token.
        """
        return min(
            (
                max(0, self._kv_bytes(stage, max_num_tokens) - cache.state) // cache.per_token
                for stage, cache in enumerate(self._caches)
                if cache.per_token
            ),
            default=0,
        )

    def sequences_of(self, length: int, max_num_tokens: int | None = None) -> int:
        """Sequences of `length` tokens that the KV cache holds at a time, beside the recommended engine by default."""
        tokens = self.recommended if max_num_tokens is None else max_num_tokens
        return min(
            self._kv_bytes(stage, tokens) // max(1, cache.sequence(length)) for stage, cache in enumerate(self._caches)
        )

    def batch_size(self, length: int, max_num_tokens: int | None = None) -> int:
        """The batch for sequences of `length` tokens: as many as fit, at most what the buffers are for."""
        return min(self.conditions.max_batch_size, self.sequences_of(length, max_num_tokens))

    @cached_property
    def max_num_tokens(self) -> int:
        """The largest max_num_tokens beside which the longest sequence fits; 0: out of memory."""
        low, high = 0, _BOUND
        while low < high:
            middle = (low + high + 1) // 2
            if self.sequences_of(self.longest(middle), middle) >= 1:
                low = middle
            else:
                high = middle - 1
        return low

    def longest(self, max_num_tokens: int) -> int:
        """Tokens of the longest sequence, with the widened limits where none are given."""
        limit = min(_WIDENED, max_num_tokens)
        return (self.conditions.max_input_len or limit) + (self.conditions.max_output_len or limit)

    @property
    def recommended(self) -> int:
        """Half of the maximum, at most 16,384: the other half is for the KV cache."""
        return min(self.max_num_tokens // 2, MOST)

    @property
    def limits(self) -> Mapping[str, int]:
        """The limits that the finder document's widening gives the recommended engine."""
        limit = min(_WIDENED, self.recommended)
        return {
            "max_num_tokens": self.recommended,
            "max_input_len": max(limit, self.conditions.max_input_len or 0),
            "max_output_len": max(limit, self.conditions.max_output_len or 0),
            "max_rolling_batch_size": max(_WIDENED_BATCH, self.conditions.max_batch_size),
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        from djl_trtllm.sizing.advice import warnings_of

        return warnings_of(self)


def estimate(sizes: CheckpointSizes, conditions: Conditions) -> Estimate:
    return Estimate(sizes, conditions)
