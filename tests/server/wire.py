"""A transport of a connection that is no socket."""

from __future__ import annotations

import asyncio
from typing import Any


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__({})
        self.written = b""
        self.done: set[str] = set()
        self.unsent = 0

    def write(self, data: Any) -> None:
        if "eof" in self.done:
            raise RuntimeError("Cannot call write() after write_eof()")  # as real ones do
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.done.add("eof")

    def is_closing(self) -> bool:
        return bool(self.done & {"close", "abort"})

    def close(self) -> None:
        self.done.add("close")

    def abort(self) -> None:
        self.done.add("abort")

    def pause_reading(self) -> None:
        self.done.add("pause")

    def resume_reading(self) -> None:
        self.done.discard("pause")

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol
