"""OpenVINO GenAI's prefix cache from outside: what it has, and prompts of different groups that share nothing in it."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


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
