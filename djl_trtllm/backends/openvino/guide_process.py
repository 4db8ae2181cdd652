"""The process that tries guides: `python -m djl_trtllm.backends.openvino.guide_process FD ENGINE_DIR`.

A guide can let the compiler run for minutes, take all memory or overflow its stack. Here that ends nothing but this
process. Guides come and verdicts go over FD, one at a time; the process ends when the other end is closed.
"""

from __future__ import annotations

import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from openvino_genai import Tokenizer

from djl_trtllm.backends.openvino.guide_compiler import GuideCompiler, read_vocabulary
from djl_trtllm.child_process import allow_more_memory, leave_end_to_parent, write_no_core_file
from djl_trtllm.request import Guide

_MEMORY = 2 * 1024**3
"""Bytes that compiling may take."""
_STACK = 2 * 1024**2
"""Bytes, less than in the engine process (8 MiB): what fits here fits there."""
_TOKENS = 16
_AGAIN_SECONDS = 0.25
"""For a guide whose grammar is compiled already. The engine takes that time of every sequence's first step."""
_TOKEN_SECONDS = 0.1


class Verdict(msgspec.Struct, frozen=True):
    """`problem` says why a guide cannot be used, None if it can. `vocabulary`: see `GuideCompiler`."""

    problem: str | None
    vocabulary: int = 0


encode_guide = msgspec.msgpack.Encoder().encode
decode_guide = msgspec.msgpack.Decoder(Guide).decode
encode_verdict = msgspec.msgpack.Encoder().encode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode


def judge(compiler: GuideCompiler, guide: Guide) -> str | None:
    """Why a guide cannot be used; None if it can."""
    try:
        compiler.compile(guide)
        began = time.process_time()  # other processes do not make a guide slower
        compiler.compile(guide)
        again = time.process_time() - began
        compiler.compile(guide, _TOKENS)
        of_token = (time.process_time() - began - 2 * again) / _TOKENS
    except RuntimeError as error:
        return _reason(str(error))
    if again > _AGAIN_SECONDS:
        return f"it is too large: each sequence would stop the others for {again:.2f} seconds"
    if of_token > _TOKEN_SECONDS:
        return f"it is too complex: each token would take {of_token:.2f} seconds"
    return None


def _reason(message: str) -> str:
    """The last part of a message of OpenVINO, which begins with places in its source."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1].rpartition(" is false: ")[2].rpartition(".cc:")[2].lstrip("0123456789: ") if lines else "unknown"


def _serve(connection: Connection, engine_dir: Path) -> None:
    vocabulary = read_vocabulary(engine_dir)
    compiler = GuideCompiler(Tokenizer(str(engine_dir)), vocabulary)
    allow_more_memory(_MEMORY)
    try:
        while True:
            guide = decode_guide(connection.recv_bytes())
            connection.send_bytes(encode_verdict(Verdict(judge(compiler, guide), vocabulary)))
    except (EOFError, OSError):
        return


def main(argv: list[str]) -> None:
    """Judge guides until the engine process is gone."""
    leave_end_to_parent()
    write_no_core_file()
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve, args=(Connection(int(argv[1])), Path(argv[2])))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(sys.argv)
