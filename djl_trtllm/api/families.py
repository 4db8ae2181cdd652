"""Two families of APIs, OpenAI's and Hugging Face's (TGI, Text Embeddings Inference): paths, statuses and errors."""

import re
from types import MappingProxyType

from djl_trtllm import errors
from djl_trtllm.api.base import Dialect, RawRequest, nearest_row
from djl_trtllm.api.parameters import read_object, show

_ENDPOINT = "/endpoints/{endpoint}"
OPENAI_PREFIXES = (
    "/v1",
    # OpenAI's and Hugging Face's clients make these of the address of /invocations.
    "/invocations",
    "/invocations/v1",
    # SageMaker's runtime has these; its container gets the request at /v1.
    f"{_ENDPOINT}/openai/v1",
    f"{_ENDPOINT}/inference-components/{{component}}/openai/v1",
)
"""The beginnings of the paths of OpenAI's APIs."""

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_PARAMETER = re.compile(r"'([\w.\[\]]+)'[^;]*")
"""A message about one parameter, which begins with its name."""


_ERROR_TYPES: dict[type[errors.RequestError], tuple[str, str | None]] = {
    errors.InvalidRequestError: (_INVALID, None),
    errors.PromptTooLongError: (_INVALID, "context_length_exceeded"),
    errors.UnknownAdapterError: (_INVALID, "model_not_found"),
    errors.UnsupportedParameterError: (_INVALID, "unsupported_parameter"),
    errors.UnknownModelError: (_INVALID, "model_not_found"),
    errors.UnknownPathError: (_INVALID, "not_found"),
    errors.AuthenticationError: (_INVALID, "invalid_api_key"),
    errors.ForbiddenError: (_INVALID, "insufficient_permissions"),
    errors.MethodNotAllowedError: (_INVALID, "method_not_allowed"),
    errors.RequestTooLargeError: (_INVALID, "request_too_large"),
    errors.OverloadedError: ("overloaded_error", "overloaded"),
    errors.TooManyRequestsError: ("requests", "rate_limit_exceeded"),
    errors.NotReadyError: (_SERVER, "not_ready"),
    errors.RequestTimeoutError: (_SERVER, "timeout"),
    errors.GenerationError: (_SERVER, None),
}
"""The `type` and `code` of errors."""


def error_object(message: str, error: errors.RequestError | None) -> dict[str, str | None]:
    """The value of `error`. `param` is the parameter that the message is about, if it is about one."""
    kind, code = nearest_row(_ERROR_TYPES, error)
    named = _PARAMETER.fullmatch(message) if isinstance(error, errors.InvalidRequestError) else None
    return {"message": message, "type": kind, "param": named and named.group(1), "code": code}


class OpenAiLike(Dialect):
    """A dialect as OpenAI's APIs are: bodies name their model as `model`, and errors are objects."""

    names_model = True

    def model_name(self, request: RawRequest) -> str | None:
        """The model that the body names; None for "" and for none. Raises InvalidRequestError."""
        name = read_object(request).get("model")
        if name is not None and type(name) is not str:
            raise errors.InvalidRequestError(f"'model' is {show(name)}: expected a string")
        return name or None

    def error_body(self, message: str, error: errors.RequestError | None) -> object:
        return {"error": error_object(message, error)}


_HUGGING_FACE_ERRORS: dict[type[errors.RequestError], str] = {
    errors.RequestError: "validation",
    errors.AuthenticationError: "authentication",
    errors.ForbiddenError: "authentication",
    errors.OverloadedError: "overloaded",
    errors.NotReadyError: "unhealthy",
    errors.RequestTimeoutError: "incomplete_generation",
    errors.GenerationError: "generation",
}
"""The `error_type` by which TGI's clients choose the exception to raise (`router/src/infer/mod.rs` of TGI)."""


def hugging_face_error(message: str, error: errors.RequestError | None) -> dict[str, str]:
    """The JSON of an error."""
    return {"error": message, "error_type": nearest_row(_HUGGING_FACE_ERRORS, error)}


class HuggingFaceLike(Dialect):
    """A dialect as TGI and Text Embeddings Inference are: they have statuses and errors in common."""

    statuses = MappingProxyType(
        {
            errors.InvalidRequestError: 422,
            errors.OverloadedError: 429,
            errors.NotReadyError: 503,
            errors.GenerationError: 424,
        }
    )

    def error_body(self, message: str, error: errors.RequestError | None) -> object:
        return hugging_face_error(message, error)
