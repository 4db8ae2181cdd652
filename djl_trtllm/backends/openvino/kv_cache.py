"""The size of an OpenVINO engine's paged KV cache.

The engine does not report its prefix cache, so this follows it. Prompts of different groups share nothing in it.
"""

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from djl_trtllm.config import Config, KvCacheDType
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import ModelShape
from djl_trtllm.progress import format_bytes


class PrefixCacheMirror:
    """Remembers which full KV cache blocks have been computed, least recently used out at `capacity` blocks.

    OpenVINO GenAI reuses blocks by content and reports neither hits nor evictions. This follows its rule (full blocks,
    by the hash of everything up to their end, the last prompt token always computed); under memory pressure the
    engine may have dropped a block that is still remembered here, so the count is an upper estimate.
    """

    def __init__(self, *, capacity: int, block_size: int) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def reused_tokens(self, prompt_ids: Sequence[int]) -> int:
        """Return how many tokens at the start of the prompt lie in remembered blocks."""
        reused = 0
        for end, key in self._keys(prompt_ids, len(prompt_ids) - 1):
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            reused = end
        return reused

    def remember(self, token_ids: Sequence[int]) -> None:
        """Note that the KV cache of these tokens, from the first on, has been computed."""
        for _, key in self._keys(token_ids, len(token_ids)):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def _keys(self, token_ids: Sequence[int], limit: int) -> list[tuple[int, int]]:
        keys = []
        key = 0
        for end in range(self._block_size, limit + 1, self._block_size):
            key = hash((key, *token_ids[end - self._block_size : end]))
            keys.append((end, key))
        return keys


_SALT_BITS = 32


class PromptSalts:
    """Prompts of different groups as different ids for the same tokens, because OpenVINO's prefix cache hashes ids.

    For example token 5 of 2,048 is also -2,043: the embedding's Gather counts negative indices from the end. A salt
    says which of the first 32 tokens are negative; the hash of each later block follows from that of the first. The
    secret keeps clients from computing salts with equal bits.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._secret = secrets.token_bytes(16)

    def apply(self, prompt_ids: Sequence[int], salt: str) -> list[int]:
        ids = list(prompt_ids)
        if salt:
            bits = int.from_bytes(blake2b(salt.encode(), digest_size=_SALT_BITS // 8, key=self._secret).digest(), "big")
            for at, id_ in enumerate(ids[:_SALT_BITS]):
                if bits >> at & 1:
                    ids[at] = id_ - self._vocabulary
        return ids


BLOCK_TOKENS = 32
"""Tokens in one block; OpenVINO's own size on CPUs, it cannot be chosen."""

_DEFAULT_MEMORY_SHARE = 0.25
_PRECISIONS = {
    KvCacheDType.AUTO: "f16",
    KvCacheDType.FP16: "f16",
    KvCacheDType.FP32: "f32",
    KvCacheDType.INT8: "u8",
}
_BYTES = {"f16": 2, "f32": 4, "u8": 1}
_U8_SCALES_BYTES = 8


@dataclass(frozen=True)
class KvCachePlan:
    """The paged KV cache: `blocks` of `block_bytes` each (None where the model's shape is unknown).

    `precision` is OpenVINO's name of the number format: f16, f32 or u8. `reason` says what decided the size.
    """

    blocks: int
    block_bytes: int | None
    precision: str
    reason: str

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that is admitted when it is alone."""
        return (self.blocks - 1) * BLOCK_TOKENS


def blocks_of_sequence(tokens: int) -> int:
    """Blocks that admission reserves for a sequence of N tokens.

    One more than it fills: with less, OpenVINO may find a step with nothing to schedule and drop live requests.
    """
    return -(-tokens // BLOCK_TOKENS) + 1


def block_bytes(shape: ModelShape, precision: str, draft: ModelShape | None = None) -> int | None:
    """Bytes of one block over all layers, keys and values; None if config.json does not have the sizes.

    A draft model has as many blocks as the model, of its own sizes.

    f16 and f32 are exact (openvino-genai 2026.4, `PipelineMetrics.kv_cache_size_in_bytes`); u8 adds a scale and a zero
    point per token and head.
    """
    if shape.num_layers is None or shape.num_kv_heads is None or shape.head_dim is None:
        return None
    per_head = shape.head_dim * _BYTES[precision] + (_U8_SCALES_BYTES if precision == "u8" else 0)
    own = shape.num_layers * 2 * shape.num_kv_heads * per_head * BLOCK_TOKENS
    more = 0 if draft is None else block_bytes(draft, precision)
    return None if more is None else own + more


def plan_kv_cache(
    config: Config,
    shape: ModelShape,
    *,
    max_seq_len: int,
    max_sequences: int,
    available_memory: int,
    draft: ModelShape | None = None,
) -> KvCachePlan:
    """Blocks from the options that ask for a size, else from what the batch needs and the machine has.

    `option.max_tokens_in_paged_kv_cache` and `option.kv_cache_free_gpu_mem_fraction` (here of free host memory): the
    smaller of the two, but of a fraction of memory no more than the batch can use. Without either: what `max_sequences`
    sequences of `max_seq_len` tokens need, at most a quarter of `available_memory` (bytes), at least one whole
    sequence. Raises ConfigError.
    """
    precision = _PRECISIONS[config.options.kv_cache_dtype]
    size = block_bytes(shape, precision, draft)
    candidates = []
    if (tokens := config.options.max_tokens_in_paged_kv_cache) is not None:
        candidates.append((tokens // BLOCK_TOKENS, "max_tokens_in_paged_kv_cache"))
    if (fraction := config.options.kv_cache_free_gpu_mem_fraction) is not None and size is not None:
        candidates.append((int(available_memory * fraction) // size, "kv_cache_free_gpu_mem_fraction"))
    whole_batch = blocks_of_sequence(max_seq_len) * max_sequences
    if candidates:
        blocks, decisive = min(candidates)
        _check_asked(config, blocks, size, decisive, available_memory)
        reason = config.format_setting(decisive)
        # The blocks of finished prompts are of use as long as there are some.
        reused = config.options.enable_kv_cache_reuse
        if decisive == "kv_cache_free_gpu_mem_fraction" and blocks > whole_batch and not reused:
            batch = f"{max_sequences} sequences of {max_seq_len} tokens"
            reason = f"{batch} use no more, of {blocks} blocks that {reason} allows"
            blocks = whole_batch
        return KvCachePlan(blocks, size, precision, reason)
    if size is None:
        raise ConfigError(
            "option.max_tokens_in_paged_kv_cache is not set, and the model's config.json does not have the size of "
            "its KV cache (layers, key-value heads, head size): set it to the number of tokens the cache may hold"
        )
    one = blocks_of_sequence(max_seq_len)
    share = int(available_memory * _DEFAULT_MEMORY_SHARE) // size
    if whole_batch <= share:
        return KvCachePlan(whole_batch, size, precision, f"{max_sequences} sequences of {max_seq_len} tokens")
    if one <= share:
        return KvCachePlan(share, size, precision, f"a quarter of {format_bytes(available_memory)} available memory")
    if one * size > available_memory:
        raise ConfigError(
            f"one sequence of {max_seq_len} tokens needs {format_bytes(one * size)} of KV cache and "
            f"{format_bytes(available_memory)} of memory are available: lower {_length_option(config)}"
        )
    return KvCachePlan(one, size, precision, f"one sequence of {max_seq_len} tokens, more than a quarter of memory")


def _check_asked(config: Config, blocks: int, size: int | None, decisive: str, available_memory: int) -> None:
    if blocks < 2:
        raise ConfigError(
            f"{config.format_setting(decisive)} gives a KV cache of {max(blocks, 0)} blocks of {BLOCK_TOKENS} "
            f"tokens, and no sequence fits in less than 2: expected at least {2 * BLOCK_TOKENS} tokens"
        )
    if size is not None and blocks * size > available_memory:
        raise ConfigError(
            f"{config.format_setting(decisive)} needs {format_bytes(blocks * size)} of KV cache "
            f"({size} bytes per {BLOCK_TOKENS} tokens) and {format_bytes(available_memory)} of memory are available"
        )


def _length_option(config: Config) -> str:
    if config.is_set("max_seq_len"):
        return config.format_setting("max_seq_len")
    return f"{config.format_setting('max_input_len')} or {config.format_setting('max_output_len')}"
