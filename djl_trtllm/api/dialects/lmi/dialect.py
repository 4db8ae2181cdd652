"""LMI as a dialect: the tables of parameters (DJL's, and those of TGI and vLLM that clients send), parsing, and errors.

Targets are the field names of `Sampling`, `GenerationRequest` and `Presentation`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from msgspec.structs import replace

from djl_trtllm import errors
from djl_trtllm.api import base, parameters as kinds, sampling as shared, texts
from djl_trtllm.api.base import read_json
from djl_trtllm.api.dialects.lmi import responses
from djl_trtllm.api.front_end import event_stream, forwarded, from_hugging_face, front_end_error, prefers_events
from djl_trtllm.api.openapi import any_of, read_operations
from djl_trtllm.api.parameters import IGNORED, Parameter, Problems, Table, show
from djl_trtllm.api.pooling import TEXTS, VectorsEncoder, pooled
from djl_trtllm.api.texts import Presentation
from djl_trtllm.config import Options, Task
from djl_trtllm.config.options.choices import UnknownParameters


class Body(NamedTuple):
    """A row that recognises a body: the body has `member`, and the header or member `mark`, if that is given.

    Such a body is parsed as that of `path` of `dialect`, or if that is None, as the address's own. The first row that
    fits is used, so a row with a `mark` stands before one without. A row is for models of one `task`.
    """

    member: str
    dialect: base.Dialect | None = None
    path: str = ""
    mark: str = ""
    task: Task = Task.GENERATE

    def is_marked(self, payload: Mapping[str, Any], properties: Mapping[str, str]) -> bool:
        return not self.mark or self.mark in properties or self.mark in payload


def find_body(
    bodies: Sequence[Body], payload: Mapping[str, Any], properties: Mapping[str, str], task: Task
) -> Body | None:
    """The row that a payload to a model of this task fits, None if it has none of the members of any row.

    Raises InvalidRequestError for several of them, and for members of other tasks alone.
    """
    given = [body for body in bodies if payload.get(body.member) is not None]
    found = [body for body in given if body.task is task and body.is_marked(payload, properties)]
    if given and not found:
        named = " or ".join(dict.fromkeys(f"'{body.member}'" for body in bodies if body.task is task))
        raise errors.InvalidRequestError(
            f"the body has '{given[0].member}', and this model is for option.task={task}: expected {named}"
        )
    if len(found) > 1 and len(members := list(dict.fromkeys([f"'{body.member}'" for body in found]))) > 1:
        raise errors.InvalidRequestError(
            f"the body has {' and '.join(members)}: expected one of them, which are bodies of different APIs"
        )
    return found[0] if found else None


_FORMATTER = (Parameter(("output_formatter",), kinds.TEXT, "output_formatter"),)
# litellm sends the address that its requests go to along with their parameters.
_LITELLM = (Parameter(("sagemaker_base_url",), target=IGNORED),)

INPUTS_PARAMETERS = Table(
    shared.SAMPLING,
    _FORMATTER,
    _LITELLM,
    shared.ADAPTER,
    shared.NOT_HONOURED,
    texts.PARAMETERS,
    (Parameter(("logprobs",), neutral=(0, 1, True, False), advice="only the chosen token's is available"),),
    elsewhere=dict.fromkeys(("inputs", "stream", "messages"), "beside 'parameters', not in it"),
)
"""`parameters` of `{"inputs", "parameters", "stream"}`."""

BESIDE_FIELDS = Table(_FORMATTER, _LITELLM)
"""The members that LMI adds to bodies of other APIs, which its paths take too."""

INPUTS_FIELDS = Table(
    shared.NOT_HONOURED,
    shared.ADAPTER,
    (
        Parameter(("inputs",), kinds.PROMPT, IGNORED),
        Parameter(("parameters",), INPUTS_PARAMETERS.kind, IGNORED),
        Parameter(("stream",), kinds.BOOLEAN, "stream"),
        Parameter(("model",), target=IGNORED),
        # Clients of Hugging Face's hosted inference API send it to every server.
        Parameter(("options",), target=IGNORED),
    ),
    elsewhere=dict.fromkeys(INPUTS_PARAMETERS.rows, "in 'parameters'")
    | dict.fromkeys(("max_tokens", "max_completion_tokens"), "in 'parameters', where it is 'max_new_tokens'")
    | {"prompt": "in 'inputs'"},
    required=("inputs",),
)
"""Top level of `{"inputs", "parameters", "stream"}`."""

VECTOR_FIELDS = Table(
    (
        Parameter(("inputs",), TEXTS, "texts"),
        Parameter(("parameters",), neutral=({},), advice="embeddings have none"),
        Parameter(("model",), kinds.TEXT, IGNORED),
    ),
    required=("inputs",),
)
"""`{"inputs": text or texts}` to a model that embeds, as DJL's `TextEmbeddingServingTranslator` has it."""

_logger = logging.getLogger(__name__)

PREFIX = "Input Parsing failed. Ensure that the request payload is valid. "
ACCEPTED = "application/json or text/plain"
_DEFAULT_NEW_TOKENS = 30
_NO_TYPE = frozenset({"", "application/octet-stream", "binary/octet-stream"})
"""The content types that boto3 and others send if the caller sets none."""


def decode(body: bytes, content_type: str | None) -> Any:
    """The payload in a body: JSON, or the prompt itself as plain text."""
    media_type, _, rest = (content_type or "").partition(";")
    media_type = media_type.strip().lower()
    if media_type in _NO_TYPE or media_type.endswith(("/json", "+json", "/jsonlines")):
        if not body.strip():
            raise errors.InvalidRequestError(
                f"{PREFIX}Invalid request payload. The 'inputs' field does not contain any content: the body is empty"
            )
        try:
            return read_json(body)
        except orjson.JSONDecodeError as error:
            raise errors.InvalidRequestError(
                f"{PREFIX}Invalid request payload. The body is not valid JSON: {base.why_no_json(body, error)}. "
                f"Received {show(body[:100].decode(errors='replace'))}"
            ) from None
    if media_type == "text/plain":
        charset = rest.lower().partition("charset=")[2].strip(" \"'") or "utf-8"
        if charset not in ("utf-8", "utf8", "us-ascii", "ascii"):
            raise errors.InvalidRequestError(f"{PREFIX}Invalid request payload. Charset {show(charset)} is not utf-8")
        try:
            return {"inputs": body.decode()}
        except UnicodeDecodeError as error:
            raise errors.InvalidRequestError(
                f"{PREFIX}Invalid request payload. The text is not UTF-8: {error}"
            ) from None
    hint = ""
    if media_type == "application/x-www-form-urlencoded":
        hint = " (curl -d sends this type by itself: add -H 'Content-Type: application/json')"
    raise errors.InvalidRequestError(
        f"{PREFIX}Invalid request payload. Content type {show(media_type)} is not accepted{hint}: expected {ACCEPTED}"
    )


def parse_payload(
    payload: Any,
    options: Options = Options(),  # noqa: B008  immutable
    properties: Mapping[str, str] = MappingProxyType({}),
) -> base.Call:
    """Read a decoded payload of LMI's own schema. `properties` are the headers and custom attributes of the request.

    See `Dialect.parse` for what it raises.
    """
    problems = Problems.of(options)
    require_object(payload)
    call = _parse_inputs(payload, options, properties, problems)
    problems.raise_any(PREFIX)
    return replace(call, headers=problems.headers) if problems.headers else call


def require_object(payload: Any) -> None:
    """Raise InvalidRequestError for a payload that is no object."""
    if type(payload) is not dict:
        raise errors.InvalidRequestError(
            f"{PREFIX}Invalid request payload. Request payload should be a json object specifying the 'inputs' field. "
            f"Received payload {show(payload)}"
        )


def choose_encoder(
    name: str | None, presentation: Presentation, *, several: bool = False, events: bool | None = None
) -> base.ResponseEncoder:
    """The encoder for an `output_formatter` name. `several`: more than one sequence is generated, whatever `n` is.

    `events` chooses between lines and events, whichever `name` means.
    """
    found = _CHAT.get(name or "", name)
    if found is not None and found not in FORMATTERS:
        _warn_of_unknown(found)
    if found is None or found not in FORMATTERS:
        found = "json" if not presentation.stream else "sse" if presentation.tgi_compat else "jsonlines"
    if several and found in _SINGLE:
        found = "json"
    if events is not None:
        found = (_EVENTS if events else _LINES).get(found, found)
    return FORMATTERS[found](presentation)


@cache
def _warn_of_unknown(name: str) -> None:
    """Log once that `option.output_formatter` names no formatter of LMI; a model's own is not chosen by its name."""
    _logger.warning(
        "option.output_formatter=%s is not known, and the default is used: expected one of %s, or leave it out",
        show(name),
        ", ".join(FORMATTERS),
    )


def _requested_formatter(values: Mapping[str, Any], problems: Problems) -> str | None:
    """The name of `FORMATTERS` that a request names. None without one, and for an unknown one, which is a problem."""
    name: str | None = values.get("output_formatter")
    known = _CHAT.get(name or "", name)
    if known is None or known in FORMATTERS:
        return known
    if problems.unknown is UnknownParameters.REFUSE:
        problems.invalid.append(f"'output_formatter' is {show(name)}: expected one of {', '.join(FORMATTERS)}")
    else:
        problems.ignore(f"output_formatter={name}", "value")
    return None


FORMATTERS: dict[str, Callable[[Presentation], base.ResponseEncoder]] = {
    "json": responses.JsonEncoder,
    "jsonlines": lambda presentation: responses.JsonLinesEncoder(presentation, sse=False),
    "sse": lambda presentation: responses.JsonLinesEncoder(presentation, sse=True),
    "none": responses.plain_encoder,
}
"""The encoder for each `output_formatter`."""

_CHAT = {f"{name}_chat": name for name in ("json", "jsonlines", "sse")}
"""DJL's names of formatters for chats, which have OpenAI's form here: a name chooses lines or events."""
_EVENTS = {"jsonlines": "sse"}
_LINES = {"sse": "jsonlines"}
_SINGLE = ("jsonlines", "sse")
"""Formats for a single sequence."""


def _parse_inputs(
    payload: dict[str, Any], options: Options, properties: Mapping[str, str], problems: Problems
) -> base.Call:
    inputs = _read_prompt(payload, problems)
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
    sampling = shared.read_sampling(values, problems, ranked=True)
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
    named = _requested_formatter(values, problems)
    events = None if named else prefers_events(properties)
    encoder = choose_encoder(named or options.output_formatter, presentation, several=several, events=events)
    # In the LMI schema every token has its log-probability.
    logprobs = encoder.stream or presentation.details
    return base.Call((shared.generation_request(values, sampling, logprobs, prompt=inputs),), encoder)


def _read_prompt(payload: dict[str, Any], problems: Problems) -> str:
    prompt = payload.get("inputs")
    if prompt is None:
        problems.invalid.append(
            "Invalid request payload. Request payload should be a json object specifying the 'inputs' field. "
            f"Received payload {show(payload)}"
        )
    elif type(prompt) is not str:
        problems.invalid.append(
            f"Invalid request payload. The 'inputs' field must be a string. Received {show(prompt)}"
            + (": send a list of texts, or token ids, as 'prompt'" if type(prompt) is list else "")
        )
    elif not prompt:
        problems.invalid.append(
            "Invalid request payload. The 'inputs' field does not contain any content. "
            f"Received payload {show(payload)}"
        )
    else:
        return prompt
    return ""


_DJL_ERRORS: dict[type[errors.RequestError], str | None] = {
    errors.AuthenticationError: "UnauthorizedException",
    errors.ForbiddenError: "ForbiddenException",
    errors.UnknownModelError: "ResourceNotFoundException",
    errors.UnknownPathError: "ResourceNotFoundException",
    errors.MethodNotAllowedError: "MethodNotAllowedException",
    errors.RequestTooLargeError: "RequestEntityTooLargeException",
    errors.OverloadedError: "WlmCapacityException",
    errors.TooManyRequestsError: "TooManyRequestsException",
    errors.NotReadyError: "WlmException",
    errors.RequestTimeoutError: "TranslateException",
    errors.GenerationError: None,
}
"""The names of errors in DJL's front end. Errors with None, or without a row, have the handler's body."""

_INVOCATIONS = "/endpoints/{endpoint}/invocations"
_RESPONSE_STREAM = "/endpoints/{endpoint}/invocations-response-stream"
_JSON = "application/json"
_VARIANT = ("x-Amzn-Invoked-Production-Variant", "AllTraffic")
"""The header that SageMaker's runtime adds to the container's response."""


class Lmi(base.Dialect):
    """The API of the DJL containers, `{"inputs", "parameters", "stream"}`; its paths also take the other `bodies`.

    Where DJL's documents leave it open, or DJL differs by version:

    - Sampling: `do_sample` decides if it is given. Otherwise a request samples if it sets `temperature` (not 0, not 1),
      `top_k` (above 1) or `top_p` (below 1), as in LMI from 0.32 on; a seed alone does not. A temperature of 0 is
      greedy, even if `do_sample` is true.
    - Without `max_new_tokens`, `inputs` gets 30 tokens, as documented.
    - `best_of` sequences (by default `n`) are generated and `n` returned. `best_of` alone returns one sequence, or with
      `tgi_compat` all, as TGI does.
    - Every parameter has its effect or is refused by name, unless its value changes nothing. Types are JSON's,
      strictly.
    - The encoder: `parameters.output_formatter`, else the option, else `json`, or for streams `jsonlines` (`sse` with
      `tgi_compat`). An unknown name is logged and ignored. Where the request does not name one, its `Accept` decides
      between lines and events (`front_end.prefers_events`).
    - `prompt` and `messages` are OpenAI's completions and chat, as in LMI's async mode (djl_python 0.33 and later),
      which identifies bodies by their members (`BODIES` in `api/registry.py`) and sends streams as lines. A formatter's
      name says there whether a stream is in lines or events.
    """

    title = "LMI"
    paths = ("/invocations", "/predictions/{model}", "/models/{model}/invoke", _INVOCATIONS, _RESPONSE_STREAM)
    sagemaker = True
    formatters_file = "model.py"
    # DJL's statuses, odd ones included; its options can change them.
    statuses = MappingProxyType(
        {
            errors.InvalidRequestError: 424,
            errors.SessionError: 400,
            errors.RequestTimeoutError: "timeout_http_code",
            errors.GenerationError: 424,
        }
    )

    def __init__(self, bodies: tuple[Body, ...]) -> None:
        self._bodies = bodies
        others = {body.path: body.dialect for body in bodies if body.dialect is not None}
        tables = (table for path, dialect in others.items() for table in dialect.tables[path])
        self.tables = dict.fromkeys(self.paths, (INPUTS_FIELDS, *tables, VECTOR_FIELDS))
        whole = [dialect.descriptions[path].responses[_JSON] for path, dialect in others.items()]
        self.descriptions = {
            path: own._replace(responses={**own.responses, _JSON: any_of(own.responses[_JSON], *whole)})
            if _JSON in own.responses
            else own
            for path, own in read_operations("lmi.toml").items()
        }

    def formatters(self, model_dir: Path, attributes: Mapping[str, Any]) -> base.RequestParser | None:
        from djl_trtllm.api.dialects.lmi.custom import load_custom  # it parses by the functions above

        return load_custom(model_dir, self.read, attributes)

    def parse(self, request: base.RawRequest, model: base.ModelContext) -> base.Call:
        """See `Dialect`. The formatters of the model's own `model.py` come first."""
        streamed = request.path == _RESPONSE_STREAM
        inner = forwarded(request) if streamed else request
        if model.custom is not None:
            call = model.custom.parse(inner, model)
        else:
            call = self.read(decode(inner.body, inner.content_type), inner, model)
        if streamed:
            call = event_stream(call)
        if request.path in (_INVOCATIONS, _RESPONSE_STREAM):
            call = replace(call, headers=(*call.headers, _VARIANT))
        return call

    def read(self, payload: Any, request: base.RawRequest, model: base.ModelContext) -> base.Call:
        """Read a decoded payload as the kind of body that its members say. Raises what `parse` raises."""
        require_object(payload)
        with _Prefixed():
            task = Task.GENERATE if model.options.task is Task.AUTO else model.options.task
            body = find_body(self._bodies, payload, request.properties, task)
        if task is Task.EMBED and body is not None and body.dialect is None:
            with _Prefixed():
                call = _parse_texts(payload, model)
        elif body is None and task is Task.SCORE:
            raise errors.InvalidRequestError(
                f"{PREFIX}Received payload {show(payload)}: expected 'query' with 'documents' or 'texts', or 'text_1' "
                "with 'text_2'"
            )
        elif body is None or body.dialect is None:
            call = parse_payload(payload, model.options, request.properties)
        else:
            call = _of_other(body.dialect, body.path, payload, request, model)
        adapter = request.properties.get("x-amzn-sagemaker-adapter-identifier")
        if adapter:
            adapted = (each if each.adapter else replace(each, adapter=adapter) for each in call.requests)
            call = replace(call, requests=tuple(adapted))
        return call

    def encode_error(self, error: BaseException, options: Options) -> base.Reply:
        """Errors of a request itself have the handler's body, `{"error", "code"}`.

        Those of the server's state have the body of DJL's front end, with its exceptions as types.
        """
        status = self.status(error, options)
        if not isinstance(error, errors.RequestError):
            return front_end_error(status, base.DEFECT, "InternalServerException")
        if isinstance(error, errors.UnknownModelError) and error.name is None:
            return front_end_error(400, str(error))
        djl_type = base.nearest_row(_DJL_ERRORS, error)
        if djl_type is None:
            return base.Reply.json({"error": str(error), "code": status}, status)
        fields: dict[str, object] = {}
        if isinstance(error, errors.OverloadedError):
            fields = {"queue_depth": error.queue_depth, "queue_capacity": error.capacity}
        return front_end_error(status, str(error), djl_type, fields=fields, headers=base.error_headers(error))


class _Prefixed:
    """A block in which errors of bodies of other APIs get the beginning that LMI's own have."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, errors.InvalidRequestError):
            error.args = (f"{PREFIX}{error}",)


def _parse_texts(payload: Mapping[str, Any], model: base.ModelContext) -> base.Call:
    problems = Problems.of(model.options)
    values = VECTOR_FIELDS.read(payload, problems, "field")
    requests = pooled("embed", values.get("texts", ()), values, model, problems)
    encoder = VectorsEncoder(len(requests), single=type(payload["inputs"]) is str)
    return base.Call(requests, encoder, problems.headers)


def _of_other(
    dialect: base.Dialect, path: str, payload: dict[str, Any], request: base.RawRequest, model: base.ModelContext
) -> base.Call:
    """The call of another API's body, whose stream is in lines unless the request or the option wants events."""
    problems = Problems.of(model.options)
    beside = BESIDE_FIELDS.read(
        {name: value for name, value in payload.items() if name in BESIDE_FIELDS.rows}, problems, "field"
    )
    named = _requested_formatter(beside, problems)
    if named == "none":  # it has no place for several kinds of output, such as tool calls
        problems.unsupported.append(f"'output_formatter' is {show(named)}: it has a place for 'inputs' only")
    problems.raise_any(PREFIX)
    rest = {name: value for name, value in payload.items() if name not in BESIDE_FIELDS.rows}
    with _Prefixed():
        call = dialect.parse(request.as_body(path, rest), model)
    call = replace(call, headers=(*call.headers, *problems.headers))
    option = model.options.output_formatter
    events = (named or _CHAT.get(option or "", option)) == "sse"
    if not named and (preferred := prefers_events(request.properties)) is not None:
        events = preferred
    return replace(call, encoder=responses.LinesEncoder(call.encoder)) if call.encoder.stream and not events else call
