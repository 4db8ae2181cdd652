"""LMI as a dialect: its paths, and the objects and functions of this folder behind one interface."""

from __future__ import annotations

from djl_trtllm.api.base import Call, Dialect, ModelContext, RawRequest, Reply
from djl_trtllm.api.lmi.errors import encode_error
from djl_trtllm.api.lmi.parse import parse
from djl_trtllm.config import Options


class Lmi(Dialect):
    """The API of the DJL containers, `{"inputs", "parameters", "stream"}` and `{"messages", ...}`."""

    paths = (
        "/invocations",
        "/predictions/{model}",
        "/models/{model}/invoke",
        "/endpoints/{endpoint}/invocations",
    )

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        """See `Dialect`. The formatters of the model's own `model.py` come first."""
        if model.custom is not None:
            return model.custom.parse(request, model.options)
        return parse(request.body, request.content_type, model.options, request.properties)

    def encode_error(self, error: BaseException, options: Options) -> Reply:
        return encode_error(error, options)


LMI = Lmi()
