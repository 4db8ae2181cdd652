"""Scripted updates of the rolling batch, and what to do with them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub

from djl_trtllm.api import Prompt, ResponseEncoder
from djl_trtllm.api.dialects.lmi.dialect import FORMATTERS
from djl_trtllm.api.dialects.lmi.responses import Presentation
from djl_trtllm.errors import GenerationError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token

GOLDEN = Path(__file__).parent / "golden"

PROMPT = Prompt(
    "The wolf",
    3,
    (Token(1, "", None, True), Token(450, "The", None, False), Token(281, " wolf", None, False)),
)

TOKENS = [
    Token(304, ' said: "', -0.0524, False),
    Token(11157, "", -1.2865, False),
    Token(278, "é🦊\n", -0.0075, False),
    Token(29901, "\\ \t", None, False),
]
END = Token(2, "", -0.5, True)
TEXT = ' said: "é🦊\n\\ \t'

EOS = [
    OutputChunk(0, TOKENS[:1], None),
    OutputChunk(0, TOKENS[1:3], None),
    OutputChunk(0, TOKENS[3:], None),
    OutputChunk(0, [END], SequenceResult(FinishReason.END_TOKEN, 5, -1.8464, 7)),
]
"""Ends with its end token, two tokens merged on the way."""

STOP = [
    OutputChunk(0, TOKENS[:1], None),
    OutputChunk(0, TOKENS[1:], None),
    OutputChunk(0, [], SequenceResult(FinishReason.STOP, 5, -1.8464, 7, stop_sequence="###")),
]
"""Ends without a token: the stop string took the text."""

FAILURE = GenerationError('the engine "died"')
FAILED = [
    OutputChunk(0, TOKENS[:1], None),
    OutputChunk(0, TOKENS[1:2], SequenceResult(FinishReason.ERROR, 2, None, None, error=FAILURE)),
]


def seconds(work: Callable[[], object]) -> float:
    """The processor time of the fastest of three."""

    def once() -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    return min(once() for _ in range(3))


def several(n: int, generation: int = 0) -> list[OutputChunk]:
    """`n` sequences, interleaved; sequence i says "i0 i1" and ends by length."""
    updates = [
        OutputChunk(index, [Token(index, f"{index}0", -0.1 * (index + 1), False)], None, generation)
        for index in range(n)
    ]
    updates += [
        OutputChunk(
            index,
            [Token(index + 10, f" {index}1", -0.1, False)],
            SequenceResult(FinishReason.LENGTH, 2, -0.1 * (index + 2), index),
            generation,
        )
        for index in range(n)
    ]
    return updates


def answer(encoder: ResponseEncoder, updates: list[OutputChunk]) -> bytes:
    """The answer's whole body."""
    encoder.begin(PROMPT)
    return b"".join([encoder.encode(update) for update in updates])


def make(name: str, **view: Any) -> ResponseEncoder:
    """An encoder by the name of its formatter."""
    return FORMATTERS[name](Presentation(inputs=PROMPT.text, **view))


def check_golden(name: str, body: bytes) -> None:
    """Compares with the stored answer; UPDATE_GOLDEN=1 stores it."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_bytes(body)
    assert body.decode() == path.read_bytes().decode()


def parse_lines(body: bytes) -> list[dict[str, Any]]:
    """The objects of a stream, its lines cut as httpx does it: at every character that Unicode calls a line end."""
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines()]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def client_lines(body: bytes) -> list[str] | list[bytes]:
    """The lines of a stream as the Hugging Face client gets them: text since 1.0."""
    return body.split(b"\n") if huggingface_hub.__version__.startswith("0.") else body.decode().split("\n")
