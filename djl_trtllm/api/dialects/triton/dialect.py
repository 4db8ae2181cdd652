"""Triton's HTTP API as a dialect: `generate`, `generate_stream`, `infer`, and KServe's pages."""

import gzip
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from djl_trtllm import errors
from djl_trtllm.api import base
from djl_trtllm.api.base import dump_line, parse_json
from djl_trtllm.api.dialects.triton import description, inference
from djl_trtllm.api.dialects.triton.description import VERSION, is_decoupled, refuse_tensor_parameters
from djl_trtllm.api.dialects.triton.tensors import Tensor, from_bytes, from_json, to_bytes
from djl_trtllm.api.openapi import STRING, list_of, members, read_operations
from djl_trtllm.api.parameters import Problems, show
from djl_trtllm.config.compat.triton import repository_files
from djl_trtllm.request import OutputChunk, Token

_GZIP_OR_ZLIB = 47
"""zlib's `wbits` for either, told apart by their first bytes."""
_FASTEST = 1


def read_body(request: base.RawRequest, limit: int) -> bytes:
    """The body without its Content-Encoding, at most `limit` bytes of it.

    Raises InvalidRequestError and RequestTooLargeError.
    """
    encoding = request.properties.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return request.body
    if encoding not in ("gzip", "deflate"):
        raise errors.InvalidRequestError(
            f"the content-encoding is {show(encoding)}: expected 'gzip', 'deflate' or 'identity'"
        )
    unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        body = unpacker.decompress(request.body, limit + 1)
    except zlib.error as error:
        raise errors.InvalidRequestError(f"the body is not valid {encoding}: {error}") from None
    if len(body) > limit:
        raise errors.RequestTooLargeError(f"the unpacked request body is larger than max_request_size={limit} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise errors.InvalidRequestError(f"the body is not valid {encoding}: it has no end, or more after it")
    return body


def read_object(data: bytes, what: str = "the body") -> dict[str, Any]:
    """Read JSON that has to be an object. Raises InvalidRequestError."""
    value = parse_json(data, what)
    if type(value) is not dict:
        raise errors.InvalidRequestError(f"{what} is {show(value)}: expected a JSON object")
    return value


def read_parameters(given: dict[str, Any]) -> dict[str, Any]:
    """The member `parameters`, an object. Raises InvalidRequestError."""
    parameters = given.get("parameters")
    if parameters is None:
        return {}
    if type(parameters) is not dict:
        raise errors.InvalidRequestError(f"'parameters' is {show(parameters)}: expected an object")
    return parameters


_LONGEST_ID = 1024


def read_id(given: dict[str, Any]) -> str:
    """The member `id`, "" without one. Raises InvalidRequestError."""
    identifier = given.get("id")
    if identifier is not None and type(identifier) is not str:
        raise errors.InvalidRequestError(f"'id' is {show(identifier)}: expected a string")
    return check_id(identifier or "")


def check_id(identifier: str) -> str:
    """The id, which is in each response of a stream. Raises InvalidRequestError if it is long."""
    if len(identifier) > _LONGEST_ID:
        raise errors.InvalidRequestError(f"'id' has {len(identifier)} characters: expected at most {_LONGEST_ID}")
    return identifier


def accepted_encoding(request: base.RawRequest) -> str:
    """The compression that the client accepts for its response: `gzip`, `deflate` or ""."""
    wanted = [
        part.partition(";")[0].strip() for part in request.properties.get("accept-encoding", "").lower().split(",")
    ]
    return next((encoding for encoding in ("gzip", "deflate") if encoding in wanted), "")


def compress(body: bytes, encoding: str) -> bytes:
    return gzip.compress(body, _FASTEST, mtime=0) if encoding == "gzip" else zlib.compress(body, _FASTEST)


_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
_SSE = "text/event-stream; charset=utf-8"


def parse_generate(request: base.RawRequest, model: base.ModelContext, name: str) -> base.Call:
    """Read a body. `name` is the model's in the path. Raises InvalidRequestError."""
    streams, interface = request.path.endswith("/generate_stream"), inference.interface_of(model)
    if streams and not is_decoupled(model):
        raise errors.InvalidRequestError(inference.STREAM_NEEDS_DECOUPLED)
    payload = read_object(read_body(request, model.options.max_request_size))
    values = read_parameters(payload) | payload
    values.pop("parameters", None)
    values.pop("id", None)
    problems = Problems.of(model.options)
    read = interface.read_request(values, model, problems)
    if not streams and read.stream:
        problems.invalid.append(_ONE_RESPONSE)
    if streams and read.stream is not False and read.generation.sampling.beam_width > 1:
        problems.invalid.append("'beam_width' is above 1: expected 1 in a stream, or 'stream' to be false")
    problems.raise_any()
    head = {"model_name": name, "model_version": VERSION, **interface.added}
    if identifier := read_id(payload):
        head["id"] = identifier
    encoder: base.ResponseEncoder
    if read.stream and not interface.batched:
        encoder = TextSoFarEncoder(read, head)
    elif streams and read.stream is not False:
        encoder = TritonStreamEncoder(read, head)
    else:
        encoder = TritonGenerateEncoder(read, head, as_event=streams)
    return base.Call((read.generation,), encoder, problems.headers)


class TritonGenerateEncoder(inference.BatchEncoder):
    """One object at the end; `as_event`: as the only event of a stream."""

    def __init__(self, request: inference.InferenceRequest, head: dict[str, Any], *, as_event: bool) -> None:
        super().__init__([request], request.usual)
        self.stream = as_event
        self.content_type = _SSE if as_event else "application/json"
        self._head = head

    def _body(self) -> bytes:
        return _body(self._head, self.tensors(), as_event=self.stream)


class TextSoFarEncoder(base.ResponseEncoder):
    """An event for each chunk, with all text so far, as TensorRT-LLM's LLM API has it."""

    stream = repeats = True
    content_type = _SSE

    def __init__(self, request: inference.InferenceRequest, head: dict[str, Any]) -> None:
        self._head = head
        self._so_far = inference.TextSoFar(request, request.usual)

    def begin(self, prompt: base.Prompt) -> None:
        self._so_far.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        error = None if chunk.finished is None else chunk.finished.error
        data = _body(self._head, self._so_far.after(chunk), as_event=True) if chunk.tokens or error is None else b""
        return data if error is None else data + self.error(error)

    def error(self, error: errors.RequestError) -> bytes:
        """A last event with Triton's `error`."""
        return _failed(error)


class TritonStreamEncoder(base.ResponseEncoder):
    """An event for each chunk, with its new text and the log-probabilities of its tokens. There is no last event."""

    stream = True
    content_type = _SSE

    def __init__(self, request: inference.InferenceRequest, head: dict[str, Any]) -> None:
        self._logprobs = request.logprobs
        self._cumulative = [0.0] * request.n
        self._begun = [False] * request.n
        self._failed = False
        self._templates = [_template(head, index if request.n > 1 else None) for index in range(request.n)]

    def encode(self, chunk: OutputChunk) -> bytes:
        if self._failed:
            return b""
        finished = chunk.finished
        if finished is None:
            return self._event(chunk.index, chunk.tokens)
        # The end by itself is no event: one without a token is sent only if there was none before.
        data = self._event(chunk.index, chunk.tokens) if chunk.tokens or not self._begun[chunk.index] else b""
        return data if finished.error is None else data + self.error(finished.error)

    def error(self, error: errors.RequestError) -> bytes:
        """A last event with Triton's `error`."""
        self._failed = True
        return _failed(error)

    def _event(self, index: int, tokens: list[Token]) -> bytes:
        self._begun[index] = True
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        if not self._logprobs:
            shown = b"0.0" if len(tokens) == 1 else orjson.dumps([0.0] * len(tokens))
            return self._templates[index] % (b"0.0", shown, dump_line(text))
        logprobs = [token.logprob or 0.0 for token in tokens]
        self._cumulative[index] += sum(logprobs)
        return self._templates[index] % (
            orjson.dumps(self._cumulative[index]),
            orjson.dumps(_unwrapped(logprobs)),
            dump_line(text),
        )


def _body(head: dict[str, Any], tensors: Mapping[str, Tensor], *, as_event: bool) -> bytes:
    outputs = {name: _unwrapped(tensor.data) for name, tensor in tensors.items()}
    body = dict(sorted((head | outputs).items()))
    return b"data: " + dump_line(body) + b"\n\n" if as_event else orjson.dumps(body)


def _failed(error: errors.RequestError) -> bytes:
    return b"data: " + dump_line({"error": str(error)}) + b"\n\n"


def _unwrapped(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _template(head: dict[str, Any], index: int | None) -> bytes:
    """An event with places for `cum_log_probs`, `output_log_probs` and `text_output`."""
    members: dict[str, bytes] = {name: dump_line(value).replace(b"%", b"%%") for name, value in head.items()}
    if index is not None:
        members["sequence_index"] = b"%d" % index
    members |= dict.fromkeys(("cum_log_probs", "output_log_probs", "text_output"), b"%b")
    return b"data: {" + b",".join(b'"%b":%b' % (name.encode(), members[name]) for name in sorted(members)) + b"}\n\n"


HEADER_LENGTH = "Inference-Header-Content-Length"
_NO_STREAM = (
    "a stream is asked for: HTTP end point doesn't support models with decoupled transaction policy; "
    "use generate_stream"
)
_MOST_TENSORS = 64


def parse_infer(request: base.RawRequest, model: base.ModelContext, name: str) -> base.Call:
    """Read a body. `name` is the model's in the path. Raises InvalidRequestError."""
    body = read_body(request, model.options.max_request_size)
    head, binary = _split(body, request.properties.get(HEADER_LENGTH.lower()))
    payload = read_object(head, "the body's JSON")
    for member in payload.keys() - {"id", "parameters", "inputs", "outputs"}:
        raise errors.InvalidRequestError(
            f"unknown member {show(member)}: expected 'id', 'parameters', 'inputs' and 'outputs'"
        )
    interface = inference.interface_of(model)
    tensors = _tensors(_objects(payload, "inputs"), binary, interface, name)
    requests = interface.read_batch(tensors, read_parameters(payload), model, name)
    if any(each.stream for each in requests):
        raise errors.InvalidRequestError(_NO_STREAM)
    wanted = _wanted(payload, interface, requests[0], name)
    shown: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if interface.added:
        shown["parameters"] = interface.added
    if identifier := read_id(payload):
        shown["id"] = identifier
    encoder = InferEncoder(requests, wanted, shown, accepted_encoding(request))
    return base.Call(tuple(each.generation for each in requests), encoder, late_headers=encoder.headers)


class InferEncoder(inference.BatchEncoder):
    """The response to the requests of one batch. `wanted` says of each output whether it is bytes, not JSON.

    `encoding` compresses the response.
    """

    def __init__(
        self,
        requests: list[inference.InferenceRequest],
        wanted: dict[str, bool],
        head: dict[str, Any],
        encoding: str,
    ) -> None:
        super().__init__(requests, wanted)
        self._binary = wanted
        if any(wanted.values()):
            self.content_type = "application/octet-stream"
        self._head = head
        self._encoding = encoding
        self._headers: tuple[tuple[str, str], ...] = ()

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers of the response, once its body is encoded."""
        return self._headers

    def _body(self) -> bytes:
        outputs: list[dict[str, Any]] = []
        binary = b""
        for name, tensor in self.tensors().items():
            output = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
            if self._binary[name]:
                raw = to_bytes(tensor)
                binary += raw
                outputs.append(output | {"parameters": {"binary_data_size": len(raw)}})
            else:
                outputs.append(output | {"data": tensor.data})
        head = orjson.dumps(self._head | {"outputs": outputs})
        if any(self._binary.values()):
            self._headers = ((HEADER_LENGTH, str(len(head))),)
        if not self._encoding:
            return head + binary
        self._headers = (*self._headers, ("Content-Encoding", self._encoding))
        return compress(head + binary, self._encoding)


def _split(body: bytes, declared: str | None) -> tuple[bytes, bytes]:
    """The JSON of a body, and the bytes that follow it."""
    if declared is None:
        return body, b""
    if not (declared.isascii() and declared.isdecimal() and len(declared) < 12) or int(declared) > len(body):
        raise errors.InvalidRequestError(
            f"{HEADER_LENGTH} is {show(declared)}: expected a number up to {len(body)}, the body's"
        )
    length = int(declared)
    return body[:length], body[length:]


def _objects(payload: dict[str, Any], name: str) -> list[dict[str, Any]]:
    given = payload.get(name, [])
    if type(given) is not list or len(given) > _MOST_TENSORS or not all(type(each) is dict for each in given):
        raise errors.InvalidRequestError(f"'{name}' is {show(given)}: expected a list of up to {_MOST_TENSORS} objects")
    return given


def _tensors(given: list[dict[str, Any]], binary: bytes, interface: inference.Interface, model: str) -> list[Tensor]:
    tensors = []
    at = 0
    for each in given:
        name, datatype, shape, data = each.get("name"), each.get("datatype"), each.get("shape"), each.get("data")
        parameters = read_parameters(each)
        size = parameters.get("binary_data_size")
        refuse_tensor_parameters(parameters, f"input {show(name)}", "binary_data_size")
        if size is None:
            interface.check_input(name, model, len(data) if type(data) is list else 1)
            if data is None:
                raise errors.InvalidRequestError(f"input '{name}' has neither 'data' nor a 'binary_data_size'")
            tensors.append(from_json(str(name), datatype, shape, data))
            continue
        if type(size) is not int or not 0 <= size <= len(binary) - at or data is not None:
            raise errors.InvalidRequestError(
                f"input {show(name)} has the binary_data_size {show(size)}: expected at most {len(binary) - at}, the "
                "bytes that are left after the JSON, and no 'data'"
            )
        interface.check_input(name, model, size)
        tensors.append(from_bytes(str(name), datatype, shape, binary[at : at + size]))
        at += size
    if at != len(binary):
        raise errors.InvalidRequestError(f"{len(binary) - at} bytes follow the tensors: expected none")
    return tensors


def _wanted(
    payload: dict[str, Any], interface: inference.Interface, request: inference.InferenceRequest, model: str
) -> dict[str, bool]:
    given = _objects(payload, "outputs")
    names = interface.check_outputs([each.get("name") for each in given], model, request.usual)
    wanted = dict.fromkeys(names, request.binary_data_output)
    for each in given:
        parameters = read_parameters(each)
        if "binary_data" in parameters:
            if type(parameters["binary_data"]) is not bool:
                raise errors.InvalidRequestError(
                    f"'binary_data' is {show(parameters['binary_data'])}: expected true or false"
                )
            wanted[each["name"]] = parameters["binary_data"]
        refuse_tensor_parameters(parameters, f"output {show(each['name'])}", "binary_data")
    return wanted


_MODEL = "/v2/models/{model}"
_VERSION = _MODEL + "/versions/{version}"
_MODELS = (_MODEL, _VERSION)
_LONGEST_INDEX_REQUEST = 65_536

_OPERATIONS = read_operations("triton.toml")
# The only body whose objects may have further members.
_TENSORS = list_of({"type": "object", "required": ["name", "shape", "datatype"]})
_INFER = members({"inputs": _TENSORS}, optional={"id": STRING, "outputs": {}, "parameters": {}})
_VERBS = {
    "generate": _OPERATIONS["generate"],
    "generate_stream": _OPERATIONS["generate_stream"],
    "infer": _OPERATIONS["infer"]._replace(
        bodies={"application/json": _INFER, **_OPERATIONS["infer"].bodies},
    ),
}
_PAGES = {
    "/v2": "server",
    "/v2/health/live": "live",
    "/v2/health/ready": "all_ready",
    "/v2/models/stats": "all_statistics",
    **{
        model + page: operation
        for page, operation in {"": "metadata", "/ready": "ready", "/config": "config", "/stats": "stats"}.items()
        for model in _MODELS
    },
}
"""The rows of triton.toml that describe the pages."""


class Triton(base.Dialect):
    """Requests, health, metadata, configuration, statistics and the index of the repository.

    `generate` has inputs and request parameters in one JSON object and outputs in another, whose members are in
    alphabetical order; a tensor of one element is a scalar, any other is flat. `infer` has tensors as JSON, or as bytes
    after the JSON, whose length is then in a header; it has one response, whole, so that models that stream answer as
    well; Triton refuses them here. Sources: `http_server.cc` of Triton (e1db8a6), its `extension_generate.md` and
    `extension_binary_data.md`, KServe's `required_api.md`.
    """

    title = "Triton"
    paths = tuple(f"{model}/{verb}" for verb in _VERBS for model in _MODELS)
    pages = (*_PAGES, *description.REFUSED_PAGES)
    health = frozenset(page for page in pages if page.endswith(("/live", "/ready")))
    actions = ("/v2/repository/index", *description.REFUSED_ACTIONS)
    ports = ("triton_http_port", "triton_metrics_port")
    rpc_port = "triton_grpc_port"
    aliases = description.NAMES
    # `http_server.cc` of Triton (e1db8a6).
    statuses = MappingProxyType(
        {
            errors.UnknownAdapterError: 404,
            errors.RequestTooLargeError: 400,
            errors.OverloadedError: 503,
            errors.NotReadyError: 503,
            errors.RequestTimeoutError: 503,
        }
    )
    tables = MappingProxyType(
        {
            f"{model}/{verb}": (inference.ENSEMBLE, inference.LLM_API)
            for verb in ("generate", "generate_stream")
            for model in _MODELS
        }
    )
    descriptions = MappingProxyType(
        {
            **{f"{model}/{verb}": operation for verb, operation in _VERBS.items() for model in _MODELS},
            **{f"GET {path}": _OPERATIONS[name] for path, name in _PAGES.items()},
            **{f"GET {path}": _OPERATIONS["refused"] for path in description.REFUSED_PAGES},
            **dict.fromkeys(description.REFUSED_ACTIONS, _OPERATIONS["refused"]),
            "/v2/repository/index": _OPERATIONS["index"],
        }
    )

    def rpc_service(self) -> base.RpcService:
        from djl_trtllm.api.dialects.triton.rpc import TritonRpc

        return TritonRpc()

    def ready_text(self, model_dir: Path) -> str:
        """The models of a Triton repository as Triton prints them; "" for any other directory."""
        names = sorted(path.parent.name for path in repository_files(model_dir))
        if len(names) < 2:
            return ""
        rows = [("Model", "Version", "Status"), *((name, description.VERSION, "READY") for name in names)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        line = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
        shown = [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
        ]
        return "\n".join([line, shown[0], line, *shown[1:], line])

    def page(self, request: base.RawRequest, models: Sequence[base.ModelStatus]) -> base.Reply:
        """Health is a status without a body, all else JSON."""
        if request.path in description.REFUSED_PAGES:
            raise errors.UnsupportedParameterError(description.REFUSED_PAGES[request.path])
        kind, name = _PAGES[request.path], _check(request)
        if request.path in self.health:
            good = kind == "live" or (bool(models) and all(model.ready for model in models))
            return base.Reply(200 if good else 400, "text/plain", b"")
        return base.Reply.json(description.page(kind, models, name))

    def act(self, request: base.RawRequest, models: Sequence[base.ModelStatus]) -> base.Reply:
        """The index of the repository; with `ready` true, of the models that are ready."""
        if request.path in description.REFUSED_ACTIONS:
            raise errors.UnsupportedParameterError(description.REFUSED_ACTIONS[request.path])
        body = read_body(request, _LONGEST_INDEX_REQUEST)
        given = read_object(body) if body else {}
        if unknown := sorted(given.keys() - {"ready"}):
            raise errors.InvalidRequestError(
                f"unknown member {show(unknown[0])} of the request for the index: expected 'ready'"
            )
        ready = given.get("ready", False)
        if type(ready) is not bool:
            raise errors.InvalidRequestError("'ready' of the request for the index: expected true or false")
        return base.Reply.json(description.repository_index(models, ready_only=ready))

    def parse(self, request: base.RawRequest, model: base.ModelContext) -> base.Call:
        name = _check(request) or model.name
        description.check_takes_requests(name, model)
        return (parse_infer if request.path.endswith("/infer") else parse_generate)(request, model, name)


def _check(request: base.RawRequest) -> str | None:
    """The model that the path names, in a version that is there. Raises UnknownModelError."""
    name = request.parameters.get("model")
    if name is not None:
        description.check_version(request.parameters.get("version"), name)
    return name


TRITON = Triton()
