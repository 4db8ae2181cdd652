"""The process that tries guides, of a backend whose engine would not survive a bad one.

A guide can let the compiler run for minutes, take all memory or overflow its stack. Here that ends nothing but this
process. Guides come and verdicts go over a file descriptor, one at a time; the process ends when the other end is
closed. A backend's own module makes the judge: `python -m MODULE FD DIRECTORY`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from msgspec.structs import replace

from djl_trtllm.child_process import allow_more_memory, leave_end_to_parent, write_no_core_file
from djl_trtllm.config.masking import shortened
from djl_trtllm.request import Guide

_MEMORY = 2 * 1024**3
"""Bytes that compiling may take."""
_STACK = 2 * 1024**2
"""Bytes, less than in the engine process (8 MiB): what fits here fits there."""
_LONGEST = 300
"""At most this many characters of a problem reach the client."""


class Verdict(msgspec.Struct, frozen=True):
    """`problem` says why a guide cannot be used, None if it can. `vocabulary`: how many logits a token has, where the
    engine needs that to compile the guide."""

    problem: str | None
    vocabulary: int = 0


encode_guide = msgspec.msgpack.Encoder().encode
decode_guide = msgspec.msgpack.Decoder(Guide).decode
encode_verdict = msgspec.msgpack.Encoder().encode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode

Judge = Callable[[Guide], Verdict]


def reason_of(message: str) -> str:
    """The last part of a message of xgrammar or OpenVINO, which begins with places in its source."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1].rpartition(" is false: ")[2].rpartition(".cc:")[2].lstrip("0123456789: ") if lines else "unknown"


def serve_judge(make_judge: Callable[[Path], Judge], argv: list[str]) -> None:
    """Judge guides until the engine process is gone. `make_judge` gets the directory."""
    leave_end_to_parent()
    write_no_core_file()
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve, args=(Connection(int(argv[1])), make_judge, Path(argv[2])))
    thread.start()
    thread.join()


def _readable(verdict: Verdict) -> Verdict:
    """With its problem shortened, which may quote the guide."""
    return verdict if verdict.problem is None else replace(verdict, problem=shortened(verdict.problem, _LONGEST))


def _serve(connection: Connection, make_judge: Callable[[Path], Judge], directory: Path) -> None:
    judge = make_judge(directory)
    allow_more_memory(_MEMORY)
    try:
        while True:
            guide = decode_guide(connection.recv_bytes())
            connection.send_bytes(encode_verdict(_readable(judge(guide))))
    except (EOFError, OSError):
        return
