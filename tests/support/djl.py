"""DJL Serving's side of a worker, without DJL: what it calls with, and what it reads."""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest


class Output:
    """Stands in for `djl_python.outputs.Output`."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code, self.message = code, message
        self.contents: dict[str | None, bytes] = {}

    def add(self, value: bytes, key: str | None = None) -> Output:
        self.contents[key] = value
        return self


def install_djl_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """`djl_python.outputs` as far as the handlers need it, until the end of the test."""
    package, outputs = ModuleType("djl_python"), ModuleType("djl_python.outputs")
    outputs.Output = Output  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "djl_python", package)
    monkeypatch.setitem(sys.modules, "djl_python.outputs", outputs)


class Input:
    """Stands in for `djl_python.inputs.Input`: one request, one call, or with `batch` a list of requests."""

    def __init__(self, content: bytes | None = None, **properties: str) -> None:
        self._content = content
        self.properties = dict(properties)
        self.contents: dict[str, bytes] = {}

    @classmethod
    def batch(cls, size: int, new: Mapping[int, tuple[bytes, Mapping[str, str]]], **properties: str) -> Input:
        """DJL's list in rolling batch mode. `new` are requests by their place, each a body and its properties."""
        made = cls(None, batch_size=str(size), **properties)
        for index in range(size):
            prefix = f"batch_{index:03d}."
            body, own = new.get(index, (b"", {}))
            made.contents[prefix + "data"] = body
            if index in new:
                made.contents[prefix + "seed"] = b"42"
                made.properties |= {prefix + name: value for name, value in own.items()}
        return made

    # -- what the worker calls -------------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        return self._content is None and not self.contents

    def get_properties(self) -> dict[str, str]:
        return self.properties

    def get_property(self, key: str) -> str | None:
        return self.properties.get(key)

    def get_as_bytes(self) -> bytes | None:
        return self._content

    def get_content(self) -> Input:
        return self

    def get_keys(self) -> Sequence[str]:
        return list(self.contents)

    def get(self, key: str) -> bytes | None:
        return self.contents.get(key)


class Frame(NamedTuple):
    """What DJL's Java side reads from its socket."""

    code: int
    message: str
    properties: dict[str, str]
    contents: list[dict[str, str]]


class Reader:
    """Reads what a worker has written."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def frames(self) -> list[Frame]:
        """All frames."""
        found = []
        while self._at < len(self._data):
            code, message = self._short(), self._text()
            properties = {self._text(): self._text() for _ in range(self._short())}
            found.append(Frame(code, message, properties, [self._content() for _ in range(self._short())]))
        return found

    def pairs(self) -> dict[str, str]:
        """An encoded item."""
        pairs = {self._text(): self._text() for _ in range(self._short())}
        assert self._at == len(self._data)
        return pairs

    def _content(self) -> dict[str, str]:
        assert self._take(4) == b"\xff\xff\xff\xff", "a content without a key"
        return Reader(self._take(self._length())).pairs()

    def _short(self) -> int:
        return int(struct.unpack(">h", self._take(2))[0])

    def _length(self) -> int:
        return int(struct.unpack(">i", self._take(4))[0])

    def _text(self) -> str:
        return self._take(self._length()).decode()

    def _take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        assert len(taken) == count, "cut off"
        self._at += count
        return taken


class Socket:
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.writes.append(data)

    @property
    def frames(self) -> list[Frame]:
        """What was written, read as DJL does."""
        return Reader(b"".join(self.writes)).frames()


def answer_of(items: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The whole response of a request from its items, as in `ai.djl.python.engine.Request.addResponse`."""
    assert [item["last"] for item in items] == ["false"] * (len(items) - 1) + ["true"]
    failed = [item for item in items if "code" in item]
    return {"text": "".join(item["data"] for item in items), "error": failed[-1]["error"] if failed else None}
