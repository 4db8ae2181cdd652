"""Stored responses, each of which continues the conversation of another one (`api.kept`)."""

from typing import Any

import orjson

from djl_trtllm import errors
from djl_trtllm.api import content
from djl_trtllm.api.base import ModelContext
from djl_trtllm.api.parameters import show
from djl_trtllm.bounded_json import read_json


class Stored:
    """The stored responses of one API key. An entry has the response, its own input and output, and its predecessor."""

    def __init__(self, model: ModelContext, key: str) -> None:
        self._kept = model.kept
        self._key = key
        self._seconds = model.options.stored_responses_timeout
        self._left = model.options.max_request_size
        """Bytes that a request may still read: stored items are bounded as those of a body."""

    def response(self, name: str) -> bytes | None:
        entry = self._kept.find(self._key, name, seconds=self._seconds)
        return None if entry is None else entry[0]

    def conversation(self, name: str) -> list[Any]:
        """The items of a response and of all before it. Raises InvalidRequestError."""
        turns: list[bytes] = []
        while name:
            entry = self._kept.find(self._key, name, seconds=self._seconds)
            if entry is None or len(turns) > content.MOST_MESSAGES:
                raise errors.InvalidRequestError(
                    f"the response {show(name)} is not stored: it has expired, was not to be stored, or belongs to "
                    "another API key; send the whole conversation"
                )
            self._take(len(entry[1]) + len(entry[2]))
            turns += [each[1:-1] for each in (entry[2], entry[1]) if len(each) > len(b"[]")]
            name = entry[3].decode()
        items: list[Any] = read_json(b"[%b]" % b",".join(reversed(turns)))
        return items

    def output(self, name: str, at: int) -> Any:
        """An item of a response's output. None if there is none."""
        entry = self._kept.find(self._key, name, seconds=self._seconds)
        if entry is None:
            return None
        self._take(len(entry[2]))
        items = read_json(entry[2])
        return items[at] if at < len(items) else None

    def _take(self, size: int) -> None:
        """Count bytes, before anything is done with them."""
        self._left -= size
        if self._left < 0:
            raise errors.InvalidRequestError(
                "the stored items are more than max_request_size: begin a new conversation with a summary of this one"
            )


def store(
    model: ModelContext,
    key: str,
    name: str,
    own: bytes,
    previous: str,
    response: bytes,
    output: list[dict[str, Any]],
) -> None:
    """Store a response with its own items, a list in JSON."""
    options = model.options
    parts = (response, own, orjson.dumps(output), previous.encode())
    most, seconds = options.stored_responses_memory, options.stored_responses_timeout
    model.kept.keep(key, name, parts, most_bytes=most, seconds=seconds)
