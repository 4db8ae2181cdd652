"""Parses `{"prompt", "max_tokens", ...}`, the request of Truss's TensorRT-LLM template.

Source: the README of the template, and its `model/model.py` (truss-examples 5da3ff6) where they disagree: `max_tokens`
are new tokens (the README counts the prompt among them) and `beam_width` is 1 by default (the README: 50).
"""

from __future__ import annotations

from typing import Any

from djl_trtllm.api.base import Call, RawRequest, ResponseEncoder
from djl_trtllm.api.messages import MESSAGES, read_messages
from djl_trtllm.api.parameters import (
    BOOLEAN,
    IGNORED,
    TEXT,
    Kind,
    Parameter,
    Problems,
    Table,
    check_text,
    integer,
    number,
    read_object,
    read_words,
)
from djl_trtllm.api.sampling import MOST_TOKENS, SAMPLING, generation_request, read_sampling
from djl_trtllm.api.truss.encoders import TextEncoder, WholeTextEncoder
from djl_trtllm.config import Options

_DEFAULT_NEW_TOKENS = 50
_WORDS = Kind(
    "a list of words; an empty one means none",
    read_words,
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
)

FIELDS = Table(
    (row for row in SAMPLING if not {"stop", "bad_words", "n", "best_of"} & set(row.names)),
    (
        Parameter(("prompt",), TEXT, "prompt"),
        Parameter(("messages",), MESSAGES, IGNORED),
        Parameter(("max_tokens", "max_new_tokens"), integer(1, MOST_TOKENS), "max_new_tokens"),
        Parameter(("temperature",), number(0), "temperature"),
        Parameter(("bad_words_list", "bad_words"), _WORDS, "bad", union=True),
        Parameter(("stop_words_list", "stop_words"), _WORDS, "stop", union=True),
        Parameter(("stream",), BOOLEAN, "stream"),
        Parameter(("model",), target=IGNORED),
    ),
    elsewhere=dict.fromkeys(("inputs", "parameters"), "to /invocations"),
)


def parse(request: RawRequest, options: Options) -> Call:
    """Read the body. Raises InvalidRequestError."""
    payload, problems = read_object(request, "prompt"), Problems.of(options)
    values = FIELDS.read(payload, problems, "field")
    prompt: str | None = values.get("prompt")
    messages: list[dict[str, Any]] | None = None
    if payload.get("messages") is not None:
        messages = read_messages(payload["messages"], problems)
        if prompt is not None:
            problems.invalid.append("'prompt' and 'messages' are both given: expected one of them")
    else:
        check_text(payload, "prompt", problems)
    values["default_new_tokens"] = _DEFAULT_NEW_TOKENS
    sampling = read_sampling(values, problems)
    stream: bool = values.get("stream", True)
    if stream and sampling.beam_width > 1:
        problems.invalid.append(
            f"'beam_width' is {sampling.beam_width} and 'stream' not false: which beam is the best is known only at "
            "the end, expected a beam_width of 1 or 'stream' to be false"
        )
    problems.raise_any()
    encoder: ResponseEncoder = TextEncoder() if stream else WholeTextEncoder()
    generation = generation_request(values, sampling, False, prompt=None if messages else prompt, messages=messages)
    return Call((generation,), encoder, problems.headers)
