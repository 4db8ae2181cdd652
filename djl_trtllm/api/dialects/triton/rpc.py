"""`ModelInfer` and `ModelStreamInfer`: protocol buffers as requests, output as protocol buffers.

Source: `grpc_server.cc`, `stream_infer_handler.cc` of Triton (e1db8a6) and its `decoupled_models.md`. Like `infer` over
HTTP, `ModelInfer` has one response, whole. A stream carries requests of any kind; each that asks for `stream` has a
response for each chunk. Encoders return serialised messages.
"""

from collections.abc import Callable, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError

from djl_trtllm import errors
from djl_trtllm.api import base
from djl_trtllm.api.dialects.triton import description, inference
from djl_trtllm.api.dialects.triton.dialect import check_id
from djl_trtllm.api.dialects.triton.tensors import BYTES, Tensor, from_bytes, from_json, to_bytes
from djl_trtllm.api.parameters import show
from djl_trtllm.request import OutputChunk

# The messages of Triton's gRPC API, by name.
#
# They are made from the descriptors of `grpc_service.proto`, in a pool of their own: generated modules would need the
# version of protobuf that they were generated for, and would clash with those of Triton's client in the same process.


SERVICE = "inference.GRPCInferenceService"

_FILE = Path(__file__).with_name("grpc_service.binpb")


def _load() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(_FILE.read_bytes()).file:
        pool.Add(file)
    return pool


_POOL = _load()


def message_class(name: str) -> Any:
    """The class of a message of the protocol."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))


ModelInferRequest = message_class("ModelInferRequest")
ModelInferResponse = message_class("ModelInferResponse")
ModelStreamInferResponse = message_class("ModelStreamInferResponse")


# Bounds what reading a protocol buffer costs, before it is read.
#
# As with JSON (`read_json`) that depends on more than its bytes: millions of empty tensors take a hundred times as
# long to make as one text of the same size, and nobody else runs meanwhile.


_OF_A_FIELD, _OF_A_PACKED_BYTE = 1600, 20
"""The work of a field, and of a byte of packed numbers: about nanoseconds."""
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_LONGEST_VARINT = 10
_NUMBERS = range(1, 9)
"""Python's names of the types of a field (cpp_type) that may be packed; those behind are texts and messages."""


def require_little_work(data: bytes, descriptor: Any) -> None:
    """Raise InvalidRequestError for a message that would take long to read; `descriptor` is that of its type.

    A damaged message is left to the parser, which refuses it.
    """
    if len(data) <= base.SMALL:
        return
    work = 0
    parts = [(0, len(data), descriptor)]
    while parts:
        at, end, kind = parts.pop()
        while at < end:
            work += _OF_A_FIELD
            tag, at = _varint(data, at)
            wire = tag & 7
            if wire == _VARINT:
                _, at = _varint(data, at)
            elif wire == _LENGTH:
                size, at = _varint(data, at)
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    parts.append((at, min(end, at + size), field.message_type))
                elif field is not None and field.cpp_type in _NUMBERS:
                    work += _OF_A_PACKED_BYTE * size
                at += size
            elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
                at += 8 if wire == _EIGHT_BYTES else 4
            else:
                raise errors.InvalidRequestError(f"the message is not valid: a field has wire type {wire}")
            if work > base.MOST_WORK:
                raise errors.InvalidRequestError(
                    f"the message has too many fields or numbers to read, of its {len(data)} bytes: send several "
                    "requests, or tensors as raw_input_contents"
                )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it."""
    value = 0
    for shift, byte in enumerate(data[at : at + _LONGEST_VARINT]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    return value, len(data)


FINAL = "triton_final_response"
_RESEEDED = "reseeded"
"""A parameter of responses to a request with a seed that went on in another engine process, with another seed."""
_NO_STREAM = (
    "a stream is asked for: ModelInfer RPC doesn't support models with decoupled transaction policy; "
    "use ModelStreamInfer"
)
_MOST_TENSORS = 64
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""The fields with a tensor's elements, by datatype, if they are not given as bytes."""


class Frame(Enum):
    """The message around a response: none, or a stream's, of a decoupled model or of one with one response to each
    request.

    A decoupled model of Triton says by an empty response that a request has ended, to clients that ask for it.
    """

    ALONE = auto()
    DECOUPLED = auto()
    ONLY = auto()


class RpcEncoder(base.ResponseEncoder):
    """Encodes the responses to one request; in a stream they are wrapped.

    `error` makes the last response after a chunk that ends with an error, `end` after all other chunks.
    """

    content_type = "application/grpc"

    def __init__(self, head: Any, frame: Frame, *, empty_final: bool) -> None:
        """`head` is a ModelInferResponse without outputs."""
        self.head = head
        self._frame = frame
        self._final = frame is Frame.DECOUPLED and empty_final

    def error(self, error: errors.RequestError) -> bytes:
        """The response that says in a stream why there is no other one."""
        return failure(str(error), self.head.model_name, self.head.id)

    def end(self) -> bytes:
        """The empty last response of a stream, if the request asks for it."""
        return self._message({}, final=True) if self._final else b""

    def _is_reseeded(self, chunk: OutputChunk) -> bool:
        """Whether the chunk says so. All responses from here on do, too."""
        reseeded = chunk.finished is not None and chunk.finished.reseeded
        if reseeded:
            self.head.parameters[_RESEEDED].bool_param = True
        return reseeded

    def _message(self, tensors: Mapping[str, Tensor], *, final: bool = False) -> bytes:
        response = ModelInferResponse()
        response.CopyFrom(self.head)
        if self._frame is not Frame.ALONE:
            response.parameters[FINAL].bool_param = final or self._frame is Frame.ONLY
        for tensor in tensors.values():
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            response.raw_output_contents.append(to_bytes(tensor))
        if self._frame is not Frame.ALONE:
            response = ModelStreamInferResponse(infer_response=response)
        data: bytes = response.SerializeToString()
        return data


class RpcWholeEncoder(RpcEncoder, inference.BatchEncoder):
    """One response, at the end."""

    def __init__(
        self, requests: list[inference.InferenceRequest], wanted: tuple[str, ...], head: Any, frame: Frame
    ) -> None:
        RpcEncoder.__init__(self, head, frame, empty_final=requests[0].empty_final_response)
        inference.BatchEncoder.__init__(self, requests, wanted)

    def encode(self, chunk: OutputChunk) -> bytes:
        self._is_reseeded(chunk)
        return inference.BatchEncoder.encode(self, chunk)

    def _body(self) -> bytes:
        return self._message(self.tensors())


class RpcTextSoFarEncoder(RpcEncoder):
    """A response for each chunk, with all text so far, as TensorRT-LLM's LLM API has it."""

    stream = True

    def __init__(
        self, requests: list[inference.InferenceRequest], wanted: tuple[str, ...], head: Any, frame: Frame
    ) -> None:
        super().__init__(head, frame, empty_final=requests[0].empty_final_response)
        self._so_far = inference.TextSoFar(requests[0], wanted)

    def begin(self, prompt: base.Prompt) -> None:
        self._so_far.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        self._is_reseeded(chunk)
        failed = chunk.finished is not None and chunk.finished.error is not None
        return b"" if failed and not chunk.tokens else self._message(self._so_far.after(chunk))


class RpcStreamEncoder(RpcEncoder):
    """A response for each chunk, with its new text and the log-probabilities of its tokens.

    The indices are in it if there are several prompts or sequences, or if they are asked for.
    """

    stream = True

    def __init__(
        self, requests: list[inference.InferenceRequest], wanted: tuple[str, ...], head: Any, frame: Frame
    ) -> None:
        super().__init__(head, frame, empty_final=requests[0].empty_final_response)
        self._requests = requests
        self._n = requests[0].n
        self._begun = [False] * (self._n * len(requests))
        self._cumulative = [0.0] * (self._n * len(requests))
        several = [*["batch_index"] * (len(requests) > 1), *["sequence_index"] * (self._n > 1)]
        self._shown = tuple(dict.fromkeys((*wanted, *several)))

    def encode(self, chunk: OutputChunk) -> bytes:
        finished = chunk.finished
        failed = finished is not None and finished.error is not None
        number = chunk.generation * self._n + chunk.index
        # The end by itself is no response, unless there was none before or it says something.
        silent = not self._is_reseeded(chunk) and finished is not None and self._begun[number]
        if not chunk.tokens and (failed or silent):
            return b""
        self._begun[number] = True
        logprobs = [0.0] * len(chunk.tokens)
        if self._requests[chunk.generation].logprobs:
            logprobs = [token.logprob or 0.0 for token in chunk.tokens]
            self._cumulative[number] += sum(logprobs)
        text = "".join([token.text for token in chunk.tokens])
        output = inference.SequenceOutput(text, logprobs, self._cumulative[number])
        tensors = inference.output_tensors([output], [chunk.generation], [chunk.index])
        return self._message({name: tensors[name] for name in self._shown})


def parse_rpc(message: Any, model: base.ModelContext, *, streams: bool) -> base.Call:
    """Read a ModelInferRequest; `streams`: from a stream. Raises InvalidRequestError."""
    name = message.model_name
    check_id(message.id)
    interface = inference.interface_of(model)
    tensors = _tensors(message, interface, name)
    requests = interface.read_batch(tensors, _parameters(message.parameters), model, name)
    wanted = interface.check_outputs([output.name for output in message.outputs], name, requests[0].usual)
    for output in message.outputs:
        description.refuse_tensor_parameters(output.parameters, f"output {show(output.name)}")
    if not streams and requests[0].stream:
        raise errors.InvalidRequestError(_NO_STREAM)
    if len({request.stream for request in requests}) > 1:
        raise errors.InvalidRequestError("the prompts differ in 'stream': expected one value for all of them")
    made: Callable[..., RpcEncoder] = RpcWholeEncoder
    if requests[0].stream:
        made = RpcStreamEncoder if interface.batched else RpcTextSoFarEncoder
    decoupled = Frame.DECOUPLED if description.is_decoupled(model) else Frame.ONLY
    head = ModelInferResponse(model_name=name, model_version=description.VERSION, id=message.id)
    for parameter, value in interface.added.items():
        setattr(head.parameters[parameter], "bool_param" if type(value) is bool else "int64_param", value)
    encoder = made(requests, wanted, head, decoupled if streams else Frame.ALONE)
    return base.Call(tuple(request.generation for request in requests), encoder)


def failure(message: str, model_name: str, identifier: str) -> bytes:
    """A response of a stream with an error."""
    response = ModelStreamInferResponse(error_message=message)
    response.infer_response.model_name = errors.clipped(model_name)
    response.infer_response.model_version = description.VERSION
    response.infer_response.id = errors.clipped(identifier)
    response.infer_response.parameters[FINAL].bool_param = True
    data: bytes = response.SerializeToString()
    return data


def _tensors(message: Any, interface: inference.Interface, model: str) -> list[Tensor]:
    inputs, raw = message.inputs, message.raw_input_contents
    for what, given in (("inputs", inputs), ("outputs", message.outputs)):
        if len(given) > _MOST_TENSORS:
            raise errors.InvalidRequestError(f"there are {len(given)} {what}: expected at most {_MOST_TENSORS}")
    if raw and len(raw) != len(inputs):
        raise errors.InvalidRequestError(
            f"raw_input_contents has {len(raw)} tensors for {len(inputs)} inputs: expected one for each, or none"
        )
    tensors = []
    for index, each in enumerate(inputs):
        description.refuse_tensor_parameters(each.parameters, f"input {show(each.name)}")
        if raw:
            interface.check_input(each.name, model, len(raw[index]))
            if each.HasField("contents"):
                raise errors.InvalidRequestError(
                    f"input '{each.name}' has contents, and raw_input_contents are given: expected one of them"
                )
            tensors.append(from_bytes(each.name, each.datatype, list(each.shape), raw[index]))
        else:
            tensors.append(_from_contents(each, interface, model))
    return tensors


def _from_contents(given: Any, interface: inference.Interface, model: str) -> Tensor:
    field = _CONTENTS.get(given.datatype)
    data = getattr(given.contents, field) if field else ()
    interface.check_input(given.name, model, len(data))
    if others := sorted({descriptor.name for descriptor, _ in given.contents.ListFields()} - {field}):
        raise errors.InvalidRequestError(
            f"input '{given.name}' of {show(given.datatype)} has {others[0]}: expected {field or 'raw_input_contents'}"
        )
    values: list[Any] = list(data)
    if given.datatype == BYTES:
        try:
            values = [value.decode() for value in values]
        except UnicodeDecodeError:
            raise errors.InvalidRequestError(f"input '{given.name}' is not UTF-8 text") from None
    return from_json(given.name, given.datatype, list(given.shape), values)


def _parameters(given: Any) -> dict[str, Any]:
    found = {}
    for name, parameter in given.items():
        kind = parameter.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(parameter, kind)
    return found


_STATUSES: dict[type[errors.RequestError], str] = {
    errors.RequestError: "INVALID_ARGUMENT",
    errors.UnknownAdapterError: "NOT_FOUND",
    errors.UnknownModelError: "NOT_FOUND",
    errors.UnknownPathError: "NOT_FOUND",
    errors.AuthenticationError: "UNAUTHENTICATED",
    errors.ForbiddenError: "PERMISSION_DENIED",
    errors.OverloadedError: "UNAVAILABLE",
    errors.TooManyRequestsError: "RESOURCE_EXHAUSTED",
    errors.NotReadyError: "UNAVAILABLE",
    errors.RequestTimeoutError: "UNAVAILABLE",
    errors.GenerationError: "INTERNAL",
}
"""gRPC's names of Triton's status codes (`tritonserver.h` of e1db8a6)."""


class TritonRpc(base.RpcService):
    """`inference.GRPCInferenceService`."""

    name = SERVICE
    unary = "ModelInfer"
    stream = "ModelStreamInfer"
    health = frozenset({"ServerLive", "ServerReady", "ModelReady"})
    pages = (
        *sorted(health),
        "ServerMetadata",
        "ModelMetadata",
        "ModelConfig",
        "ModelStatistics",
        "RepositoryIndex",
    )
    refused = description.REFUSED_METHODS

    def page(self, method: str, message: bytes, models: base.ModelLookup) -> bytes:
        if len(message) > base.SMALL:
            raise errors.InvalidRequestError(f"the message has {len(message)} bytes: expected at most {base.SMALL}")
        try:
            request = message_class(f"{method}Request").FromString(message)
        except DecodeError:
            raise errors.InvalidRequestError(f"the message is not a valid inference.{method}Request") from None
        # Statistics have more in JSON than in the messages that are here.
        response = json_format.ParseDict(
            _described(method, request, models), message_class(f"{method}Response")(), ignore_unknown_fields=True
        )
        data: bytes = response.SerializeToString()
        return data

    def read(self, message: bytes) -> Any:
        request = ModelInferRequest()
        try:
            require_little_work(message, request.DESCRIPTOR)
            request.ParseFromString(message)
        except DecodeError:
            raise errors.InvalidRequestError("the message is not a valid inference.ModelInferRequest") from None
        return request

    def parse(self, request: Any, model: base.ModelContext, *, stream: bool) -> base.Call:
        description.check_version(request.model_version, request.model_name)
        description.check_takes_requests(request.model_name, model)
        return parse_rpc(request, model, streams=stream)

    def end(self, encoder: Any) -> bytes:
        data: bytes = encoder.end()
        return data

    def failure(self, message: str, model_name: str, identifier: str) -> bytes:
        return failure(message, model_name, identifier)

    def status(self, error: BaseException) -> str:
        return base.nearest_row(_STATUSES, error if isinstance(error, errors.RequestError) else None)

    def error_ends_stream(self, metadata: Mapping[str, str]) -> bool:
        return metadata.get("triton_grpc_error") == "true"


def _described(method: str, request: Any, models: base.ModelLookup) -> dict[str, Any]:
    """The response of a method that does not generate, as a dictionary of its message's fields."""
    match method:
        case "ServerLive":
            return {"live": True}
        case "ServerReady":
            return {"ready": bool(models.all()) and all(model.ready for model in models.all())}
        case "ServerMetadata":
            return description.page("server", (), None)
        case "RepositoryIndex":
            return {"models": description.repository_index(models.all(), ready_only=request.ready)}
        case "ModelStatistics" if not request.name:
            return description.page("stats", models.all(), None)
        case "ModelReady":
            try:
                return {"ready": _model(request, models).ready}
            except errors.UnknownModelError:
                return {"ready": False}
    kind = {"ModelStatistics": "stats", "ModelConfig": "config", "ModelMetadata": "metadata"}[method]
    found = description.page(kind, [_model(request, models)], request.name or None)
    return {"config": found} if kind == "config" else found


def _model(request: Any, models: base.ModelLookup) -> base.ModelStatus:
    model = models.find(request.name)
    description.check_version(request.version, request.name)
    return model
