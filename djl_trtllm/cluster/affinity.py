"""Which replica has a prompt's beginning in its KV cache, as far as that can be known from where requests were sent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

_MOST_KEYS = 100_000
"""About 40 MB, and the prompts of some thousand conversations: more than the KV caches of the replicas hold."""
_MOST_HOLDERS = 4
"""Replicas remembered for a beginning that many prompts share."""


class Affinity:
    """Chooses replicas. `slack`: how many more requests than the least loaded one a preferred replica may have."""

    def __init__(self, slack: int, most_keys: int = _MOST_KEYS) -> None:
        self._slack = slack
        self._most_keys = most_keys
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def choose(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> str | None:
        """The replica for a prompt with these keys (`prefix_keys`); None if another choice is as good.

        It is the least loaded of those that had the longest known beginning and are not out of balance. For a prompt
        that is new it is the first of the two that the first key names that is not: several gateways choose the same
        ones without knowing of each other.
        """
        if not keys or not loads:
            return None
        most = min(loads.values()) + self._slack
        for key in reversed(keys):
            holders = [replica for replica in self._holders.get(key, ()) if loads.get(replica, most + 1) <= most]
            if holders:
                return min(holders, key=loads.__getitem__)
        preferred = (replica for replica in ranked(keys[0], loads)[:2] if loads[replica] <= most)
        return next(preferred, None)

    def learn(self, keys: Iterable[bytes], replica: str) -> None:
        """The replica was sent a prompt with these keys. Keys that were not seen for the longest time are forgotten."""
        for key in keys:
            others = tuple(other for other in self._holders.get(key, ()) if other != replica)
            self._holders[key] = (*others, replica)[-_MOST_HOLDERS:]
            self._holders.move_to_end(key)
        while len(self._holders) > self._most_keys:
            self._holders.popitem(last=False)

    def __len__(self) -> int:
        return len(self._holders)


def ranked(key: bytes, replicas: Iterable[str]) -> list[str]:
    """The replicas in the order that a key prefers them, by rendezvous hashing.

    The first one changes only for keys of which it is gone, or is a new one.
    """
    return sorted(replicas, key=lambda replica: blake2b(key + replica.encode(), digest_size=8).digest())
