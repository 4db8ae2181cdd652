"""Parses the requests of `/v1/chat/completions` and `/v1/completions`.

Where OpenAI's reference leaves it open: a request samples unless its temperature is 0, because OpenAI's default
temperature is 1. Chat without `max_completion_tokens` gets as much as fits, completions 16 tokens. `model` is empty or
the name of a served model.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from djl_trtllm.api.base import Call, ModelContext, RawRequest
from djl_trtllm.api.messages import read_messages
from djl_trtllm.api.openai.chat import ChatEncoder, ChatStreamEncoder
from djl_trtllm.api.openai.completions import CompletionEncoder, CompletionStreamEncoder
from djl_trtllm.api.openai.parameters import CHAT_FIELDS, COMPLETION_FIELDS, STREAM_OPTIONS
from djl_trtllm.api.openai.parsed_chat import ParsedChatEncoder, ParsedChatStreamEncoder, Parsing
from djl_trtllm.api.openai.response import Response
from djl_trtllm.api.openai.tools import fit_messages, read_tool_use
from djl_trtllm.api.output_parsers import reasoning_format
from djl_trtllm.api.parameters import Problems, read_object, show
from djl_trtllm.api.sampling import generation_request, read_sampling, refuse_ranked_stream
from djl_trtllm.config import ReasoningFormat
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.request import GenerationRequest, Sampling

_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""
_MOST_PROMPTS = 64
"""Of one completion request."""
_MOST_SEQUENCES = 128
"""Of all prompts of one completion request."""


def read_model_name(request: RawRequest) -> str | None:
    """The model that the body names; None for "" and for none."""
    name = read_object(request).get("model")
    if name is not None and type(name) is not str:
        raise InvalidRequestError(f"'model' is {show(name)}: expected a string")
    return name or None


def parse_chat(request: RawRequest, model: ModelContext) -> Call:
    """Read the body of `/v1/chat/completions`. Raises InvalidRequestError."""
    payload, problems = read_object(request), Problems.of(model.options)
    messages = fit_messages(read_messages(payload.get("messages"), problems), model, problems)
    values = CHAT_FIELDS.read(payload, problems, "field")
    tools = read_tool_use(values, model, problems)
    if values.get("top_logprobs") and not values.get("logprobs"):
        problems.invalid.append("'top_logprobs' is given without 'logprobs': expected 'logprobs' to be true")
    sampling, response = _read(values, model, problems, "chatcmpl", generations=1)
    problems.raise_any()
    if tools is None:
        values.pop("tools", None)
    elif tools.guide is not None:
        values["guide"] = tools.guide
    generation = generation_request(values, sampling, response.logprobs, messages=messages, template=_template(values))
    parsing = Parsing(tools, _reasoning(model, values))
    if not parsing.needed:
        plain = ChatStreamEncoder(response) if response.stream else ChatEncoder(response)
        return Call((generation,), plain, problems.headers)
    guide_from = "tool_choice" if tools is not None and tools.guide is not None else None
    generation = replace(generation, shown_tokens=parsing.shown_tokens, guide_from=guide_from)
    encoder = ParsedChatStreamEncoder if response.stream else ParsedChatEncoder
    return Call((generation,), encoder(response, parsing), problems.headers)


def _reasoning(model: ModelContext, values: dict[str, Any]) -> ReasoningFormat:
    """How the output has reasoning in it. A guide leaves no room for any."""
    if values.get("guide") is not None:
        return ReasoningFormat.NONE
    return reasoning_format(model.options.reasoning_parser, model.tokenizer.chat_source("tools" in values))


def parse_completion(request: RawRequest, model: ModelContext) -> Call:
    """Read the body of `/v1/completions`. Raises InvalidRequestError."""
    payload, problems = read_object(request), Problems.of(model.options)
    prompts = _read_prompts(payload.get("prompt"), model, problems)
    values = COMPLETION_FIELDS.read(payload, problems, "field")
    values["default_new_tokens"] = _COMPLETION_TOKENS
    several = values.pop("logprobs", None)
    values["logprobs"] = several is not None
    if several is not None and several > 1:
        values["top_logprobs"] = several
    echo = values.get("echo", False)
    if echo and values["logprobs"]:
        problems.unsupported.append("'echo' with 'logprobs': the prompt's log-probabilities are not available")
    sampling, response = _read(values, model, problems, "cmpl", generations=len(prompts))
    if len(prompts) * sampling.sequences > _MOST_SEQUENCES:
        problems.invalid.append(
            f"{len(prompts)} prompts with {sampling.sequences} sequences each: expected at most {_MOST_SEQUENCES}"
        )
    problems.raise_any()
    response.echo = echo
    requests = tuple(
        _with_prompt(generation_request(values, sampling, response.logprobs), prompt) for prompt in prompts
    )
    encoder = CompletionStreamEncoder(response) if response.stream else CompletionEncoder(response)
    return Call(requests, encoder, problems.headers)


def read_template(values: dict[str, Any]) -> dict[str, Any]:
    """The chat template's keywords among the values of a request."""
    template: dict[str, Any] = dict(values.get("chat_template_kwargs", {}))
    template.pop("chat_template", None)
    if values.get("tools"):
        template["tools"] = values["tools"]
    if "add_generation_prompt" in values:
        template["add_generation_prompt"] = values["add_generation_prompt"]
    return template


def _template(values: dict[str, Any]) -> dict[str, Any] | None:
    return read_template(values) or None


def _read(
    values: dict[str, Any], model: ModelContext, problems: Problems, prefix: str, *, generations: int
) -> tuple[Sampling, Response]:
    values.setdefault("do_sample", True)
    sampling = read_sampling(values, problems)
    stream: bool = values.get("stream", False)
    if stream:
        refuse_ranked_stream(sampling, "beam_width", problems)
    options = STREAM_OPTIONS.read(values.get("stream_options", {}), problems, "member of 'stream_options'")
    if values.get("stream_options") and not stream:
        problems.invalid.append("'stream_options' is given without 'stream': expected 'stream' to be true")
    response = Response(
        prefix,
        model.name,
        n=sampling.n,
        generations=generations,
        stream=stream,
        logprobs=values.get("logprobs", False),
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage", False),
    )
    return sampling, response


def _read_prompts(prompt: Any, model: ModelContext, problems: Problems) -> list[str | list[int]]:
    """One prompt or several, each as text or as token ids."""
    expected = f"expected a text, a list of token ids, or a list of up to {_MOST_PROMPTS} of either"
    prompts = [prompt] if type(prompt) is str or _is_ids(prompt) else prompt
    if type(prompts) is not list or not 0 < len(prompts) <= _MOST_PROMPTS:
        problems.invalid.append(f"'prompt' is {show(prompt)}: {expected}")
        return [""]
    for item in prompts:
        if not (type(item) is str or _is_ids(item)) or not item:
            problems.invalid.append(f"'prompt' has {show(item)}: {expected}, none of them empty")
            return [""]
        if type(item) is list and not all(0 <= id_ < model.tokenizer.vocab_size for id_ in item):
            problems.invalid.append(
                f"'prompt' has token ids outside the vocabulary: expected 0 to {model.tokenizer.vocab_size - 1}"
            )
            return [""]
    return prompts


def _is_ids(value: Any) -> bool:
    return type(value) is list and bool(value) and all(type(item) is int for item in value)


def _with_prompt(request: GenerationRequest, prompt: str | list[int]) -> GenerationRequest:
    return replace(request, prompt=prompt) if isinstance(prompt, str) else replace(request, prompt_ids=prompt)
