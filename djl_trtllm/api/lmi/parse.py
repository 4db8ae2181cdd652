"""Parses LMI's requests: `{"inputs", "parameters", "stream"}`, `{"messages", ...}`, and Bedrock's (`bedrock_compat`).

Where DJL's documents leave it open, or DJL differs by version:

- Sampling: `do_sample` decides if it is given. Otherwise a request samples if it sets `temperature` (not 0, not 1),
  `top_k` (above 1) or `top_p` (below 1), as in LMI from 0.32 on; a seed alone does not. Chat samples unless its
  temperature is 0. A temperature of 0 is greedy, even if `do_sample` is true.
- `max_new_tokens` is 30 if `inputs` does not set it, as documented. Chat without `max_tokens` gets as much as fits
  (`max_new_tokens` 0 in the request): a chat needs whole answers.
- `best_of` sequences (by default `n`) are generated and `n` returned. `best_of` alone returns one sequence, or with
  `tgi_compat` all, as TGI does.
- Every parameter has its effect or is refused by name, unless its value changes nothing. Types are JSON's, strictly.
- The encoder: `parameters.output_formatter`, else the option, else `json`, or for streams `jsonlines` (`sse` with
  `tgi_compat`). Chat: `json_chat` or `jsonlines_chat`, unless the request or the option names another *chat*
  formatter. An unknown name is logged and ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import orjson
from msgspec.structs import replace

from djl_trtllm.api.base import Call, ResponseEncoder
from djl_trtllm.api.lmi.bedrock import BedrockEncoder, BedrockStreamEncoder
from djl_trtllm.api.lmi.chat_encoders import ChatEncoder, ChatStreamEncoder
from djl_trtllm.api.lmi.encoders import JsonEncoder, JsonLinesEncoder, PlainTextEncoder
from djl_trtllm.api.lmi.parameters import BEDROCK_FIELDS, CHAT_FIELDS, INPUTS_FIELDS, INPUTS_PARAMETERS
from djl_trtllm.api.lmi.presentation import Presentation
from djl_trtllm.api.messages import read_messages
from djl_trtllm.api.parameters import Problems, show
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.request import GenerationRequest, Sampling

_logger = logging.getLogger(__name__)

PREFIX = "Input Parsing failed. Ensure that the request payload is valid. "
ACCEPTED = "application/json or text/plain"
AS_MUCH_AS_FITS = 0
"""`Sampling.max_new_tokens`: up to the model's limit. Not a value that a client can send."""

_DEFAULT_NEW_TOKENS = 30
_MOST_SEQUENCES = 16
"""Of one request."""
_NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})
_NO_TYPE = frozenset({"", "application/octet-stream", "binary/octet-stream"})
"""What boto3 and others send if the caller sets no type."""

_SAMPLING_FIELDS = frozenset(Sampling.__struct_fields__)


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
            return orjson.loads(body)
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
    options: Options = Options(),  # noqa: B008
    properties: Mapping[str, str] = _NO_PROPERTIES,
) -> Call:
    """`parse` from the decoded payload on."""
    problems = Problems()
    if type(payload) is not dict:
        problems.invalid.append(
            "Invalid request payload. Request payload should be a json object specifying the 'inputs' field. "
            f"Received payload {show(payload)}"
        )
        problems.raise_any(PREFIX)
    if "messages" in payload:
        call = _parse_chat(payload, options, problems)
    elif options.bedrock_compat:
        call = _parse_bedrock(payload, options, properties, problems)
    else:
        call = _parse_inputs(payload, options, problems)
    problems.raise_any(PREFIX)
    adapter = properties.get("x-amzn-sagemaker-adapter-identifier")
    (request,) = call.requests
    if adapter and request.adapter is None:
        return Call((replace(request, adapter=adapter),), call.encoder)
    return call


def choose_encoder(name: str | None, presentation: Presentation, *, several: bool = False) -> ResponseEncoder:
    """The encoder for an `output_formatter` name. `several`: more than one sequence is generated, whatever `n` is."""
    if name is not None and name not in FORMATTERS:
        _logger.warning("Unsupported output formatter: %s; using the default", show(name))
        name = None
    if name is None:
        name = "json" if not presentation.stream else "sse" if presentation.tgi_compat else "jsonlines"
    if several and name in _SINGLE:
        name = "json"
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
_SINGLE = ("jsonlines", "sse", "3p", "3p_stream")
"""Formats for a single sequence."""


def _parse_inputs(payload: dict[str, Any], options: Options, problems: Problems) -> Call:
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
    values.setdefault("max_new_tokens", _DEFAULT_NEW_TOKENS)
    if options.tgi_compat and "n" not in values and "best_of" in values:
        values["n"] = values["best_of"]
    sampling = _read_sampling(values, options, problems, ranked=True)
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
        tgi_compat=options.tgi_compat,
        n=sampling.n,
    )
    encoder = choose_encoder(values.get("output_formatter", options.output_formatter), presentation, several=several)
    # In the LMI schema every token has its log-probability.
    logprobs = encoder.stream or presentation.details
    return Call((_request(values, sampling, logprobs, prompt=inputs),), encoder)


def _parse_chat(payload: dict[str, Any], options: Options, problems: Problems) -> Call:
    messages = read_messages(payload["messages"], problems)
    values = CHAT_FIELDS.read(payload, problems, "field")
    values.setdefault("max_new_tokens", AS_MUCH_AS_FITS)
    values.setdefault("do_sample", True)
    sampling = _read_sampling(values, options, problems)
    stream: bool = values.get("stream", False)
    if stream and sampling.sequences > sampling.n:
        problems.invalid.append(
            f"'best_of' or 'num_beams' is {sampling.sequences}, 'n' {sampling.n} and 'stream' true: which sequences "
            "are the best is known only at the end, expected 'best_of' to be 'n' and no beams in a stream"
        )
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
    if name is None and options.output_formatter in _CHAT_FORMATTERS:
        name = options.output_formatter
    if name not in FORMATTERS:
        if name is not None:
            _logger.warning("Unsupported output formatter: %s; using the default", show(name))
        name = "jsonlines_chat" if stream else "json_chat"
    encoder = choose_encoder(name, presentation, several=sampling.n > 1)
    logprobs = presentation.logprobs or name in ("json", "jsonlines", "sse")
    return Call((_request(values, sampling, logprobs, messages=messages),), encoder)


def _parse_bedrock(
    payload: dict[str, Any], options: Options, properties: Mapping[str, str], problems: Problems
) -> Call:
    prompt = _read_prompt(payload, "prompt", problems)
    values = BEDROCK_FIELDS.read(payload, problems, "field")
    values = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 512, "do_sample": True} | values
    stream = properties.get("x-amzn-sagemaker-forwarded-api") == "InvokeEndpointWithResponseStream"
    encoder = choose_encoder("3p_stream" if stream else "3p", Presentation(return_full_text=True))
    sampling = _read_sampling(values, options, problems)
    return Call((_request(values, sampling, False, prompt=prompt),), encoder)


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


def _read_sampling(values: dict[str, Any], options: Options, problems: Problems, *, ranked: bool = False) -> Sampling:
    chosen = {name: value for name, value in values.items() if name in _SAMPLING_FIELDS}
    if "do_sample" not in chosen:
        chosen["do_sample"] = (
            chosen.get("temperature", 1.0) != 1.0 or chosen.get("top_k", 0) > 1 or chosen.get("top_p", 1.0) < 1.0
        )
    if chosen.get("temperature") == 0:
        # At temperature 0, sampling always takes the most likely token.
        del chosen["temperature"]
        chosen["do_sample"] = False
    n = chosen.setdefault("n", 1)
    beams = chosen.get("beam_width", 1)
    if beams > 1 and chosen.get("best_of", beams) != beams:
        problems.invalid.append(f"'num_beams' is {beams} and 'best_of' {chosen['best_of']}: give one of them")
    if beams > 1:
        chosen["do_sample"] = False
    best_of = beams if beams > 1 else chosen.get("best_of", n)
    if best_of < n:
        problems.invalid.append(f"'best_of' is {best_of}: expected at least 'n', which is {n}")
    if max(n, best_of) > _MOST_SEQUENCES:
        name = "n" if n == max(n, best_of) and "n" in values else "num_beams" if beams > 1 else "best_of"
        problems.invalid.append(f"'{name}' is {max(n, best_of)}: expected at most {_MOST_SEQUENCES}")
        n = best_of = beams = chosen["n"] = chosen["beam_width"] = 1  # the encoder of a refused request stays small
    # Ranked only if the response shows it: LMI's has the best apart, a chat's has all in the order of their index.
    chosen["best_of"] = best_of if beams == 1 and (best_of > n or (ranked and n > 1)) else None
    sampling = Sampling(**chosen)
    if 0 < sampling.max_new_tokens < sampling.min_new_tokens:
        problems.invalid.append(
            f"the least number of new tokens is {sampling.min_new_tokens}: expected at most 'max_new_tokens', "
            f"which is {sampling.max_new_tokens}"
        )
    return sampling


def _request(
    values: dict[str, Any],
    sampling: Sampling,
    logprobs: bool,
    *,
    prompt: str | None = None,
    messages: list[dict[str, Any]] | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt,
        messages=messages,
        sampling=sampling,
        stop=values.get("stop", ()),
        stop_token_ids=values.get("stop_token_ids", ()),
        logprobs=logprobs,
        asks_logprobs=values.get("details", False),
        needs_logprobs=values.get("logprobs", False) or sampling.best_of is not None,
        truncate=values.get("truncate"),
        bad=values.get("bad", ()),
        guide=values.get("guide"),
        adapter=values.get("adapter"),
    )
