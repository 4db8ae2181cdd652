"""The API of Truss's TensorRT-LLM template: a prompt in, raw text out."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import orjson

from djl_trtllm import errors
from djl_trtllm.api import base, parameters as kinds
from djl_trtllm.api.content import MESSAGES, read_texts
from djl_trtllm.api.openapi import read_operations
from djl_trtllm.api.parameters import IGNORED, Kind, Parameter, Problems, Table, check_text, read_object, read_words
from djl_trtllm.api.sampling import MOST_TOKENS, SAMPLING, generation_request, read_sampling
from djl_trtllm.api.texts import PlainTextEncoder, Presentation
from djl_trtllm.config import Options

_SERVER, _MODEL, _CLIENT = "500", "600", "700"
_SOURCE = ("X-BASETEN-ERROR-SOURCE", "04")
_CODE = "X-BASETEN-ERROR-CODE"

_ERROR_CODES: dict[type[errors.RequestError], str] = {
    errors.RequestError: _CLIENT,
    errors.UnknownModelError: _SERVER,
    errors.OverloadedError: _SERVER,
    errors.NotReadyError: _SERVER,
    errors.RequestTimeoutError: _MODEL,
    errors.GenerationError: _MODEL,
}
"""Baseten's error codes."""


class WholeTextEncoder(base.WholeEncoder):
    """`{"text"}` at the end."""

    def __init__(self) -> None:
        super().__init__(1)

    def _body(self) -> bytes:
        return orjson.dumps({"text": self._output.sequences[0].text})


_DEFAULT_NEW_TOKENS = 50
_WORDS = Kind(
    "a list of words; an empty one means none",
    read_words,
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
)

FIELDS = Table(
    (row for row in SAMPLING if not {"stop", "bad_words", "n", "best_of"} & set(row.names)),
    (
        Parameter(("prompt",), kinds.TEXT, "prompt"),
        Parameter(("messages",), MESSAGES, IGNORED),
        Parameter(("max_tokens", "max_new_tokens"), kinds.integer(1, MOST_TOKENS), "max_new_tokens"),
        Parameter(("temperature",), kinds.number(0), "temperature"),
        Parameter(("bad_words_list", "bad_words"), _WORDS, "bad", union=True),
        Parameter(("stop_words_list", "stop_words"), _WORDS, "stop", union=True),
        Parameter(("stream",), kinds.BOOLEAN, "stream"),
        Parameter(("model",), target=IGNORED),
    ),
    elsewhere=dict.fromkeys(("inputs", "parameters"), "to /invocations"),
)


class Truss(base.Dialect):
    """`:predict` of a Truss server, and `/predict` of Baseten's gateway. The model's name in a Truss is `model`.

    Sources: the README of the template, and its `model/model.py` (truss-examples 5da3ff6) where they disagree:
    `max_tokens` are new tokens (the README counts the prompt among them) and `beam_width` is 1 by default (the README:
    50). Errors have Baseten's headers (`truss/templates/server/common/errors.py`, truss 0bee989): error code 500 where
    the server fails, 600 where the model does, 700 where the request is at fault.
    """

    title = "Truss"
    paths = ("/v1/models/{model}:predict", "/predict")
    pages = ("/v1/models/{model}/loaded",)
    health = frozenset(pages)
    aliases = frozenset({"model"})
    statuses = MappingProxyType({errors.OverloadedError: 429, errors.NotReadyError: 503})
    tables = dict.fromkeys(paths, (FIELDS,))
    descriptions = read_operations("truss.toml")

    def page(self, request: base.RawRequest, models: Sequence[base.ModelStatus]) -> base.Reply:
        """An empty object when the model is ready."""
        for model in models:
            if not model.ready:
                raise errors.NotReadyError(f"Model with name {model.name} is not ready.")
        return base.Reply.json({})

    def parse(self, request: base.RawRequest, model: base.ModelContext) -> base.Call:
        payload, problems = read_object(request, "prompt"), Problems.of(model.options)
        values = FIELDS.read(payload, problems, "field")
        prompt: str | None = values.get("prompt")
        messages: list[dict[str, Any]] | None = None
        if payload.get("messages") is not None:
            messages = read_texts(payload["messages"], problems)
            if prompt is not None:
                problems.invalid.append("'prompt' and 'messages' are both given: expected one of them")
        else:
            check_text(payload, "prompt", problems)
        values["default_new_tokens"] = _DEFAULT_NEW_TOKENS
        sampling = read_sampling(values, problems)
        stream: bool = values.get("stream", True)
        if stream and sampling.beam_width > 1:
            problems.invalid.append(
                f"'beam_width' is {sampling.beam_width} and 'stream' not false: which beam is the best is known only "
                "at the end, expected a beam_width of 1 or 'stream' to be false"
            )
        problems.raise_any()
        encoder: base.ResponseEncoder = (
            PlainTextEncoder(Presentation(), "application/octet-stream") if stream else WholeTextEncoder()
        )
        generation = generation_request(values, sampling, False, prompt=None if messages else prompt, messages=messages)
        return base.Call((generation,), encoder, problems.headers)

    def error_body(self, message: str, error: errors.RequestError | None) -> object:
        return {"error": message if error is not None else "Internal Server Error, see the server's log."}

    def encode_error(self, error: BaseException, options: Options) -> base.Reply:
        reply = super().encode_error(error, options)
        code = base.nearest_row(_ERROR_CODES, error) if isinstance(error, errors.RequestError) else _SERVER
        return reply._replace(headers=(_SOURCE, (_CODE, code), *reply.headers))


TRUSS = Truss()
