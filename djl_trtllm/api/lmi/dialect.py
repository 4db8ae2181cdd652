"""LMI as a dialect: its paths, and the objects and functions of this folder behind one interface."""

from __future__ import annotations

from types import MappingProxyType

from djl_trtllm.api.base import Call, Dialect, ModelContext, Operation, RawRequest, Reply
from djl_trtllm.api.event_stream import event_stream, forwarded
from djl_trtllm.api.lmi.errors import encode_error
from djl_trtllm.api.lmi.parameters import BEDROCK_FIELDS, CHAT_FIELDS, INPUTS_FIELDS
from djl_trtllm.api.lmi.parse import parse
from djl_trtllm.api.schemas import EVENTS, INTEGER, STRING, any_of, list_of, members
from djl_trtllm.config import Options

_INVOCATIONS = "/endpoints/{endpoint}/invocations"
_RESPONSE_STREAM = "/endpoints/{endpoint}/invocations-response-stream"
_VARIANT = ("x-Amzn-Invoked-Production-Variant", "AllTraffic")
"""What SageMaker's runtime adds to the container's response."""
_OBJECT = {"type": "object"}
_GENERATED = members({"generated_text": STRING}, optional={"details": _OBJECT})
_CHAT = members({"id": STRING, "object": STRING, "created": INTEGER, "choices": list_of(_OBJECT), "usage": _OBJECT})
_BEDROCK = members({"body": _OBJECT, "metering": _OBJECT, "content_type": STRING})
_GENERATE = Operation(
    "Generate from a prompt or from chat messages",
    # The prompt itself. No schema, because every text is one.
    bodies={"text/plain": {}},
    responses={
        "application/json": any_of(_GENERATED, list_of(_GENERATED), _CHAT, _BEDROCK),
        "application/jsonlines": EVENTS,
        "text/event-stream": EVENTS,
        "text/plain": STRING,
    },
    example={"inputs": "The wolf", "parameters": {"max_new_tokens": 16}},
)
_STREAM = _GENERATE._replace(
    summary="Generate, as an event stream of AWS", responses={"application/vnd.amazon.eventstream": EVENTS}
)
_PATHS = (
    "/invocations",
    "/predictions/{model}",
    "/models/{model}/invoke",
    _INVOCATIONS,
    _RESPONSE_STREAM,
)


class Lmi(Dialect):
    """The API of the DJL containers, `{"inputs", "parameters", "stream"}` and `{"messages", ...}`."""

    paths = _PATHS
    tables = dict.fromkeys(_PATHS, (INPUTS_FIELDS, CHAT_FIELDS, BEDROCK_FIELDS))
    descriptions = MappingProxyType({**dict.fromkeys(_PATHS, _GENERATE), _RESPONSE_STREAM: _STREAM})
    sagemaker = True

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        """See `Dialect`. The formatters of the model's own `model.py` come first."""
        if request.path == _RESPONSE_STREAM:
            call = event_stream(_parse(forwarded(request), model))
        else:
            call = _parse(request, model)
        if request.path in (_INVOCATIONS, _RESPONSE_STREAM):
            call = call._replace(headers=(*call.headers, _VARIANT))
        return call

    def encode_error(self, error: BaseException, options: Options) -> Reply:
        return encode_error(error, options)


def _parse(request: RawRequest, model: ModelContext) -> Call:
    if model.custom is not None:
        return model.custom.parse(request, model.options)
    return parse(request.body, request.content_type, model.options, request.properties)


LMI = Lmi()
