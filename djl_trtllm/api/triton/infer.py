"""`infer` of KServe v2: tensors as JSON or as bytes after the JSON, whose length is then in a header.

Source: KServe's `required_api.md`, Triton's `extension_binary_data.md`. There is one response, whole, so that models
that stream answer as well; Triton refuses them here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from djl_trtllm.api.base import Call, ModelContext, Prompt, RawRequest
from djl_trtllm.api.output import WholeEncoder
from djl_trtllm.api.parameters import show
from djl_trtllm.api.triton.batch import batch_tensors, check_input, check_outputs, read_batch
from djl_trtllm.api.triton.content import (
    accepted_encoding,
    compress,
    read_body,
    read_id,
    read_object,
    read_parameters,
)
from djl_trtllm.api.triton.description import VERSION
from djl_trtllm.api.triton.generate import SEQUENCE_PARAMETERS
from djl_trtllm.api.triton.inputs import InferenceRequest
from djl_trtllm.api.triton.refusals import refuse_tensor_parameters
from djl_trtllm.api.triton.tensors import Tensor, from_bytes, from_json, to_bytes
from djl_trtllm.errors import InvalidRequestError

HEADER_LENGTH = "Inference-Header-Content-Length"
_NO_STREAM = (
    "'stream' is true: HTTP end point doesn't support models with decoupled transaction policy; use generate_stream"
)
_MOST_TENSORS = 64


def parse_infer(request: RawRequest, model: ModelContext, name: str) -> Call:
    """Read a body. `name` is the model's in the path. Raises InvalidRequestError."""
    body = read_body(request, model.options.max_request_size)
    head, binary = _split(body, request.properties.get(HEADER_LENGTH.lower()))
    payload = read_object(head, "the body's JSON")
    for member in payload.keys() - {"id", "parameters", "inputs", "outputs"}:
        raise InvalidRequestError(f"unknown member {show(member)}: expected 'id', 'parameters', 'inputs' and 'outputs'")
    tensors = _tensors(_objects(payload, "inputs"), binary, name)
    requests = read_batch(tensors, read_parameters(payload), model, name)
    if any(each.stream for each in requests):
        raise InvalidRequestError(_NO_STREAM)
    wanted = _wanted(payload, name, requests[0].binary_data_output)
    encoder = InferEncoder(requests, wanted, name, read_id(payload), accepted_encoding(request))
    return Call(tuple(each.generation for each in requests), encoder, late_headers=encoder.headers)


@dataclass(slots=True)
class Wanted:
    """An output that a request names. `binary`: as bytes."""

    name: str
    binary: bool


class InferEncoder(WholeEncoder):
    """The response to the requests of one batch. `encoding` compresses it."""

    def __init__(
        self, requests: list[InferenceRequest], wanted: list[Wanted], name: str, identifier: str, encoding: str
    ) -> None:
        super().__init__(requests[0].n, len(requests))
        self._requests = requests
        self._wanted = wanted
        if any(each.binary for each in wanted):
            self.content_type = "application/octet-stream"
        self._head: dict[str, Any] = {"id": identifier} if identifier else {}
        self._head |= {"model_name": name, "model_version": VERSION, "parameters": SEQUENCE_PARAMETERS}
        self._encoding = encoding
        self._prompts: list[str] = []
        self._headers: tuple[tuple[str, str], ...] = ()

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers of the response, once its body is encoded."""
        return self._headers

    def begin(self, prompt: Prompt) -> None:
        self._prompts.append(prompt.text if self._requests[len(self._prompts)].prompt else "")

    def _body(self) -> bytes:
        tensors = batch_tensors(self._requests, self._prompts, self._output.sequences)
        outputs: list[dict[str, Any]] = []
        binary = b""
        for wanted in self._wanted:
            tensor = tensors[wanted.name]
            output = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
            if wanted.binary:
                raw = to_bytes(tensor)
                binary += raw
                outputs.append(output | {"parameters": {"binary_data_size": len(raw)}})
            else:
                outputs.append(output | {"data": tensor.data})
        head = orjson.dumps(self._head | {"outputs": outputs})
        if any(wanted.binary for wanted in self._wanted):
            self._headers = ((HEADER_LENGTH, str(len(head))),)
        if not self._encoding:
            return head + binary
        self._headers = (*self._headers, ("Content-Encoding", self._encoding))
        return compress(head + binary, self._encoding)


def _split(body: bytes, declared: str | None) -> tuple[bytes, bytes]:
    """JSON and what follows it."""
    if declared is None:
        return body, b""
    if not (declared.isascii() and declared.isdecimal() and len(declared) < 12) or int(declared) > len(body):
        raise InvalidRequestError(
            f"{HEADER_LENGTH} is {show(declared)}: expected a number up to {len(body)}, the body's"
        )
    length = int(declared)
    return body[:length], body[length:]


def _objects(payload: dict[str, Any], name: str) -> list[dict[str, Any]]:
    given = payload.get(name, [])
    if type(given) is not list or len(given) > _MOST_TENSORS or not all(type(each) is dict for each in given):
        raise InvalidRequestError(f"'{name}' is {show(given)}: expected a list of up to {_MOST_TENSORS} objects")
    return given


def _tensors(given: list[dict[str, Any]], binary: bytes, model: str) -> list[Tensor]:
    tensors = []
    at = 0
    for each in given:
        name, datatype, shape, data = each.get("name"), each.get("datatype"), each.get("shape"), each.get("data")
        parameters = read_parameters(each)
        size = parameters.get("binary_data_size")
        refuse_tensor_parameters(parameters, f"input {show(name)}", "binary_data_size")
        if size is None:
            check_input(name, model, len(data) if type(data) is list else 1)
            if data is None:
                raise InvalidRequestError(f"input '{name}' has neither 'data' nor a 'binary_data_size'")
            tensors.append(from_json(str(name), datatype, shape, data))
            continue
        if type(size) is not int or not 0 <= size <= len(binary) - at or data is not None:
            raise InvalidRequestError(
                f"input {show(name)} has the binary_data_size {show(size)}: expected at most {len(binary) - at}, the "
                "bytes that are left after the JSON, and no 'data'"
            )
        check_input(name, model, size)
        tensors.append(from_bytes(str(name), datatype, shape, binary[at : at + size]))
        at += size
    if at != len(binary):
        raise InvalidRequestError(f"{len(binary) - at} bytes follow the tensors: expected none")
    return tensors


def _wanted(payload: dict[str, Any], model: str, binary: bool) -> list[Wanted]:
    given = _objects(payload, "outputs")
    names = check_outputs([each.get("name") for each in given], model)
    wanted = [Wanted(name, binary) for name in names]
    for each in given:
        parameters = read_parameters(each)
        if "binary_data" in parameters:
            if type(parameters["binary_data"]) is not bool:
                raise InvalidRequestError(f"'binary_data' is {show(parameters['binary_data'])}: expected true or false")
            next(one for one in wanted if one.name == each["name"]).binary = parameters["binary_data"]
        refuse_tensor_parameters(parameters, f"output {show(each['name'])}", "binary_data")
    return wanted
