"""OpenAI's API as a dialect."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from djl_trtllm.api.base import Call, Dialect, ModelContext, ModelStatus, RawRequest, Reply
from djl_trtllm.api.openai.errors import encode_error
from djl_trtllm.api.openai.parse import parse_chat, parse_completion, read_model_name
from djl_trtllm.api.openai.tokens import detokenize, tokenize
from djl_trtllm.config import Options
from djl_trtllm.errors import NotReadyError, UnknownModelError

_STARTED = int(time.time())
_OWNER = "djl-trtllm"
_ENDPOINT = "/endpoints/{endpoint}"
_PREFIXES = (
    "/v1",
    # What OpenAI's and Hugging Face's clients make of the address of /invocations.
    "/invocations",
    "/invocations/v1",
    # SageMaker's runtime, whose container gets the request at /v1.
    f"{_ENDPOINT}/openai/v1",
    f"{_ENDPOINT}/inference-components/{{component}}/openai/v1",
)


class OpenAi(Dialect):
    """Chat completions, completions and models, and vLLM's `/tokenize` and `/detokenize`."""

    paths = tuple(prefix + path for prefix in _PREFIXES for path in ("/chat/completions", "/completions"))
    pages = (*(f"{prefix}/models" for prefix in _PREFIXES), "/v1/models/{model}")
    actions = ("/tokenize", "/detokenize")
    names_model = True
    aliases = frozenset({"dummy", "tgi"})
    """What huggingface_hub's client and TGI's documents send where an address has one model."""

    def model_name(self, request: RawRequest) -> str | None:
        return read_model_name(request)

    def page(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """The models as a list, or the one that the path names."""
        listed = [_listed(model) for model in models]
        return Reply.json(listed[0] if "model" in request.parameters else {"object": "list", "data": listed})

    def act(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """`/tokenize` and `/detokenize`, with the tokenizer of the model that the body names."""
        if len(models) != 1:
            names = ", ".join(model.name for model in models)
            raise UnknownModelError(f"'model' is not given: expected one of {names or 'none'}", name=None)
        (model,) = models
        if model.context is None:
            raise NotReadyError(f"model {model.name} is still loading", retry_after=10)
        return (tokenize if request.path == "/tokenize" else detokenize)(request, model.context)

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        return (parse_chat if request.path.endswith("/chat/completions") else parse_completion)(request, model)

    def encode_error(self, error: BaseException, options: Options) -> Reply:
        return encode_error(error, options)


def _listed(model: ModelStatus) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": _STARTED, "owned_by": _OWNER}


OPENAI = OpenAi()
