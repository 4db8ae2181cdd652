"""OpenAI's API as a dialect."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from djl_trtllm.api.base import Call, Dialect, ModelContext, ModelStatus, Operation, RawRequest, Reply
from djl_trtllm.api.openai.errors import encode_error
from djl_trtllm.api.openai.parameters import CHAT_FIELDS, COMPLETION_FIELDS, DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from djl_trtllm.api.openai.parse import parse_chat, parse_completion, read_model_name
from djl_trtllm.api.openai.tokens import detokenize, tokenize
from djl_trtllm.api.schemas import EVENTS, INTEGER, STRING, list_of, members, nullable
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


_OBJECT = {"type": "object"}
_HEAD = {"id": STRING, "object": STRING, "created": INTEGER, "model": STRING}
_USAGE = members({"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER})
_MESSAGE = members(
    {"role": STRING, "content": nullable(STRING), "refusal": nullable(STRING)},
    optional={"tool_calls": list_of(_OBJECT), "reasoning_content": nullable(STRING)},
)
_END = {"index": INTEGER, "logprobs": nullable(_OBJECT), "finish_reason": STRING}
_CHAT_RESPONSE = members({**_HEAD, "choices": list_of(members({**_END, "message": _MESSAGE})), "usage": _USAGE})
_COMPLETION_RESPONSE = members({**_HEAD, "choices": list_of(members({**_END, "text": STRING})), "usage": _USAGE})
_MODEL = members({"id": STRING, "object": STRING, "created": INTEGER, "owned_by": STRING})
_TOKENS = members(
    {"count": INTEGER, "max_model_len": INTEGER, "tokens": list_of(INTEGER)},
    optional={"token_strs": list_of(STRING)},
)

_CHAT_PATHS = tuple(prefix + "/chat/completions" for prefix in _PREFIXES)
_COMPLETION_PATHS = tuple(prefix + "/completions" for prefix in _PREFIXES)
_CHAT = Operation(
    "Generate a chat message, whole or with `stream` as server-sent events",
    responses={"application/json": _CHAT_RESPONSE, "text/event-stream": EVENTS},
    example={"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 16},
)
_COMPLETION = Operation(
    "Generate from prompts, whole or with `stream` as server-sent events",
    responses={"application/json": _COMPLETION_RESPONSE, "text/event-stream": EVENTS},
    example={"prompt": "The wolf", "max_tokens": 16},
)
_MODELS = Operation(
    "The served models", responses={"application/json": members({"object": STRING, "data": list_of(_MODEL)})}
)


class OpenAi(Dialect):
    """Chat completions, completions and models, and vLLM's `/tokenize` and `/detokenize`."""

    paths = (*_CHAT_PATHS, *_COMPLETION_PATHS)
    pages = (*(f"{prefix}/models" for prefix in _PREFIXES), "/v1/models/{model}")
    actions = ("/tokenize", "/detokenize")
    tables = MappingProxyType(
        {
            **dict.fromkeys(_CHAT_PATHS, (CHAT_FIELDS,)),
            **dict.fromkeys(_COMPLETION_PATHS, (COMPLETION_FIELDS,)),
            "/tokenize": (TOKENIZE_FIELDS,),
            "/detokenize": (DETOKENIZE_FIELDS,),
        }
    )
    descriptions = MappingProxyType(
        {
            **dict.fromkeys(_CHAT_PATHS, _CHAT),
            **dict.fromkeys(_COMPLETION_PATHS, _COMPLETION),
            "/tokenize": Operation(
                "Token ids of a prompt or of chat messages",
                responses={"application/json": _TOKENS},
                example={"prompt": "The wolf"},
            ),
            "/detokenize": Operation(
                "The text of token ids",
                responses={"application/json": members({"prompt": STRING})},
                example={"tokens": [5, 6]},
            ),
            **{f"GET {prefix}/models": _MODELS for prefix in _PREFIXES},
            "GET /v1/models/{model}": Operation("One served model", responses={"application/json": _MODEL}),
        }
    )
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
        if request.path == "/detokenize":
            return detokenize(request, model.context)
        return tokenize(request, model.context, model.render)

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        return (parse_chat if request.path.endswith("/chat/completions") else parse_completion)(request, model)

    def encode_error(self, error: BaseException, options: Options) -> Reply:
        return encode_error(error, options)


def _listed(model: ModelStatus) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": _STARTED, "owned_by": _OWNER}


OPENAI = OpenAi()
