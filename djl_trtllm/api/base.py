"""The interface of a dialect: the paths, the request format, the response format and the errors of one HTTP API.

A `Dialect` parses a request into a `Call`: what to generate, and the `ResponseEncoder` that turns the output into the
bytes of the response. Whole responses and streams use the same calls: the encoder of a whole response returns `b""`
until every sequence has ended, then the body. Nothing in this package waits or knows a socket.

    call = dialect.parse(RawRequest(body, properties), model)  # raises InvalidRequestError
    call.encoder.begin(prompt)                                 # once for each prompt, in their order
    data = call.encoder.encode(chunk)                          # for each output chunk
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import orjson
from msgspec.structs import replace

from djl_trtllm import errors
from djl_trtllm.api.kept import Kept
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.config import Options
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import GenerationRequest, OutputChunk, RequestOrigin, SequenceResult, Token

Row = TypeVar("Row")


class RawRequest(msgspec.Struct, frozen=True, dict=True):
    """A request as it arrived.

    `properties` are its headers by lower-case name and SageMaker's custom attributes (`api.front_end`). `path` is the
    one of the dialect's paths that matched, `parameters` are the values of its `{placeholders}`, `query` those of the
    query string (the first of repeated ones). `key` names the client's API key, "" where the server needs none.
    """

    body: bytes
    properties: Mapping[str, str]
    path: str = ""
    parameters: Mapping[str, str] = MappingProxyType({})
    query: Mapping[str, str] = MappingProxyType({})
    key: str = ""

    @property
    def content_type(self) -> str | None:
        return self.properties.get("content-type")

    def as_body(self, path: str, payload: object) -> RawRequest:
        """The same request at another path, with a body that is already decoded."""
        request = replace(self, path=path)
        request.__dict__["json"] = payload  # the place of the cached property
        return request

    @cached_property
    def json(self) -> Any:
        """The body as JSON, whatever its content type. Raises InvalidRequestError."""
        return parse_json(self.body)


class Prompt(msgspec.Struct, frozen=True):
    """The prompt as the model sees it.

    `text` is the prompt after the chat template, `length` its number of tokens. `tokens` may be empty unless the
    encoder `wants_prompt_tokens`.
    """

    text: str
    length: int
    tokens: Sequence[Token] = ()


class ResponseEncoder(ABC):
    """Encodes the response to one request. One object per request: it keeps what was generated so far.

    `stream`: whether bytes are sent as they come, or one body at the end. `content_type` is the media type.
    `wants_prompt_tokens`: whether `begin` needs `Prompt.tokens`. `repeats`: whether what a chunk adds contains all text
    before it; chunks that wait for a client are then joined to one.
    """

    stream: bool
    content_type: str
    wants_prompt_tokens: bool = False
    repeats: bool = False

    def begin(self, prompt: Prompt) -> None:  # noqa: B027  most responses show nothing of it
        """Receive a tokenised prompt: called once for each prompt of the call, in order, before the first `encode`."""

    @abstractmethod
    def encode(self, chunk: OutputChunk) -> bytes:
        """The bytes that this chunk adds to the response; `b""` if none.

        `chunk.generation` is the position in `Call.requests`, `chunk.index` the sequence of that generation. A chunk
        that ends with an error is encoded as its tokens and then `error`. If nothing was sent yet, the caller sends
        `Dialect.encode_error` instead, so that the client gets a status. Raises RequestError if the response cannot
        go on: a model directory's own formatter failed, or the format cannot express the error of the chunk.
        """

    def error(self, error: errors.RequestError) -> bytes:
        """The last bytes of a response that has begun and cannot be finished.

        `b""` if the format cannot express it; the caller then closes the connection without ending the body.
        """
        return b""


class Call(msgspec.Struct, frozen=True):
    """A parsed request: its generations, which are admitted together or not at all, and the encoder of the one
    response.

    `headers` are additional headers of the response, `late_headers` those that are known when the encoder has returned
    the first bytes. `origin` is for logs and pages, and names the client whose share of the batch the call uses; the
    server fills it in.
    """

    requests: tuple[GenerationRequest, ...]
    encoder: ResponseEncoder
    headers: tuple[tuple[str, str], ...] = ()
    late_headers: Callable[[], tuple[tuple[str, str], ...]] = tuple
    origin: RequestOrigin = RequestOrigin()

    @property
    def sequences(self) -> int:
        return sum(map(attrgetter("sampling.n"), self.requests))


class Reply(NamedTuple):
    """A whole response that needs no model: an error, a page or a status."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def json(cls, body: object, status: int = 200) -> Reply:
        return cls(status, "application/json", orjson.dumps(body))


class RequestParser(Protocol):
    """Reads a request: see `Dialect.parse`."""

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        """Read a request for a model."""


class ModelContext(Protocol):
    """The model of a request, as dialects know it."""

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

    @property
    def kept(self) -> Kept:
        """The store in which dialects keep responses for later requests."""


Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]
"""Renders chat messages with a template's keywords."""


class ModelStatus(NamedTuple):
    """A model for a page or an action. `context` is None while its files are prepared.

    `refusals` says why the engine refuses fields of requests and kinds of guides, see `batching.admission.refusals`.
    `render` makes the prompt of chat messages for an action, from these and the template's keywords; it waits. Raises
    InvalidRequestError.
    """

    name: str
    ready: bool
    context: ModelContext | None
    statistics: Statistics
    render: Render | None = None
    refusals: Mapping[str, str] = MappingProxyType({})


def only_model(models: Sequence[ModelStatus]) -> tuple[ModelContext, Render | None]:
    """The one model of an action, and what renders its chats. Raises UnknownModelError and NotReadyError."""
    if len(models) != 1:
        names = ", ".join(model.name for model in models)
        raise errors.UnknownModelError(f"'model' is not given: expected one of {names or 'none'}", name=None)
    (model,) = models
    if model.context is None:
        raise errors.NotReadyError(f"model {model.name} is still loading", retry_after=10)
    return model.context, model.render


class Described(Protocol):
    """A description of a body: a table of parameters (`api.parameters`)."""

    def schema(self) -> dict[str, Any]:
        """The JSON schema."""


class Operation(NamedTuple):
    """The description of one method of a path at `/openapi.json`, except its errors.

    `bodies` and `responses` (of status 200) are JSON schemas by media type, `query` those of the query's parameters.
    `example` is a body that works. `errors` are the statuses with which a page may answer instead, and what they mean.
    """

    summary: str = ""
    bodies: Mapping[str, Any] = MappingProxyType({})
    responses: Mapping[str, Any] = MappingProxyType({"*/*": {}})
    query: Mapping[str, Any] = MappingProxyType({})
    example: Any = None
    errors: Mapping[int, str] = MappingProxyType({})


STATUSES: Mapping[type[errors.RequestError], int | str] = MappingProxyType(
    {
        errors.InvalidRequestError: 400,
        errors.AuthenticationError: 401,
        errors.ForbiddenError: 403,
        errors.UnknownModelError: 404,
        errors.UnknownPathError: 404,
        errors.MethodNotAllowedError: 405,
        errors.RequestTooLargeError: 413,
        errors.TooManyRequestsError: 429,
        errors.GenerationError: 500,
        errors.OverloadedError: "throttle_error_http_code",
        errors.NotReadyError: "wlm_error_http_code",
        errors.RequestTimeoutError: 504,
    }
)
"""The HTTP status of each class of errors, a number or the option that has it, unless `Dialect.statuses` differs."""

DEFECT = "Internal server error, see the server's log."
"""Clients read this in place of the message of an exception that is no RequestError: it may contain internals."""


class Dialect(ABC):
    """One HTTP API. An object without state: `api.registry` lists one of each, and the server mounts its paths.

    `paths` take POST requests and generate. `pages` (GET), `actions` (POST) and `removals` (DELETE) do not. In all of
    them, `{model}` is the model's name, in `paths` also `{endpoint}` SageMaker's endpoint.
    """

    title: str = ""
    """The name of the group of these paths in the description of the API; "" for the name of the class."""
    paths: tuple[str, ...]
    pages: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    removals: tuple[str, ...] = ()
    health: frozenset[str] = frozenset()
    """The `pages` that need no API key: they say whether the server or a model is ready."""
    names_model: bool = False
    """Whether `model_name` finds the model's name in the request, for `paths` and `actions` without it."""
    sagemaker: bool = False
    """Whether SageMaker's runtime calls these `paths`: errors on those with `{endpoint}` have the shape that it gives
    them (`endpoint_error`), and requests may belong to stateful sessions."""
    aliases: frozenset[str] = frozenset()
    """Names that mean the only model, if no model has that name."""
    statuses: Mapping[type[errors.RequestError], int | str] = MappingProxyType({})
    """The rows of `STATUSES` in which this dialect differs."""
    ports: tuple[str, ...] = ()
    """Options that name further ports on which the server listens for HTTP."""
    rpc_port: str = ""
    """The option that names the port of the dialect's `rpc_service`, "" without one."""
    formatters_file: str = ""
    """The file of a model directory whose code `formatters` runs."""
    tables: Mapping[str, tuple[Described, ...]] = MappingProxyType({})
    """The tables of the parameters of a path of `paths` or `actions`; with several, a body fits one of them."""
    descriptions: Mapping[str, Operation] = MappingProxyType({})
    """The descriptions of paths: summaries, examples and responses, where `tables` describe the bodies. A page's key
    begins with "GET ", that of a removal with "DELETE "."""

    @property
    def all_paths(self) -> tuple[str, ...]:
        """The paths of every kind; one may be of several kinds."""
        return (*self.paths, *self.pages, *self.actions, *self.removals)

    @cached_property
    def name(self) -> str:
        """The dialect's name in logs and metrics."""
        return type(self).__name__.lower()

    def model_name(self, request: RawRequest) -> str | None:
        """The model that the request names. Called before `parse`; None for the only model."""
        return None

    def size(self, request: RawRequest, model: ModelContext) -> int:
        """The most bytes that `parse` reads of a request: for few bytes the server calls it on the event loop."""
        return len(request.body)

    def page(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """The reply of one of `pages`. `models` are all models, or the one that the path names."""
        raise NotImplementedError(f"{type(self).__name__} has no page {request.path}")

    def act(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """The reply of one of `actions`. `models` are all models, or the one that the request names.

        Called in a thread, because tokenising takes time. Raises RequestError.
        """
        raise NotImplementedError(f"{type(self).__name__} has no action {request.path}")

    def remove(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """The reply of one of `removals`. `models` are all models, or the one that the path names."""
        raise NotImplementedError(f"{type(self).__name__} removes nothing at {request.path}")

    def rpc_service(self) -> RpcService:
        """The dialect's gRPC service. Called if `rpc_port` is set, so that nothing else imports protocol buffers."""
        raise NotImplementedError(f"{type(self).__name__} has no gRPC service")

    def formatters(self, model_dir: Path, attributes: Mapping[str, Any]) -> RequestParser | None:
        """The parser that a model directory brings for this dialect, for `ModelContext.custom`. None without one.

        `attributes` are what its functions may ask for, such as `tokenizer`. Raises ModelError if its file fails.
        """
        return None

    def ready_text(self, model_dir: Path) -> str:
        """Text for the log when the model of this directory is ready, "" for none."""
        return ""

    @abstractmethod
    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        """Read a request.

        Raises InvalidRequestError with everything that is wrong, or UnsupportedParameterError if only parameters are
        wrong that this server cannot honour.
        """

    def error_body(self, message: str, error: errors.RequestError | None) -> object:
        """The JSON of an error; `error` is None for a defect of the server."""
        return {"error": message}

    def encode_error(self, error: BaseException, options: Options) -> Reply:
        """The reply to a request whose response has not begun.

        `options` are the server's, or the worker's inside DJL Serving.
        """
        known = error if isinstance(error, errors.RequestError) else None
        body = self.error_body(DEFECT if known is None else str(known), known)
        return Reply.json(body, self.status(error, options))._replace(headers=error_headers(error))

    def status(self, error: BaseException, options: Options) -> int:
        """The HTTP status of an error."""
        if not isinstance(error, errors.RequestError):
            return options.server_error_http_code
        row: int | str = nearest_row({**STATUSES, **self.statuses}, error)
        return row if isinstance(row, int) else int(getattr(options, row))


class ModelLookup(Protocol):
    """The models that a page of an `RpcService` describes."""

    def all(self) -> Sequence[ModelStatus]:
        """Every model."""

    def find(self, name: str) -> ModelStatus:
        """The model of that name. Raises UnknownModelError."""


class RpcService(ABC):
    """A gRPC service of a dialect: messages are bytes here, the server's gRPC front end has the connections.

    `unary` and `stream` are the methods that generate: one response to one request, and responses to each request of a
    stream. `pages` do not generate, those of `health` need no API key. `refused` says why a method is not here.
    """

    name: str
    unary: str
    stream: str
    pages: tuple[str, ...] = ()
    health: frozenset[str] = frozenset()
    refused: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def page(self, method: str, message: bytes, models: ModelLookup) -> bytes:
        """The response of one of `pages`. Raises RequestError."""

    @abstractmethod
    def read(self, message: bytes) -> Any:
        """A request to generate, with the attributes `id` and `model_name`. Raises InvalidRequestError."""

    @abstractmethod
    def parse(self, request: Any, model: ModelContext, *, stream: bool) -> Call:
        """Read a request for a model, as `Dialect.parse` does. `stream`: it is one of a stream.

        Encoders make serialised messages.
        """

    @abstractmethod
    def end(self, encoder: Any) -> bytes:
        """The message that follows in a stream when all sequences of an encoder have ended; b"" if there is none."""

    @abstractmethod
    def failure(self, message: str, model_name: str, identifier: str) -> bytes:
        """The message in a stream that says why a request has no further response; a name that is not known is ""."""

    @abstractmethod
    def status(self, error: BaseException) -> str:
        """gRPC's name of the status of an error; a defect of the server is INTERNAL."""

    def error_ends_stream(self, metadata: Mapping[str, str]) -> bool:
        """Whether the client wants the first error as the status of the stream."""
        return False


def nearest_row(table: Mapping[type[errors.RequestError], Row], error: errors.RequestError | None) -> Row:
    """The row for the error's class or for the nearest base class that has one.

    Other errors, and None for a defect of the server, have the row of GenerationError.
    """
    return next((table[base] for base in type(error).__mro__ if base in table), table[errors.GenerationError])


def error_headers(error: BaseException) -> tuple[tuple[str, str], ...]:
    """The headers that replies to this error have in every dialect."""
    if isinstance(error, (errors.OverloadedError, errors.NotReadyError)) and error.retry_after is not None:
        return (("Retry-After", str(error.retry_after)),)
    return (("Allow", error.allow),) if isinstance(error, errors.MethodNotAllowedError) else ()


class CollectedSequence(msgspec.Struct):
    """One sequence and what was generated of it so far."""

    tokens: list[Token] = msgspec.field(default_factory=list)
    finished: SequenceResult | None = None

    @property
    def text(self) -> str:
        return "".join([token.text for token in self.tokens])


class SequenceCollector:
    """Collects the chunks of a response. The rolling batch numbers the sequences, the best first if it ranks them.

    `count` sequences of each of `generations`, one generation's after the other.
    """

    def __init__(self, count: int, generations: int = 1) -> None:
        self.sequences = [CollectedSequence() for _ in range(count * generations)]
        self._count = count
        self._running = len(self.sequences)

    def add(self, chunk: OutputChunk) -> bool:
        """Add a chunk. Returns True if it ended the last running sequence."""
        sequence = self.sequences[chunk.generation * self._count + chunk.index]
        sequence.tokens += chunk.tokens
        if chunk.finished is None:
            return False
        sequence.finished = chunk.finished
        self._running -= 1
        return self._running == 0


class WholeEncoder(ResponseEncoder):
    """A `ResponseEncoder` of one body, which `_body` makes when every sequence has ended.

    A chunk that ends with an error adds nothing: no byte was sent yet, so the caller replies with the error.
    """

    stream = False
    content_type = "application/json"

    def __init__(self, count: int, generations: int = 1) -> None:
        self._output = SequenceCollector(count, generations)

    def encode(self, chunk: OutputChunk) -> bytes:
        if chunk.finished is not None and chunk.finished.error is not None:
            return b""
        return self._body() if self._output.add(chunk) else b""

    @abstractmethod
    def _body(self) -> bytes:
        """The response."""


def dump_line(value: object) -> bytes:
    """JSON for line-based formats: escapes the characters that `str.splitlines` treats as line ends.

    JSON allows U+0085, U+2028 and U+2029 unescaped, but clients that read lines of text (httpx, and so
    huggingface_hub) would end a line there.
    """
    data: bytes = orjson.dumps(value)
    if data.isascii():
        return data
    return (
        data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


# -- JSON of clients, within bounds of size and depth ------------------------------------------------------------------
#
#     read_json(b'{"inputs": "Once"}')    # {"inputs": "Once"}
#     read_json(b"[" * 1000)              # InvalidRequestError: the body is nested deeper than 128 levels
#
# What JSON costs to read depends on more than its bytes. A million objects of two bytes take a hundred times as long to
# make as one text of two megabytes, and nobody else runs meanwhile. They are counted first, in pieces, between which
# other threads run.

MOST_LEVELS = 128
"""The most levels of nested lists and objects. Many functions that walk over them are recursive."""
MOST_WORK = 8_000_000
"""The most work of reading one body, in about nanoseconds: all threads of the process wait as long."""
OF_A_CONTAINER, OF_A_MEMBER, OF_A_TEXT, OF_A_BYTE = 60, 150, 40, 4
"""The work of a list or object, of a member of an object, of a text's quotation marks, and of a byte outside texts."""
OF_A_TEXT_BYTE, OF_A_BACKSLASH = 1, 1
"""The work of a byte of a text, and the further work of a backslash in it."""
_USUAL_BYTES = 6 << 20
"""The default of `max_request_size`, in bytes. A longer body has more work, as much as texts of the bytes beyond."""

SMALL = 32_768
"""JSON of up to this number of bytes never takes long to read."""
_PIECE = 65_536
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ALIKE = bytes.maketrans(b"{}", b"[]")
_STEPS = bytes.maketrans(b"[]", b"\x01\xff")
"""The number of levels that a bracket adds, as a signed byte."""
_BRACKETS_AT_ONCE = 8192
_EASY_LEVELS = 3


def read_json(data: bytes) -> Any:
    """The value of a JSON text. Raises InvalidRequestError for too much, orjson.JSONDecodeError for no JSON."""
    if len(data) > SMALL or data.count(b"[") + data.count(b"{") > MOST_LEVELS:
        _require_shallow(_count(data))
    return orjson.loads(data)


def parse_json(data: bytes, what: str = "the body") -> Any:
    """The value of a JSON text. Raises InvalidRequestError, which calls it `what`, for too much or no JSON."""
    try:
        return read_json(data)
    except orjson.JSONDecodeError as error:
        shown = data[:80].decode(errors="replace")
        raise errors.InvalidRequestError(
            f"{what} is not valid JSON: {why_no_json(data, error)}. Received {shown!r}"
        ) from None


_GZIP = b"\x1f\x8b"


def why_no_json(data: bytes, error: orjson.JSONDecodeError) -> str:
    """Return what is wrong with data that is not JSON: orjson's error does not say that it is compressed."""
    return "it is compressed (gzip), send it uncompressed" if data.startswith(_GZIP) else str(error)


def _count(data: bytes) -> bytes:
    """Return the brackets of JSON. Raises InvalidRequestError if the JSON would take too long to read."""
    containers = members = quotes = outside = within = escapes = 0
    most = MOST_WORK + (OF_A_TEXT_BYTE + OF_A_BACKSLASH) * max(0, len(data) - _USUAL_BYTES)
    inside = False
    found: list[bytes] = []
    for piece in _pieces(data):
        plain, more, inside = _outside_of_texts(piece, inside=inside)
        brackets = plain.translate(None, _ALL_BUT_BRACKETS)
        found.append(brackets)
        outside += len(plain)
        within += len(piece) - len(plain)
        if b"\\" in piece:
            # `count` takes ten times as long where there are many.
            escapes += len(piece) - len(piece.translate(None, b"\\"))
        quotes += more
        members += plain.count(b":")
        containers += brackets.count(b"[") + brackets.count(b"{")
        texts = quotes // 2
        work = OF_A_BYTE * outside + OF_A_TEXT * texts + OF_A_MEMBER * members + OF_A_CONTAINER * containers
        work += OF_A_TEXT_BYTE * within + OF_A_BACKSLASH * escapes
        if work > most:
            raise errors.InvalidRequestError(
                f"the body has too much JSON to read, {containers} lists and objects, {members} members, {texts} "
                f"texts of {within} bytes with {escapes} backslashes, and {outside} bytes of other values up to where "
                "reading ended: send several requests"
            )
    return b"".join(found)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yield the data in pieces, none of which ends within an escape sequence."""
    begin = 0
    while begin < len(data):
        end = begin + _PIECE
        piece = data[begin:end]
        trailing = len(piece) - len(piece.rstrip(b"\\"))
        if trailing % 2 and end < len(data):
            end += 1
            piece = data[begin:end]
        yield piece
        begin = end


def _outside_of_texts(piece: bytes, *, inside: bool) -> tuple[bytes, int, bool]:
    """Return the bytes of a piece outside texts, the number of quotation marks, and whether the piece ends in a text.

    `inside`: whether it begins in one.
    """
    if b'"' not in piece:
        return b"" if inside else piece, 0, inside
    plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in piece else piece
    parts = plain.split(b'"')
    quotes = len(parts) - 1
    return b"".join(parts[inside::2]), quotes, inside ^ (quotes % 2 == 1)


def _require_shallow(brackets: bytes) -> None:
    """Raise InvalidRequestError for brackets that are nested too deep."""
    brackets = brackets.translate(_ALIKE)
    level = 0
    for _ in range(_EASY_LEVELS):
        # Takes one level away. Most bodies are wide and have no more.
        brackets = brackets.replace(b"[]", b"")
    for begin in range(0, len(brackets), _BRACKETS_AT_ONCE):
        steps = array("b", brackets[begin : begin + _BRACKETS_AT_ONCE].translate(_STEPS))
        levels = list(accumulate(steps, initial=level))
        level = levels[-1]
        if max(levels) > MOST_LEVELS - _EASY_LEVELS:
            raise errors.InvalidRequestError(f"the body is nested deeper than {MOST_LEVELS} levels")
