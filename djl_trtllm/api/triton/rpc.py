"""`ModelInfer` and `ModelStreamInfer`: protocol buffers as requests, output as protocol buffers.

Source: `grpc_server.cc`, `stream_infer_handler.cc` of Triton (e1db8a6) and its `decoupled_models.md`. Like `infer` over
HTTP, `ModelInfer` has one response, whole. A stream carries requests of any kind; each that asks for `stream` has a
response for each chunk. Encoders return serialised messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from djl_trtllm.api.base import Call, ModelContext, Prompt
from djl_trtllm.api.output import SequenceCollector
from djl_trtllm.api.parameters import show
from djl_trtllm.api.triton.batch import batch_tensors, check_input, check_outputs, read_batch
from djl_trtllm.api.triton.description import VERSION, is_decoupled
from djl_trtllm.api.triton.generate import SEQUENCE_PARAMETERS
from djl_trtllm.api.triton.inputs import InferenceRequest
from djl_trtllm.api.triton.outputs import SequenceOutput, index_tensor, output_tensors
from djl_trtllm.api.triton.protocol import ModelInferResponse, ModelStreamInferResponse
from djl_trtllm.api.triton.refusals import refuse_tensor_parameters
from djl_trtllm.api.triton.tensors import BYTES, Tensor, from_bytes, from_json, to_bytes
from djl_trtllm.errors import InvalidRequestError, RequestError
from djl_trtllm.request import OutputChunk

FINAL = "triton_final_response"
_NO_STREAM = (
    "'stream' is true: ModelInfer RPC doesn't support models with decoupled transaction policy; use ModelStreamInfer"
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
"""Where the elements of a tensor are that is not given as bytes."""


class Frame(Enum):
    """Around a response: none; a stream's, for a decoupled model or for one with one response to each request.

    A decoupled model of Triton says by an empty response that a request has ended, to clients that ask for it.
    """

    ALONE = auto()
    DECOUPLED = auto()
    ONLY = auto()


class RpcEncoder:
    """Encodes the responses to one request; in a stream they are wrapped.

    After a chunk that ends with an error, `error` has the last response, after all others `end`.
    """

    content_type = "application/grpc"
    wants_prompt_tokens = False

    def __init__(self, requests: list[InferenceRequest], wanted: tuple[str, ...], message: Any, frame: Frame) -> None:
        self._requests = requests
        self._wanted = wanted
        self._frame = frame
        self._final = frame is Frame.DECOUPLED and requests[0].empty_final_response
        self.head = ModelInferResponse(model_name=message.model_name, model_version=VERSION, id=message.id)
        _set_parameters(self.head, SEQUENCE_PARAMETERS)

    def begin(self, prompt: Prompt) -> None:
        """Receive a prompt, see `ResponseEncoder`."""

    def error(self, error: RequestError) -> bytes:
        """The response that says in a stream why there is no other one."""
        return failure(str(error), self.head)

    def end(self) -> bytes:
        """The empty last response of a stream, if the request asks for it."""
        return self._message({}, final=True) if self._final else b""

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


class WholeEncoder(RpcEncoder):
    """One response, at the end."""

    stream = False

    def __init__(self, requests: list[InferenceRequest], wanted: tuple[str, ...], message: Any, frame: Frame) -> None:
        super().__init__(requests, wanted, message, frame)
        self._prompts: list[str] = []
        self._output = SequenceCollector(requests[0].n, len(requests))

    def begin(self, prompt: Prompt) -> None:
        self._prompts.append(prompt.text if self._requests[len(self._prompts)].prompt else "")

    def encode(self, chunk: OutputChunk) -> bytes:
        failed = chunk.finished is not None and chunk.finished.error is not None
        if not self._output.add(chunk) or failed:
            return b""
        tensors = batch_tensors(self._requests, self._prompts, self._output.sequences)
        return self._message({name: tensors[name] for name in self._wanted})


class StreamEncoder(RpcEncoder):
    """A response for each chunk, with its new text and the log-probabilities of its tokens.

    The indices are in it if there are several prompts or sequences, or if they are asked for.
    """

    stream = True

    def __init__(self, requests: list[InferenceRequest], wanted: tuple[str, ...], message: Any, frame: Frame) -> None:
        super().__init__(requests, wanted, message, frame)
        self._n = requests[0].n
        self._begun = [False] * (self._n * len(requests))
        self._cumulative = [0.0] * (self._n * len(requests))
        several = [*["batch_index"] * (len(requests) > 1), *["sequence_index"] * (self._n > 1)]
        self._shown = tuple(dict.fromkeys((*wanted, *several)))

    def encode(self, chunk: OutputChunk) -> bytes:
        finished = chunk.finished
        failed = finished is not None and finished.error is not None
        number = chunk.generation * self._n + chunk.index
        # The end by itself is no response, unless there was none before.
        if not chunk.tokens and (failed or (finished is not None and self._begun[number])):
            return b""
        self._begun[number] = True
        logprobs = [0.0] * len(chunk.tokens)
        if self._requests[chunk.generation].logprobs:
            logprobs = [token.logprob or 0.0 for token in chunk.tokens]
            self._cumulative[number] += sum(logprobs)
        output = SequenceOutput("".join([token.text for token in chunk.tokens]), logprobs, self._cumulative[number])
        tensors = {tensor.name: tensor for tensor in output_tensors([output])}
        tensors["batch_index"] = index_tensor("batch_index", chunk.generation)
        tensors["sequence_index"] = index_tensor("sequence_index", chunk.index)
        return self._message({name: tensors[name] for name in self._shown})


def parse_rpc(message: Any, model: ModelContext, *, streams: bool) -> Call:
    """Read a ModelInferRequest; `streams`: from a stream. Raises InvalidRequestError."""
    name = message.model_name
    tensors = _tensors(message, name)
    requests = read_batch(tensors, _parameters(message.parameters), model, name)
    wanted = check_outputs([output.name for output in message.outputs], name)
    for output in message.outputs:
        refuse_tensor_parameters(output.parameters, f"output {show(output.name)}")
    if not streams and requests[0].stream:
        raise InvalidRequestError(_NO_STREAM)
    if len({request.stream for request in requests}) > 1:
        raise InvalidRequestError("the prompts differ in 'stream': expected one value for all of them")
    made = StreamEncoder if requests[0].stream else WholeEncoder
    decoupled = Frame.DECOUPLED if is_decoupled(model) else Frame.ONLY
    encoder = made(requests, wanted, message, decoupled if streams else Frame.ALONE)
    return Call(tuple(request.generation for request in requests), encoder)


def failure(message: str, head: Any) -> bytes:
    """A response of a stream with an error. `head` has the name of the model and the identifier of the request."""
    response = ModelStreamInferResponse(error_message=message)
    response.infer_response.model_name = head.model_name
    response.infer_response.model_version = VERSION
    response.infer_response.id = head.id
    response.infer_response.parameters[FINAL].bool_param = True
    data: bytes = response.SerializeToString()
    return data


def _tensors(message: Any, model: str) -> list[Tensor]:
    inputs, raw = message.inputs, message.raw_input_contents
    for what, given in (("inputs", inputs), ("outputs", message.outputs)):
        if len(given) > _MOST_TENSORS:
            raise InvalidRequestError(f"there are {len(given)} {what}: expected at most {_MOST_TENSORS}")
    if raw and len(raw) != len(inputs):
        raise InvalidRequestError(
            f"raw_input_contents has {len(raw)} tensors for {len(inputs)} inputs: expected one for each, or none"
        )
    tensors = []
    for index, each in enumerate(inputs):
        refuse_tensor_parameters(each.parameters, f"input {show(each.name)}")
        if raw:
            check_input(each.name, model, len(raw[index]))
            if each.HasField("contents"):
                raise InvalidRequestError(
                    f"input '{each.name}' has contents, and raw_input_contents are given: expected one of them"
                )
            tensors.append(from_bytes(each.name, each.datatype, list(each.shape), raw[index]))
        else:
            tensors.append(_from_contents(each, model))
    return tensors


def _from_contents(given: Any, model: str) -> Tensor:
    field = _CONTENTS.get(given.datatype)
    data = getattr(given.contents, field) if field else ()
    check_input(given.name, model, len(data))
    if others := sorted({descriptor.name for descriptor, _ in given.contents.ListFields()} - {field}):
        raise InvalidRequestError(
            f"input '{given.name}' of {show(given.datatype)} has {others[0]}: expected {field or 'raw_input_contents'}"
        )
    values: list[Any] = list(data)
    if given.datatype == BYTES:
        try:
            values = [value.decode() for value in values]
        except UnicodeDecodeError:
            raise InvalidRequestError(f"input '{given.name}' is not UTF-8 text") from None
    return from_json(given.name, given.datatype, list(given.shape), values)


def _parameters(given: Any) -> dict[str, Any]:
    found = {}
    for name, parameter in given.items():
        kind = parameter.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(parameter, kind)
    return found


def _set_parameters(response: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if type(value) is bool:
            response.parameters[name].bool_param = value
        else:
            response.parameters[name].int64_param = value
