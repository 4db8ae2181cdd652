"""What a dialect is: the paths, the request format, the response format and the errors of one HTTP API.

A `Dialect` parses a request into a `Call`: what to generate, and the `ResponseEncoder` that turns the output into the
bytes of the response. Whole responses and streams use the same calls: the encoder of a whole response returns `b""`
until every sequence has ended, then the body. Nothing in this package waits or knows a socket.

    call = dialect.parse(RawRequest(body, properties), model)  # raises InvalidRequestError
    call.encoder.begin(prompt)                                 # once for each prompt, in their order
    data = call.encoder.encode(chunk)                          # for each output chunk
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import orjson

from djl_trtllm.api.json_body import read_json
from djl_trtllm.api.schemas import any_of
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    InvalidRequestError,
    MethodNotAllowedError,
    NotReadyError,
    OverloadedError,
    RequestError,
)
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import GenerationRequest, Origin, OutputChunk, Token

Row = TypeVar("Row")


@dataclass(frozen=True)
class RawRequest:
    """A request as it arrived.

    `properties` are its headers by lower-case name and SageMaker's custom attributes (`api.headers`). `path` is the
    one of the dialect's paths that matched, `parameters` are the values of its `{placeholders}`, `query` those of the
    query string (the first of repeated ones).
    """

    body: bytes
    properties: Mapping[str, str]
    path: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def content_type(self) -> str | None:
        return self.properties.get("content-type")

    @cached_property
    def json(self) -> Any:
        """The body as JSON, whatever its content type. Raises InvalidRequestError."""
        try:
            return read_json(self.body)
        except orjson.JSONDecodeError as error:
            shown = self.body[:80].decode(errors="replace")
            raise InvalidRequestError(f"the body is not valid JSON: {error}. Received {shown!r}") from None


class Prompt(NamedTuple):
    """The prompt as the model sees it.

    `text` is after the chat template, `length` in tokens. `tokens` may be empty unless the encoder
    `wants_prompt_tokens`.
    """

    text: str
    length: int
    tokens: Sequence[Token] = ()


class ResponseEncoder(Protocol):
    """Encodes the response to one request. One object per request: it keeps what was generated so far."""

    @property
    def stream(self) -> bool:
        """Whether to send bytes as they come. False: one body, at the end."""

    @property
    def content_type(self) -> str:
        """Media type of the response."""

    @property
    def wants_prompt_tokens(self) -> bool:
        """Whether `begin` needs `Prompt.tokens`."""

    def begin(self, prompt: Prompt) -> None:
        """Receive a tokenised prompt: called once for each prompt of the call, in order, before the first `encode`."""

    def encode(self, chunk: OutputChunk) -> bytes:
        """The bytes that this chunk adds to the response; `b""` if none.

        `chunk.generation` is the position in `Call.requests`, `chunk.index` the sequence of that generation. A chunk
        that ends with an error is encoded as its tokens and then `error`. If nothing was sent yet, the caller sends
        `Dialect.encode_error` instead, so that the client gets a status. Raises RequestError if the response cannot
        go on: a model directory's own formatter failed, or the format cannot express the error of the chunk.
        """

    def error(self, error: RequestError) -> bytes:
        """The last bytes of a response that has begun and cannot be finished.

        `b""` if the format cannot express it; the caller then closes the connection without ending the body.
        """


class Call(NamedTuple):
    """A parsed request: what to generate, all of it or nothing, and the encoder of the one response.

    `headers` are additional headers of the response, `late_headers` those that are known when the encoder has returned
    the first bytes. `origin` is for logs and pages, and says whose share of the batch it has; the server fills it in.
    """

    requests: tuple[GenerationRequest, ...]
    encoder: ResponseEncoder
    headers: tuple[tuple[str, str], ...] = ()
    late_headers: Callable[[], tuple[tuple[str, str], ...]] = tuple
    origin: Origin = Origin()

    @property
    def sequences(self) -> int:
        return sum(request.sampling.n for request in self.requests)


class Reply(NamedTuple):
    """A whole response that needs no model: an error or a status."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def json(cls, body: object, status: int = 200) -> Reply:
        return cls(status, "application/json", orjson.dumps(body))


class RequestParser(Protocol):
    """Reads a request: see `Dialect.parse`."""

    def parse(self, request: RawRequest, options: Options) -> Call:
        """Read a request for a model with these options."""


class ModelContext(Protocol):
    """What a dialect knows of the model that a request is for."""

    @property
    def name(self) -> str:
        """The name that requests use."""

    @property
    def options(self) -> Options:
        """The model's configuration; a dialect takes its defaults from it."""

    @property
    def max_seq_len(self) -> int:
        """The longest sequence, prompt and output together."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def custom(self) -> RequestParser | None:
        """The formatters of the model's own `model.py`, which replace LMI's parser and encoders."""


class ModelStatus(NamedTuple):
    """A model for a page or an action. `context` is None while its files are prepared.

    `render` makes the prompt of chat messages for an action, from these and the template's keywords; it waits. Raises
    InvalidRequestError.
    """

    name: str
    ready: bool
    context: ModelContext | None
    statistics: Statistics
    render: Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str] | None = None


class Described(Protocol):
    """What describes a body: a table of parameters (`api.parameters`)."""

    def schema(self) -> dict[str, Any]:
        """The JSON schema."""


class Operation(NamedTuple):
    """What the description at `/openapi.json` says of one method of a path, beside its errors.

    `bodies` and `responses` (of status 200) are JSON schemas by media type, `query` those of the query's parameters.
    `example` is a body that works. `errors` are the statuses with which a page may answer instead, and what they mean.
    """

    summary: str = ""
    bodies: Mapping[str, Any] = MappingProxyType({})
    responses: Mapping[str, Any] = MappingProxyType({"*/*": {}})
    query: Mapping[str, Any] = MappingProxyType({})
    example: Any = None
    errors: Mapping[int, str] = MappingProxyType({})


class Dialect(ABC):
    """One HTTP API. An object without state: `api.registry` lists one of each, and the server mounts its paths.

    `paths` take POST requests and generate. `pages` (GET) and `actions` (POST) do not. In all of them, `{model}` is
    the model's name, in `paths` also `{endpoint}` SageMaker's endpoint.
    """

    paths: tuple[str, ...]
    pages: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    health: frozenset[str] = frozenset()
    """Those of `pages` that need no API key: they say whether the server or a model is ready."""
    names_model: bool = False
    """Whether `model_name` finds the model's name in the request, for `paths` and `actions` without it."""
    sagemaker: bool = False
    """Whether SageMaker's runtime calls these `paths`: errors on those with `{endpoint}` have the shape that it gives
    them (`endpoint_errors`), and requests may belong to stateful sessions."""
    aliases: frozenset[str] = frozenset()
    """Names that mean the only model, if no model has that name."""
    tables: Mapping[str, tuple[Described, ...]] = MappingProxyType({})
    """The tables of the parameters of a path of `paths` or `actions`; with several, a body fits one of them."""
    descriptions: Mapping[str, Operation] = MappingProxyType({})
    """What the description says of a path beside the tables: a summary, an example, the responses. A page's key begins
    with "GET "."""

    @cached_property
    def name(self) -> str:
        """What logs and metrics call it."""
        return type(self).__name__.lower()

    def model_name(self, request: RawRequest) -> str | None:
        """The model that the request names. Called before `parse`; None for the only model."""
        return None

    def page(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """One of `pages`. `models` are all models, or the one that the path names."""
        raise NotImplementedError(f"{type(self).__name__} has no page {request.path}")

    def act(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """One of `actions`. `models` are all models, or the one that the request names.

        Called in a thread, because tokenising takes time. Raises RequestError.
        """
        raise NotImplementedError(f"{type(self).__name__} has no action {request.path}")

    def describe(self, path: str, *, page: bool = False) -> Operation:
        """What the description at `/openapi.json` says of one of `paths` and `actions`, or of one of `pages`."""
        if page:
            return self.descriptions.get(f"GET {path}", Operation())
        described = self.descriptions.get(path, Operation())
        schemas = [table.schema() for table in self.tables.get(path, ())]
        body: dict[str, Any] = {"application/json": any_of(*schemas)} if schemas else {}
        return described._replace(bodies={**body, **described.bodies} or {"*/*": {}})

    @abstractmethod
    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        """Read a request.

        Raises InvalidRequestError with everything that is wrong, or UnsupportedParameterError if only parameters are
        wrong that this server cannot honour.
        """

    @abstractmethod
    def encode_error(self, error: BaseException, options: Options) -> Reply:
        """The reply to a request of which nothing was sent yet.

        An exception that is no RequestError is a defect: its message may contain internals and must not reach the
        client. `options` are the server's, or the worker's inside DJL Serving.
        """


def nearest_row(table: Mapping[type[RequestError], Row], error: RequestError, default: type[RequestError]) -> Row:
    """The row of an error table for the error's class, or for the nearest base class that has one, or `default`'s."""
    return next((table[base] for base in type(error).__mro__ if base in table), table[default])


def status_from(status: int | str, options: Options) -> int:
    """The status of an error table: a number, or the option that has it."""
    value: int = status if isinstance(status, int) else getattr(options, status)
    return value


def error_headers(error: BaseException) -> tuple[tuple[str, str], ...]:
    """The headers that replies to this error have in every dialect."""
    if isinstance(error, (OverloadedError, NotReadyError)) and error.retry_after is not None:
        return (("Retry-After", str(error.retry_after)),)
    return (("Allow", error.allow),) if isinstance(error, MethodNotAllowedError) else ()
