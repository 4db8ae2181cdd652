"""LMI as a dialect: its paths, and the objects and functions of this folder behind one interface."""

from __future__ import annotations

from djl_trtllm.api.base import Call, Dialect, ModelContext, RawRequest, Reply
from djl_trtllm.api.event_stream import event_stream, forwarded
from djl_trtllm.api.lmi.errors import encode_error
from djl_trtllm.api.lmi.parse import parse
from djl_trtllm.config import Options

_INVOCATIONS = "/endpoints/{endpoint}/invocations"
_RESPONSE_STREAM = "/endpoints/{endpoint}/invocations-response-stream"
_VARIANT = ("x-Amzn-Invoked-Production-Variant", "AllTraffic")
"""What SageMaker's runtime adds to the container's response."""


class Lmi(Dialect):
    """The API of the DJL containers, `{"inputs", "parameters", "stream"}` and `{"messages", ...}`."""

    paths = (
        "/invocations",
        "/predictions/{model}",
        "/models/{model}/invoke",
        _INVOCATIONS,
        _RESPONSE_STREAM,
    )
    endpoint_errors = True

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
