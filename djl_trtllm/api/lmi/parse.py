"""Parses LMI's requests: `{"inputs", "parameters", "stream"}`, `{"messages", ...}`, and Bedrock's (`bedrock_compat`).

Where DJL's documents leave it open, or DJL differs by version:

- Sampling: `do_sample` decides if it is given. Otherwise a request samples if it sets `temperature` (not 0, not 1),
  `top_k` (above 1) or `top_p` (below 1), as in LMI from 0.32 on; a seed alone does not. Chat samples unless its
  temperature is 0. A temperature of 0 is greedy, even if `do_sample` is true.
- Without `max_new_tokens`, `inputs` gets 30 tokens, as documented, and Bedrock's `prompt` 512. Chat without
  `max_tokens` gets as much as fits: a chat needs whole answers.
- `best_of` sequences (by default `n`) are generated and `n` returned. `best_of` alone returns one sequence, or with
  `tgi_compat` all, as TGI does.
- Every parameter has its effect or is refused by name, unless its value changes nothing. Types are JSON's, strictly.
- The encoder: `parameters.output_formatter`, else the option, else `json`, or for streams `jsonlines` (`sse` with
  `tgi_compat`). Chat: `json_chat` or `jsonlines_chat`, unless the request or the option names another *chat*
  formatter. An unknown name is logged and ignored. Where the request does not name one, its `Accept` decides between
  lines and events (`headers.prefers_events`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import orjson
from msgspec.structs import replace

from djl_trtllm.api.base import Call, ResponseEncoder
from djl_trtllm.api.headers import from_hugging_face, prefers_events
from djl_trtllm.api.json_body import read_json
from djl_trtllm.api.lmi.bedrock import BedrockEncoder, BedrockStreamEncoder
from djl_trtllm.api.lmi.chat_encoders import ChatEncoder, ChatStreamEncoder
from djl_trtllm.api.lmi.encoders import JsonEncoder, JsonLinesEncoder, PlainTextEncoder
from djl_trtllm.api.lmi.parameters import BEDROCK_FIELDS, CHAT_FIELDS, INPUTS_FIELDS, INPUTS_PARAMETERS
from djl_trtllm.api.lmi.presentation import Presentation
from djl_trtllm.api.messages import read_messages
from djl_trtllm.api.parameters import Problems, show
from djl_trtllm.api.sampling import generation_request, read_sampling, refuse_ranked_stream
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError

_logger = logging.getLogger(__name__)

PREFIX = "Input Parsing failed. Ensure that the request payload is valid. "
ACCEPTED = "application/json or text/plain"
_DEFAULT_NEW_TOKENS = 30
_BEDROCK_NEW_TOKENS = 512
_NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})
_NO_TYPE = frozenset({"", "application/octet-stream", "binary/octet-stream"})
"""What boto3 and others send if the caller sets no type."""


def parse(
    body: bytes,
    content_type: str | None = None,
    options: Options = Options(),  # noqa: B008  immutable
    properties: Mapping[str, str] = _NO_PROPERTIES,
) -> Call:
    """Parse a request. `properties` are its headers and custom attributes, with lower-case names.

    See `Dialect.parse` for what it raises.
    """
    return parse_payload(decode(body, content_type), options, properties)


def decode(body: bytes, content_type: str | None) -> Any:
    """The payload in a body: JSON, or the prompt itself as plain text."""
    media_type, _, rest = (content_type or "").partition(";")
    media_type = media_type.strip().lower()
    if media_type in _NO_TYPE or media_type.endswith(("/json", "+json", "/jsonlines")):
        if not body.strip():
            raise InvalidRequestError(
                f"{PREFIX}Invalid request payload. The 'inputs' field does not contain any content: the body is empty"
            )
        try:
            return read_json(body)
        except orjson.JSONDecodeError as error:
            raise InvalidRequestError(
                f"{PREFIX}Invalid request payload. The body is not valid JSON: {error}. "
                f"Received {show(body[:100].decode(errors='replace'))}"
            ) from None
    if media_type == "text/plain":
        charset = rest.lower().partition("charset=")[2].strip(" \"'") or "utf-8"
        if charset not in ("utf-8", "utf8", "us-ascii", "ascii"):
            raise InvalidRequestError(f"{PREFIX}Invalid request payload. Charset {show(charset)} is not utf-8")
        try:
            return {"inputs": body.decode()}
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"{PREFIX}Invalid request payload. The text is not UTF-8: {error}") from None
    hint = ""
    if media_type == "application/x-www-form-urlencoded":
        hint = " (curl -d sends this type by itself: add -H 'Content-Type: application/json')"
    raise InvalidRequestError(
        f"{PREFIX}Invalid request payload. Content type {show(media_type)} is not accepted{hint}: expected {ACCEPTED}"
    )


def parse_payload(
    payload: Any,
    options: Options = Options(),  # noqa: B008  immutable
    properties: Mapping[str, str] = _NO_PROPERTIES,
) -> Call:
    """`parse` from the decoded payload on."""
    problems = Problems.of(options)
    if type(payload) is not dict:
        problems.invalid.append(
            "Invalid request payload. Request payload should be a json object specifying the 'inputs' field. "
            f"Received payload {show(payload)}"
        )
        problems.raise_any(PREFIX)
    if "messages" in payload:
        call = _parse_chat(payload, options, properties, problems)
    elif options.bedrock_compat:
        call = _parse_bedrock(payload, options, properties, problems)
    else:
        call = _parse_inputs(payload, options, properties, problems)
    problems.raise_any(PREFIX)
    adapter = properties.get("x-amzn-sagemaker-adapter-identifier")
    (request,) = call.requests
    if adapter and request.adapter is None:
        request = replace(request, adapter=adapter)
    return Call((request,), call.encoder, problems.headers)


def choose_encoder(
    name: str | None, presentation: Presentation, *, several: bool = False, events: bool | None = None
) -> ResponseEncoder:
    """The encoder for an `output_formatter` name. `several`: more than one sequence is generated, whatever `n` is.

    `events` chooses between lines and events, whichever `name` means.
    """
    if name is not None and name not in FORMATTERS:
        _logger.warning("Unsupported output formatter: %s; using the default", show(name))
        name = None
    if name is None:
        name = "json" if not presentation.stream else "sse" if presentation.tgi_compat else "jsonlines"
    if several and name in _SINGLE:
        name = "json"
    if events is not None:
        name = (_EVENTS if events else _LINES).get(name, name)
    return FORMATTERS[name](presentation)


FORMATTERS: dict[str, Callable[[Presentation], ResponseEncoder]] = {
    "json": JsonEncoder,
    "jsonlines": lambda presentation: JsonLinesEncoder(presentation, sse=False),
    "sse": lambda presentation: JsonLinesEncoder(presentation, sse=True),
    "json_chat": ChatEncoder,
    "jsonlines_chat": lambda presentation: ChatStreamEncoder(presentation, sse=False),
    "sse_chat": lambda presentation: ChatStreamEncoder(presentation, sse=True),
    "3p": BedrockEncoder,
    "3p_stream": BedrockStreamEncoder,
    "none": PlainTextEncoder,
}
"""The encoder for each `output_formatter`."""

_CHAT_FORMATTERS = ("json_chat", "jsonlines_chat", "sse_chat")
_EVENTS = {"jsonlines": "sse", "jsonlines_chat": "sse_chat"}
_LINES = {name: lines for lines, name in _EVENTS.items()}
_SINGLE = ("jsonlines", "sse", "3p", "3p_stream")
"""Formats for a single sequence."""


def _parse_inputs(payload: dict[str, Any], options: Options, properties: Mapping[str, str], problems: Problems) -> Call:
    inputs = _read_prompt(payload, "inputs", problems)
    parameters = payload.get("parameters")
    if parameters is None:
        parameters = {}
    elif type(parameters) is not dict:
        problems.invalid.append(
            "Invalid request payload. 'parameters' must be provided as an object of key-value pairs. "
            f"Received {show(parameters)}"
        )
        parameters = {}
    fields = INPUTS_FIELDS.read(payload, problems, "field")
    stream: bool = fields.pop("stream", False)
    values = fields | INPUTS_PARAMETERS.read(parameters, problems, "parameter")
    values["default_new_tokens"] = _DEFAULT_NEW_TOKENS
    if options.tgi_compat and "n" not in values and "best_of" in values:
        values["n"] = values["best_of"]
    sampling = read_sampling(values, problems, ranked=True)
    several = sampling.sequences > 1
    if several and stream:
        problems.invalid.append(
            "'stream' is true and 'n', 'best_of' or 'num_beams' above 1: which sequence is the best is known only at "
            "the end, expected 'stream' to be false"
        )
    presentation = Presentation(
        inputs=inputs,
        stream=stream,
        details=several or values.get("details", options.tgi_compat),
        return_full_text=values.get("return_full_text", False),
        prefill=values.get("prefill", False),
        tgi_compat=options.tgi_compat or from_hugging_face(properties),
        n=sampling.n,
    )
    named = values.get("output_formatter")
    events = None if named else prefers_events(properties)
    encoder = choose_encoder(named or options.output_formatter, presentation, several=several, events=events)
    # In the LMI schema every token has its log-probability.
    logprobs = encoder.stream or presentation.details
    return Call((generation_request(values, sampling, logprobs, prompt=inputs),), encoder)


def _parse_chat(payload: dict[str, Any], options: Options, properties: Mapping[str, str], problems: Problems) -> Call:
    messages = read_messages(payload["messages"], problems)
    values = CHAT_FIELDS.read(payload, problems, "field")
    values.setdefault("do_sample", True)
    sampling = read_sampling(values, problems)
    stream: bool = values.get("stream", False)
    if stream:
        refuse_ranked_stream(sampling, "num_beams", problems)
    stream_options = values.get("stream_options", {})
    presentation = Presentation(
        stream=stream,
        details=True,
        tgi_compat=options.tgi_compat,
        n=sampling.n,
        logprobs=values.get("logprobs", False),
        include_usage=stream_options.get("include_usage") is True,
    )
    name = values.get("output_formatter")
    events = None if name else prefers_events(properties)
    if name is None and options.output_formatter in _CHAT_FORMATTERS:
        name = options.output_formatter
    if name not in FORMATTERS:
        if name is not None:
            _logger.warning("Unsupported output formatter: %s; using the default", show(name))
        name = "jsonlines_chat" if stream else "json_chat"
    encoder = choose_encoder(name, presentation, several=sampling.n > 1, events=events)
    logprobs = presentation.logprobs or name in ("json", "jsonlines", "sse")
    return Call((generation_request(values, sampling, logprobs, messages=messages),), encoder)


def _parse_bedrock(
    payload: dict[str, Any], options: Options, properties: Mapping[str, str], problems: Problems
) -> Call:
    prompt = _read_prompt(payload, "prompt", problems)
    values = BEDROCK_FIELDS.read(payload, problems, "field")
    values = {"temperature": 0.5, "top_p": 0.9, "do_sample": True, "default_new_tokens": _BEDROCK_NEW_TOKENS} | values
    stream = properties.get("x-amzn-sagemaker-forwarded-api") == "InvokeEndpointWithResponseStream"
    encoder = choose_encoder("3p_stream" if stream else "3p", Presentation(return_full_text=True))
    sampling = read_sampling(values, problems)
    return Call((generation_request(values, sampling, False, prompt=prompt),), encoder)


def _read_prompt(payload: dict[str, Any], name: str, problems: Problems) -> str:
    prompt = payload.get(name)
    if prompt is None:
        problems.invalid.append(
            f"Invalid request payload. Request payload should be a json object specifying the '{name}' field. "
            f"Received payload {show(payload)}"
        )
    elif type(prompt) is not str:
        problems.invalid.append(
            f"Invalid request payload. The '{name}' field must be a string. Received {show(prompt)}"
            + (": send one request per prompt, they are batched here" if type(prompt) is list else "")
        )
    elif not prompt:
        problems.invalid.append(
            f"Invalid request payload. The '{name}' field does not contain any content. "
            f"Received payload {show(payload)}"
        )
    else:
        return prompt
    return ""
