"""The replicas that probably have a prompt's beginning in their KV cache, because earlier prompts were sent there."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from djl_trtllm.api.base import read_json
from djl_trtllm.errors import InvalidRequestError

_BLOCK = 128
"""Bytes of the shortest beginning: about the tokens of one KV cache block, and shorter beginnings reuse nothing."""
_TURN_BLOCKS = 32
"""Blocks that the next turn of a conversation adds at most: a response of about a thousand tokens."""
_KEY_BYTES = 8
_PROMPTS = ("messages", "prompt", "inputs", "input", "text_input")
_BEFORE = ("tools", "system", "instructions")
"""Members of a request that chat templates put before the messages."""
_ADAPTERS = ("adapters", "adapter_id")


class PromptKeys(NamedTuple):
    """Keys of beginnings of a prompt, each from short to long.

    `beginnings` have 1, 2, 3, 4, 6, 8, 12, ... blocks, so that a prompt of any length has few keys, and two prompts
    share the key of at least two thirds of what they have in common; before them is the adapter's key, if the request
    names one. `ends` are those of the last `_TURN_BLOCKS` blocks, one by one: the last of them is the prompt's own, and
    the prompt of the turn before is among the others.
    """

    beginnings: tuple[bytes, ...] = ()
    ends: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, body: bytes) -> "PromptKeys":
        """The keys of a request's prompt; a body in which no prompt is found is one itself."""
        adapter, prompt = _read(body)
        hasher = blake2b(digest_size=_KEY_BYTES)
        keys: dict[int, bytes] = {}
        if adapter is not None:
            # Prompts of another adapter have nothing in the KV cache that this one could use.
            hasher.update(orjson.dumps(adapter))
            keys[0] = hasher.digest()
        beginnings = [*keys, *_ends(len(prompt))]
        last = len(prompt) // _BLOCK * _BLOCK
        ends = range(max(_BLOCK, last - _TURN_BLOCKS * _BLOCK), last + 1, _BLOCK)
        view, begin = memoryview(prompt), 0
        for end in sorted({*beginnings, *ends} - keys.keys()):
            hasher.update(view[begin:end])
            keys[end] = hasher.digest()
            begin = end
        return cls(tuple(keys[end] for end in beginnings), tuple(keys[end] for end in ends))


def _ends(length: int) -> Iterator[int]:
    end, step = _BLOCK, _BLOCK
    while end <= length:
        yield end
        if end >= 4 * step:
            step *= 2
        end += step


def _read(body: bytes) -> tuple[Any, bytes]:
    """The adapter, and the prompt as bytes that begin alike where prompts do."""
    try:
        given = read_json(body)
    except (orjson.JSONDecodeError, InvalidRequestError):
        return None, body
    if type(given) is not dict:
        return None, body
    prompt = next((given[name] for name in _PROMPTS if given.get(name)), None)
    if prompt is None:
        return None, body
    parameters = given.get("parameters")
    members = {**parameters, **given} if type(parameters) is dict else given
    adapter = next((members[name] for name in _ADAPTERS if members.get(name)), None)
    before = b"".join(orjson.dumps(given[name]) for name in _BEFORE if given.get(name))
    # Without its last bracket, a list of messages is the beginning of the next turn's.
    return adapter, before + (prompt.encode() if type(prompt) is str else orjson.dumps(prompt)[:-1])


_MOST_KEYS = 100_000
"""The most keys remembered, about 40 MB: some thousand conversations, more than KV caches hold."""
_MOST_HOLDERS = 4
"""Replicas remembered for a beginning that many prompts share."""


class Affinity:
    """Chooses replicas. `slack`: how many more requests than the least loaded one a preferred replica may have."""

    def __init__(self, slack: int) -> None:
        self.slack = slack
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def choose(self, keys: Sequence[bytes], loads: Mapping[str, int], earlier: str | None = None) -> str | None:
        """The replica for a prompt with these keys (`PromptKeys.beginnings`); None if another choice is as good.

        It is the one that had the `earlier` turn, or the least loaded of those that had the longest known beginning and
        are not out of balance. For a prompt that is new it is the first of the two that the first key names that is
        not: several routers choose the same ones without knowing of each other.
        """
        if not keys:
            return None
        most = min(loads.values()) + self.slack
        if earlier is not None and loads.get(earlier, most + 1) <= most:
            return earlier
        for key in reversed(keys):
            holders = [replica for replica in self._holders.get(key, ()) if loads.get(replica, most + 1) <= most]
            if holders:
                return min(holders, key=loads.__getitem__)
        preferred = (replica for replica in ranked(keys[0], loads)[:2] if loads[replica] <= most)
        return next(preferred, None)

    def learn(self, keys: Iterable[bytes], replica: str) -> None:
        """Note that the replica was sent a prompt with these keys; the keys unseen for longest are forgotten."""
        for key in keys:
            others = tuple(other for other in self._holders.get(key, ()) if other != replica)
            self._holders[key] = (*others, replica)[-_MOST_HOLDERS:]
            self._holders.move_to_end(key)
        while len(self._holders) > _MOST_KEYS:
            self._holders.popitem(last=False)


def ranked(key: bytes, replicas: Iterable[str]) -> list[str]:
    """The replicas in the order that a key prefers them, by rendezvous hashing.

    The first one changes only for the keys of a replica that is gone, and for the keys that a new replica takes.
    """
    return sorted(replicas, key=lambda replica: blake2b(key + replica.encode(), digest_size=8).digest())
