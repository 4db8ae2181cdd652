"""OpenAI's API as a dialect: requests, with the sampling parameters that vLLM and LMI add to them, and pages."""

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from djl_trtllm import errors
from djl_trtllm.api import content, parameters as kinds, sampling as shared
from djl_trtllm.api.base import (
    Call,
    ModelContext,
    ModelStatus,
    RawRequest,
    Render,
    Reply,
    only_model,
)
from djl_trtllm.api.chat import (
    TEMPLATE_KEYWORDS,
    THINKING,
    TOOLS,
    chat_request,
    fit_messages,
    prompt_text,
    read_tool_use,
    thinking_problem,
    token_ids,
    tools_problem,
)
from djl_trtllm.api.dialects.openai import responses
from djl_trtllm.api.families import OPENAI_PREFIXES, OpenAiLike
from djl_trtllm.api.openapi import read_operations
from djl_trtllm.api.parameters import IGNORED, Kind, Parameter, Problems, Table, found, read_object
from djl_trtllm.config import Task
from djl_trtllm.request import Sampling
from djl_trtllm.version import __version__

_NO_MEANING = kinds.ignored(
    *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("safety_identifier", "service_tier", "store", "user", "verbosity"),
)
"""Fields for OpenAI's own service. They change nothing about the answer of a model that has no such settings."""

_COMMON = (
    Parameter(("model",), kinds.TEXT, IGNORED),
    Parameter(("prompt_logprobs",), kinds.integer(0, shared.MOST_PROMPT_LOGPROBS), "prompt_logprobs"),
    Parameter(("temperature",), kinds.number(0, 2), "temperature"),
    Parameter(("stream",), kinds.BOOLEAN, "stream"),
    Parameter(("stream_options",), kinds.OBJECT, "stream_options"),
    Parameter(("return_token_ids",), kinds.BOOLEAN, "return_token_ids"),
    *shared.PRIORITY,
)


_MOST_PROMPTS = 64
"""The most prompts of one completion request."""
_PROMPTS = kinds.TextsOrIds("prompt", _MOST_PROMPTS, empty=False)


def _read_modalities(value: Any) -> None:
    if value != ["text"]:
        raise ValueError("")


_PARAMETERS = {"parameters": "to 'inputs' of /invocations, here its members stand beside the others"}

CHAT_FIELDS = Table(
    shared.SAMPLING,
    shared.ADAPTER,
    shared.NOT_HONOURED,
    _COMMON,
    _NO_MEANING,
    (
        Parameter(("messages",), content.MESSAGES, IGNORED),
        Parameter(
            ("max_completion_tokens", "max_tokens", "max_new_tokens"),
            kinds.integer(1, shared.MOST_TOKENS),
            "max_new_tokens",
        ),
        Parameter(("logprobs",), kinds.BOOLEAN, "logprobs", needs=("needs_logprobs",)),
        Parameter(("top_logprobs",), kinds.integer(0, 20), "top_logprobs"),
        Parameter(("add_generation_prompt",), kinds.BOOLEAN, "add_generation_prompt"),
        Parameter(("chat_template_kwargs",), TEMPLATE_KEYWORDS, "chat_template_kwargs"),
        Parameter(("continue_final_message",), neutral=(False,)),
        Parameter(("modalities",), Kind('["text"]', _read_modalities, {"const": ["text"]}), "modalities"),
        Parameter(("audio",), advice="this server generates text"),
        Parameter(("web_search_options",), advice="this server does not search"),
        Parameter(("moderation",), advice="this server does not moderate"),
        *TOOLS,
        *THINKING,
        Parameter(("functions",), neutral=([],), advice="use 'tools'"),
        Parameter(("function_call",), neutral=("none", "auto"), advice="use 'tool_choice'"),
    ),
    elsewhere={"prompt": "to /v1/completions", "inputs": "to /invocations, here it is 'messages'"} | _PARAMETERS,
    required=("messages",),
)
"""The body of `/v1/chat/completions`."""

COMPLETION_FIELDS = Table(
    shared.SAMPLING,
    shared.ADAPTER,
    shared.NOT_HONOURED,
    _COMMON,
    _NO_MEANING,
    (
        Parameter(("prompt",), _PROMPTS.kind, IGNORED),
        Parameter(
            ("max_tokens", "max_completion_tokens", "max_new_tokens"),
            kinds.integer(0, shared.MOST_TOKENS),
            "max_new_tokens",
        ),
        Parameter(("logprobs",), kinds.integer(0, 5), "logprobs", needs=("needs_logprobs",)),
        Parameter(("echo",), kinds.BOOLEAN, "echo"),
        Parameter(("suffix",), neutral=("",), advice="models are given a prompt, not a text with a gap"),
        Parameter(("add_special_tokens",), neutral=(True,)),
        *kinds.ignored("parallel_tool_calls", "reasoning_effort"),
    ),
    elsewhere={"messages": "to /v1/chat/completions", "inputs": "to /invocations, here it is 'prompt'"} | _PARAMETERS,
    required=("prompt",),
)
"""The body of `/v1/completions`."""

STREAM_OPTIONS = Table(
    (
        Parameter(("include_usage",), kinds.BOOLEAN, "include_usage"),
        # vLLM's: what load generators ask for.
        Parameter(("continuous_usage_stats",), kinds.BOOLEAN, "continuous_usage"),
        # OpenAI pads its events against eavesdroppers that see their lengths.
        Parameter(("include_obfuscation",), target=IGNORED),
    )
)
"""The members of `stream_options`."""

TOKENIZE_FIELDS = Table(
    (
        Parameter(("model",), kinds.TEXT, IGNORED),
        Parameter(("prompt",), kinds.TEXT, "prompt"),
        Parameter(("messages",), content.MESSAGES, IGNORED),
        Parameter(("add_special_tokens",), kinds.BOOLEAN, "add_special_tokens"),
        Parameter(("add_generation_prompt",), kinds.BOOLEAN, "add_generation_prompt"),
        Parameter(("return_token_strs",), kinds.BOOLEAN, "return_token_strs"),
        Parameter(("chat_template_kwargs",), TEMPLATE_KEYWORDS, "chat_template_kwargs"),
        TOOLS[0],
    )
)
"""The body of `/tokenize`."""

_ID_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 0}
DETOKENIZE_FIELDS = Table(
    (
        Parameter(("model",), kinds.TEXT, IGNORED),
        Parameter(("tokens",), Kind("a list of token ids", lambda value: value, _ID_LIST), IGNORED),
    ),
    required=("tokens",),
)
"""The body of `/detokenize`."""


_NOT_IN_A_STREAM = "{} with 'stream': they come with the whole response; leave out 'stream'"
_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""
_MOST_SEQUENCES = 128
"""The most sequences of all prompts of one completion request."""


def parse_chat(request: RawRequest, model: ModelContext) -> Call:
    """Read the body of `/v1/chat/completions`. Raises InvalidRequestError."""
    payload, problems = read_object(request), Problems.of(model.options)
    fitted = fit_messages(content.read_messages(payload.get("messages"), problems), model, problems)
    values = CHAT_FIELDS.read(payload, problems, "field") | fitted
    tools = read_tool_use(values, model, problems)
    if values.get("top_logprobs") and not values.get("logprobs"):
        problems.invalid.append("'top_logprobs' is given without 'logprobs': expected 'logprobs' to be true")
    sampling, response = _read(values, model, problems, "chatcmpl", generations=1)
    problems.raise_any()
    generation, parsing = chat_request(values, sampling, response.logprobs, tools, model)
    if not parsing.needed:
        plain = responses.ChatStreamEncoder(response) if response.stream else responses.ChatEncoder(response)
        return Call((generation,), plain, problems.headers)
    encoder = responses.ParsedChatStreamEncoder if response.stream else responses.ParsedChatEncoder
    return Call((generation,), encoder(response, parsing), problems.headers)


def parse_completion(request: RawRequest, model: ModelContext) -> Call:
    """Read the body of `/v1/completions`. Raises InvalidRequestError."""
    payload, problems = read_object(request), Problems.of(model.options)
    prompts = _PROMPTS.read(payload, model.tokenizer.vocab_size, problems)
    values = COMPLETION_FIELDS.read(payload, problems, "field")
    values["default_new_tokens"] = _COMPLETION_TOKENS
    several = values.pop("logprobs", None)
    values["logprobs"] = several is not None
    if several is not None and several > 1:
        values["top_logprobs"] = several
    echo = values.get("echo", False)
    asked = values.get("prompt_logprobs")
    if values.get("max_new_tokens") == 0:
        if not echo and asked is None:
            problems.invalid.append("'max_tokens' is 0: expected 'echo' or 'prompt_logprobs' with it, or at least 1")
        values |= {"prompt_only": True, "max_new_tokens": 1}  # which the engine generates, and nobody sees
    if echo and several is not None:
        if values.get("stream"):
            problems.unsupported.append(_NOT_IN_A_STREAM.format("'echo' with 'logprobs'"))
        values["prompt_logprobs"] = max(several, asked or 0)
    sampling, response = _read(values, model, problems, "cmpl", generations=len(prompts))
    if len(prompts) * sampling.sequences > _MOST_SEQUENCES:
        problems.invalid.append(
            f"{len(prompts)} prompts with {sampling.sequences} sequences each: expected at most {_MOST_SEQUENCES}"
        )
    problems.raise_any()
    response.echo = echo
    one = shared.generation_request(values, sampling, response.logprobs)
    requests = tuple(
        replace(one, prompt=prompt) if isinstance(prompt, str) else replace(one, prompt_ids=prompt)
        for prompt in prompts
    )
    encoder = responses.CompletionStreamEncoder(response) if response.stream else responses.CompletionEncoder(response)
    return Call(requests, encoder, problems.headers)


@lru_cache(maxsize=1024)
def fingerprint(*configuration: object) -> str:
    """The `system_fingerprint` of a model: it is the same where the same request gets the same answer."""
    return f"fp_{sha256(repr((__version__, *configuration)).encode()).hexdigest()[:10]}"


def _read(
    values: dict[str, Any], model: ModelContext, problems: Problems, prefix: str, *, generations: int
) -> tuple[Sampling, responses.Response]:
    values.setdefault("do_sample", True)
    sampling = shared.read_sampling(values, problems)
    stream: bool = values.get("stream", False)
    if stream:
        shared.refuse_ranked_stream(sampling, problems)
        if "prompt_logprobs" in problems.sent:
            problems.unsupported.append(_NOT_IN_A_STREAM.format("'prompt_logprobs'"))
    options = STREAM_OPTIONS.read(values.get("stream_options", {}), problems, "member of 'stream_options'")
    if values.get("stream_options") and not stream:
        problems.invalid.append("'stream_options' is given without 'stream': expected 'stream' to be true")
    response = responses.Response(
        prefix,
        model.name,
        fingerprint(model.name, model.options.backend, model.options.dtype, model.options.revision),
        n=sampling.n,
        generations=generations,
        stream=stream,
        logprobs=values.get("logprobs", False),
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage", False),
        prompt_logprobs="prompt_logprobs" in problems.sent,
        token_ids=values.get("return_token_ids", False),
        tgi=model.options.tgi_compat,
    )
    return sampling, response


def tokenize(request: RawRequest, model: ModelContext, render: Render | None = None) -> Reply:
    """Token ids of a `prompt`, or of `messages` in the model's chat template, which `render` renders.

    Raises InvalidRequestError.
    """
    payload, problems = read_object(request), Problems.of(model.options)
    values = TOKENIZE_FIELDS.read(payload, problems, "field")
    if ("messages" in payload) == ("prompt" in payload):
        problems.invalid.append("expected either 'prompt' or 'messages'")
    if chat := "messages" in payload:
        values |= fit_messages(content.read_texts(payload["messages"], problems), model, problems)
    problems.raise_any()
    text = prompt_text(values, model, render) if chat else values.get("prompt", "")
    ids = token_ids(text, model, special=values.get("add_special_tokens", not chat))
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_seq_len, "tokens": ids}
    if values.get("return_token_strs"):
        reply["token_strs"] = [model.tokenizer.raw.id_to_token(id_) for id_ in ids]
    return Reply.json(reply)._replace(headers=problems.headers)


def detokenize(request: RawRequest, model: ModelContext) -> Reply:
    """The text of `tokens`. Raises InvalidRequestError."""
    payload, problems = read_object(request), Problems.of(model.options)
    DETOKENIZE_FIELDS.read(payload, problems, "field")
    problems.raise_any()
    ids, size = payload.get("tokens"), model.tokenizer.vocab_size
    if type(ids) is not list or not all(type(id_) is int and 0 <= id_ < size for id_ in ids):
        raise errors.InvalidRequestError(f"'tokens' {found(ids)}: expected a list of token ids from 0 to {size - 1}")
    return Reply.json({"prompt": model.tokenizer.decode(ids, False)})._replace(headers=problems.headers)


_STARTED = int(time.time())
_OWNER = "djl-trtllm"
_CHAT_PATHS = tuple(prefix + "/chat/completions" for prefix in OPENAI_PREFIXES)
_COMPLETION_PATHS = tuple(prefix + "/completions" for prefix in OPENAI_PREFIXES)
_OPERATIONS = read_operations("openai.toml")


class OpenAi(OpenAiLike):
    """Chat completions, completions and models, and as actions vLLM's `/tokenize` and `/detokenize`.

    Source: OpenAI's API reference of 2026 (`create chat completion`, `create completion`). Where it leaves it open: a
    request samples unless its temperature is 0, because OpenAI's default temperature is 1. Chat without
    `max_completion_tokens` gets as much as fits, completions 16 tokens. `model` is empty or the name of a served model.
    """

    title = "OpenAI chat and completions"
    paths = (*_CHAT_PATHS, *_COMPLETION_PATHS)
    pages = (*(f"{prefix}/models" for prefix in OPENAI_PREFIXES), "/v1/models/{model}")
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
            **dict.fromkeys(_CHAT_PATHS, _OPERATIONS["chat"]),
            **dict.fromkeys(_COMPLETION_PATHS, _OPERATIONS["complete"]),
            "/tokenize": _OPERATIONS["tokenize"],
            "/detokenize": _OPERATIONS["detokenize"],
            **{f"GET {prefix}/models": _OPERATIONS["models"] for prefix in OPENAI_PREFIXES},
            "GET /v1/models/{model}": _OPERATIONS["one_model"],
        }
    )
    statuses = MappingProxyType({errors.UnknownAdapterError: 404})
    aliases = frozenset({"dummy", "tgi"})
    """The names of models that huggingface_hub's client and TGI's documents send to a server with one model."""

    def page(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """The models as a list, or the one that the path names."""
        listed = [_listed(model) for model in models]
        return Reply.json(listed[0] if "model" in request.parameters else {"object": "list", "data": listed})

    def act(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """`/tokenize` and `/detokenize`, with the tokenizer of the model that the body names."""
        model, render = only_model(models)
        return detokenize(request, model) if request.path == "/detokenize" else tokenize(request, model, render)

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        return (parse_chat if request.path.endswith("/chat/completions") else parse_completion)(request, model)


def _listed(model: ModelStatus) -> dict[str, Any]:
    """The entry of a model. `supported_parameters` is OpenRouter's; a model that is loading has no lists yet."""
    entry = {"id": model.name, "object": "model", "created": _STARTED, "owned_by": _OWNER}
    if model.context is None:
        return entry
    task = model.context.options.task
    if task in (Task.EMBED, Task.SCORE):
        return entry | {"task": task.value}
    refused = parameters(model.refusals, model.context)
    return entry | {
        "supported_parameters": [name for name, reason in refused.items() if not reason],
        "unsupported_parameters": {name: reason for name, reason in refused.items() if reason},
    }


def parameters(refusals: Mapping[str, str], model: ModelContext) -> dict[str, str]:
    """The reasons why parameters of both bodies are refused, "" for one that has an effect; see `ModelStatus`."""
    chat, completions = (table.refused(refusals) for table in (CHAT_FIELDS, COMPLETION_FIELDS))
    if (problem := tools_problem(model)) is not None:
        chat["tools"] = problem
        chat["tool_choice"] = chat["tool_choice"] or ("" if "tools" in model.tokenizer.chat_source(True) else problem)
    if (problem := thinking_problem(model)) is not None:
        chat |= {name: problem for name, row in CHAT_FIELDS.rows.items() if row.target == "thinking_budget"}
    served = {name for table in (chat, completions) for name, reason in table.items() if not reason}
    return {name: "" if name in served else reason for name, reason in sorted((completions | chat).items())}


OPENAI = OpenAi()
