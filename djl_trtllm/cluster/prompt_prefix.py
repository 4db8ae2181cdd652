"""Keys of the beginnings of a request's prompt: requests whose prompts begin alike have their first keys in common."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import orjson

from djl_trtllm.api.json_body import read_json
from djl_trtllm.errors import InvalidRequestError

_BLOCK = 128
"""Bytes of the shortest beginning: about the tokens of a block of the KV cache, of which there is nothing to reuse
below one."""
_KEY_BYTES = 8
_PROMPTS = ("messages", "prompt", "inputs", "text_input")
_ADAPTERS = ("adapters", "adapter_id")


def prefix_keys(body: bytes) -> tuple[bytes, ...]:
    """A key for each of several beginnings of the prompt, from short to long; before them its adapter's, if it has one.

    The beginnings have 1, 2, 3, 4, 6, 8, 12, ... blocks, so that a prompt of any length has few keys, and two prompts
    share the key of at least two thirds of what they have in common. A body in which no prompt is found is one itself.
    """
    adapter, prompt = _read(body)
    hasher = blake2b(digest_size=_KEY_BYTES)
    keys = []
    if adapter is not None:
        # Prompts of another adapter have nothing in the KV cache that this one could use.
        hasher.update(orjson.dumps(adapter))
        keys.append(hasher.digest())
    view, begin = memoryview(prompt), 0
    for end in _ends(len(prompt)):
        hasher.update(view[begin:end])
        keys.append(hasher.digest())
        begin = end
    return tuple(keys)


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
    tools = given.get("tools")
    # Chat templates put tools before the messages.
    before = orjson.dumps(tools) if tools else b""
    return adapter, before + (prompt.encode() if type(prompt) is str else orjson.dumps(prompt))
