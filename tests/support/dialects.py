"""One request in every dialect: the same prompt and sampling on each of its paths, and the text of the response.

A dialect without a row in `ROWS`, or a path that none of its rows means, fails `test_every_path_has_a_row`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from botocore.eventstream import EventStreamBuffer

from djl_trtllm.api.registry import DIALECTS

Body = dict[str, Any]
Build = Callable[[str, Mapping[str, Any], bool], Body]
"""Prompt, sampling (names of LMI, with `max_new_tokens`) and whether to stream, as a body."""
Read = Callable[[bytes], str]


@dataclass(frozen=True)
class Row:
    """Paths whose end matches `path`. `chat`: the prompt is the only message of a chat.

    `whole` and `stream` read the text of a response; None where a path has none of that kind.
    """

    path: str
    build: Build
    whole: Read | None
    stream: Read | None
    chat: bool = False


@dataclass(frozen=True)
class Way:
    """A path of a dialect, whole or as a stream."""

    dialect: str
    path: str
    streams: bool
    row: Row

    @property
    def name(self) -> str:
        kind = "stream" if self.streams else "whole"
        return f"{self.dialect}-{self.path}-{'chat-' if self.row.chat else ''}{kind}"

    def url(self, model: str) -> str:
        """The path on a server with that model."""
        return re.sub(r"\{\w+\}", model, self.path.replace("{version}", "1"))

    def body(self, prompt: str, sampling: Mapping[str, Any]) -> Body:
        return self.row.build(prompt, sampling, self.streams)

    def text(self, body: bytes) -> str:
        """What was generated."""
        read = self.row.stream if self.streams else self.row.whole
        assert read is not None
        return read(body)


# -- bodies ------------------------------------------------------------------------------------------------------------


def _inputs(prompt: str, sampling: Mapping[str, Any], stream: bool) -> Body:
    return {"inputs": prompt, "parameters": dict(sampling), "stream": stream}


def _messages(prompt: str, sampling: Mapping[str, Any], stream: bool) -> Body:
    return {"messages": [{"role": "user", "content": prompt}], "stream": stream, **_max_tokens(sampling)}


def _prompt(prompt: str, sampling: Mapping[str, Any], stream: bool) -> Body:
    return {"prompt": prompt, "stream": stream, **_max_tokens(sampling)}


def _input(prompt: str, sampling: Mapping[str, Any], stream: bool) -> Body:
    names = {"max_new_tokens": "max_output_tokens"}
    return {"input": prompt, "stream": stream, **{names.get(name, name): value for name, value in sampling.items()}}


def _generate(prompt: str, sampling: Mapping[str, Any], stream: bool) -> Body:
    return {"text_input": prompt, "stream": stream, **triton_inputs(sampling)}


def _infer(prompt: str, sampling: Mapping[str, Any], stream: bool) -> Body:
    values = {"text_input": prompt, **triton_inputs(sampling)}
    inputs = [
        {"name": name, "datatype": _DATATYPES.get(name, "INT32"), "shape": [1, 1], "data": [value]}
        for name, value in values.items()
    ]
    return {"inputs": inputs}


_DATATYPES = {"text_input": "BYTES", "temperature": "FP32", "top_p": "FP32", "random_seed": "UINT64"}


def triton_inputs(sampling: Mapping[str, Any]) -> Body:
    """The sampling as Triton's inputs, which have no `do_sample`."""
    names = {"max_new_tokens": "max_tokens", "seed": "random_seed"}
    return {names.get(name, name): value for name, value in sampling.items() if name != "do_sample"}


def _max_tokens(sampling: Mapping[str, Any]) -> Body:
    return {{"max_new_tokens": "max_tokens"}.get(name, name): value for name, value in sampling.items()}


# -- texts -------------------------------------------------------------------------------------------------------------


def _whole(*path: str | int) -> Read:
    def read(body: bytes) -> str:
        value: Any = json.loads(body)
        for step in path:
            value = value[step]
        return str(value)

    return read


def _stream(*path: str | int) -> Read:
    def read(body: bytes) -> str:
        return "".join(_joined(event, path) for event in events(body))

    return read


def events(body: bytes) -> Iterator[Any]:
    """The objects of server-sent events, or of lines. AssertionError: one is an error."""
    for line in body.decode().split("\n"):
        content = line.removeprefix("data:").strip()
        if content and content != "[DONE]" and not line.startswith("event:"):
            event = json.loads(content)
            assert "error" not in event, event
            yield event


def _joined(event: Any, path: tuple[str | int, ...]) -> str:
    for step in path:
        if isinstance(step, int) and len(event) <= step:
            return ""  # the usage at the end has no choice
        event = (event or {}).get(step) if isinstance(step, str) else event[step]
    return event or ""


def _aws(read: Read) -> Read:
    def read_parts(body: bytes) -> str:
        buffer = EventStreamBuffer()
        buffer.add_data(body)
        parts = list(buffer)
        assert all(part.headers[":event-type"] == "PayloadPart" for part in parts)
        return read(b"".join(part.payload for part in parts))

    return read_parts


def _text_output(body: bytes) -> str:
    (output,) = (each for each in json.loads(body)["outputs"] if each["name"] == "text_output")
    (text,) = output["data"]
    return str(text)


_LINES = _stream("token", "text")
_GENERATED = _whole("generated_text")
_MESSAGE, _DELTA = ("choices", 0, "message", "content"), ("choices", 0, "delta", "content")

ROWS: dict[str, tuple[Row, ...]] = {
    "Lmi": (
        Row("/(invocations|predictions/{model}|invoke)", _inputs, _GENERATED, _LINES),
        Row("/(invocations|predictions/{model}|invoke)", _messages, _whole(*_MESSAGE), _stream(*_DELTA), chat=True),
        Row("/invocations-response-stream", _inputs, None, _aws(_LINES)),
        Row("/invocations-response-stream", _messages, None, _aws(_stream(*_DELTA)), chat=True),
    ),
    "Messages": (Row("/v1/messages", _messages, _whole("content", 0, "text"), _stream("delta", "text"), chat=True),),
    "Responses": (
        Row(
            "/v1/responses",
            _input,
            _whole("output", 0, "content", 0, "text"),
            _stream("delta"),
            chat=True,
        ),
    ),
    "OpenAi": (
        Row("/chat/completions", _messages, _whole(*_MESSAGE), _stream(*_DELTA), chat=True),
        Row("(?<!chat)/completions", _prompt, _whole("choices", 0, "text"), _stream("choices", 0, "text")),
    ),
    # They generate no text: tests/integration/server/test_embeddings.py.
    "Embeddings": (Row("/embeddings", _input, None, None),),
    "Rerank": (Row("/(rerank|score)", _input, None, None),),
    "Tei": (Row("/embed", _inputs, None, None),),
    "Tgi": (
        Row("/generate", _inputs, _GENERATED, None),
        Row("/generate_stream", _inputs, None, _LINES),
        Row("^/", _inputs, _whole(0, "generated_text"), _LINES),
    ),
    "Triton": (
        Row("/generate", _generate, _whole("text_output"), None),
        Row("/generate_stream", _generate, None, _stream("text_output")),
        Row("/infer", _infer, _text_output, None),
    ),
    "Truss": (
        Row("predict", _prompt, _whole("text"), bytes.decode),
        Row("predict", _messages, _whole("text"), bytes.decode, chat=True),
    ),
}


def rows_of(dialect: str, path: str) -> list[Row]:
    """The rows that mean a path."""
    found = []
    for row in ROWS.get(dialect, ()):
        pattern = row.path.replace("{", r"\{").replace("}", r"\}")
        found += [row] * (re.search(f"{pattern}$", path) is not None)
    return found


def ways() -> list[Way]:
    """Every way of the dialects that are registered."""
    found = []
    for dialect in DIALECTS:
        name = type(dialect).__name__
        for path in dialect.paths:
            for row in rows_of(name, path):
                found += [Way(name, path, False, row)] * (row.whole is not None)
                found += [Way(name, path, True, row)] * (row.stream is not None)
    return found


def without_row() -> list[str]:
    """The paths that no row means."""
    named = [(type(dialect).__name__, path) for dialect in DIALECTS for path in dialect.paths]
    return [f"{dialect} {path}" for dialect, path in named if not rows_of(dialect, path)]


# -- inputs of tritonclient, over HTTP and gRPC ------------------------------------------------------------------------

_KINDS = {
    "BYTES": np.object_,
    "BOOL": np.bool_,
    "FP32": np.float32,
    "INT32": np.int32,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
}


def tensor(triton: ModuleType, name: str, values: list[Any], datatype: str, **how: Any) -> Any:
    """An input of one row, or of several where `values` are lists.

    `triton` is `tritonclient.http` or `tritonclient.grpc`; `how` goes to `set_data_from_numpy`.
    """
    rows = values if isinstance(values[0], list) else [values]
    array = np.array(rows, _KINDS[datatype])
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array, **how)
    return made


def prompt_tensors(triton: ModuleType, text: str, tokens: int, *, stream: bool | None = None, **how: Any) -> list[Any]:
    """The inputs of a request, `stream` among them where it is not None."""
    given = [
        tensor(triton, "text_input", [text], "BYTES", **how),
        tensor(triton, "max_tokens", [tokens], "INT32", **how),
    ]
    return given if stream is None else [*given, tensor(triton, "stream", [stream], "BOOL", **how)]
