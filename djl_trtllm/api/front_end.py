"""The front ends that this server takes the place of: DJL Serving's and SageMaker's.

Requests bring SageMaker's custom attributes and ids as headers; errors and streams have the shapes that the clients of
each front end read.
"""

import contextlib
import logging
import re
from binascii import crc32
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from struct import pack

import orjson
from msgspec.structs import replace

from djl_trtllm import errors
from djl_trtllm.api.base import DEFECT, Call, Prompt, RawRequest, Reply, ResponseEncoder
from djl_trtllm.request import OutputChunk, new_id

CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
INFERENCE_ID = "x-amzn-sagemaker-inference-id"
REQUEST_ID = "x-request-id"

_EVENTS = "text/event-stream"
_LINES = frozenset({"application/jsonlines", "application/json-lines", "application/x-ndjson"})
_READS_EVENTS = ("hf_hub/", "openai/")
"""Parts of the User-Agent of huggingface_hub and of OpenAI's libraries, which read streams as events only."""

_LONGEST_KEPT = 512
"""The most characters of headers whose parsed meaning is cached for the next request with the same headers."""

_OF_THE_BODY = frozenset({"content-length", "content-encoding", "transfer-encoding", "inference-header-content-length"})
"""Headers that say how the body is sent. Only the client that sends it knows this: no attribute replaces them."""

_RETURNED = re.compile(r"[\x20-\x7e]{1,1024}")
"""Custom attributes that a response may carry: SageMaker takes 1024 characters of visible ASCII."""

_SECRET = frozenset({"authorization", "proxy-authorization", "x-api-key"})

_USABLE_ID = re.compile(r"[\x21-\x7e]{1,256}")
"""An id appears in logs and in a response header: printable ASCII without spaces, of limited length."""


def by_name(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers by lower-case name; the first of repeated headers is used."""
    found: dict[str, str] = {}
    for name, value in headers:
        found.setdefault(name.lower(), value)
    return found


def with_attributes(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Headers with SageMaker's custom attributes: `X-Amzn-SageMaker-Custom-Attributes: k=v;k2=v2` adds `k` and `k2`.

    A header overrides an attribute of the same name. A client can write any name into its attributes, also those of
    headers that a gateway removes: who the client is and what it may do is read from the headers alone.
    """
    given = headers.get(CUSTOM_ATTRIBUTES)
    return headers if given is None else {**custom_attributes(given), **headers}


def custom_attributes(value: str) -> dict[str, str]:
    """Parse `k=v;k2=v2` into a dictionary with lower-case keys; items without `=` are skipped, and those that
    would describe how the body is sent."""
    attributes: dict[str, str] = {}
    for item in value.split(";"):
        name, equals, content = item.partition("=")
        name = name.strip().lower()
        if equals and name and name not in _OF_THE_BODY:
            attributes[name] = content.strip()
    return attributes


def returned_attributes(properties: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The response header with the custom attributes of the request, by which callers find the request of a response.

    Attributes with an API key are left out.
    """
    if CUSTOM_ATTRIBUTES not in properties:
        return ()
    items = properties[CUSTOM_ATTRIBUTES].split(";")
    given = ";".join(item for item in items if item.partition("=")[0].strip().lower() not in _SECRET).strip()
    return ((CUSTOM_ATTRIBUTES, given),) if _RETURNED.fullmatch(given) else ()


def request_id(properties: Mapping[str, str], header: str = REQUEST_ID, shown: Callable[[str], str] = str) -> str:
    """The id from the client, else SageMaker's inference id, else a new one.

    `header` is the configured header's name. An id that is too long or not printable is not used, nor is one that is
    not `shown` in the log as it is.
    """
    for name in (header.lower(), INFERENCE_ID):
        given = properties.get(name, "").strip()
        if given and _USABLE_ID.fullmatch(given) and shown(given) == given:
            return given
    return new_id()


def from_hugging_face(properties: Mapping[str, str]) -> bool:
    """Whether the client is huggingface_hub, which expects TGI's names in what it reads."""
    return "hf_hub/" in properties.get("user-agent", "").lower()


def prefers_events(properties: Mapping[str, str]) -> bool | None:
    """Whether the client wants streams as server-sent events (True) or as lines (False); None if it does not say.

    `Accept` decides. Without either type in it, clients that read nothing but events get events: they send
    `Accept: */*` or `application/json`, and would skip every line of a stream without an error.
    """
    accept, agent = properties.get("accept", ""), properties.get("user-agent", "")
    # A client sends the same ones with each request. Long ones are not kept.
    reads = _events_preferred if len(accept) + len(agent) < _LONGEST_KEPT else _events_preferred.__wrapped__
    return reads(accept, agent)


@lru_cache(maxsize=256)
def _events_preferred(accept: str, agent: str) -> bool | None:
    best, found = 0.0, None
    for item in accept.lower().split(","):
        media_type, *parameters = (part.strip() for part in item.split(";"))
        quality = _quality(parameters)
        if (media_type == _EVENTS or media_type in _LINES) and quality > best:
            best, found = quality, media_type == _EVENTS
    if found is None and any(name in agent.lower() for name in _READS_EVENTS):
        return True
    return found


def _quality(parameters: Iterable[str]) -> float:
    """The `q` of a media type, 1 if there is none that is a number."""
    for parameter in parameters:
        if parameter.startswith("q="):
            with contextlib.suppress(ValueError):
                return float(parameter[2:])
    return 1.0


_TYPES = {
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    413: "RequestEntityTooLargeException",
    415: "UnsupportedMediaTypeException",
    503: "ServiceUnavailableException",
}


def front_end_error(
    status: int,
    message: str,
    djl_type: str | None = None,
    *,
    fields: dict[str, object] | None = None,
    headers: tuple[tuple[str, str], ...] = (),
) -> Reply:
    """The reply with this status. `djl_type` is DJL's exception name, by default that of the status.

    `fields` are further members of the body.
    """
    body: dict[str, object] = {
        "code": status,
        "type": djl_type or _TYPES.get(status, "BadRequestException"),
        "message": errors.clipped(message),
        **(fields or {}),
    }
    # As DJL prints it: indented, with a line end.
    encoded = orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    return Reply(status, "application/json", encoded, headers)


# Errors as SageMaker's runtime sends them, for clients that use this server in its place.
#
# boto3 raises `ModelError` by the type in a header. The fields are those of the shape `ModelError` in botocore's model
# of sagemaker-runtime, the message is worded as SageMaker words it.


_FAILED_DEPENDENCY = 424
_ERROR_TYPE = "x-amzn-errortype"


def endpoint_error(error: BaseException, reply: Reply) -> Reply:
    """The reply that SageMaker's client gets where others get `reply`.

    boto3 raises `ValidationError` for an endpoint that is not a model, and `ModelError` for all other errors. boto3
    sends POST only, so the reply to other methods stays.
    """
    if isinstance(error, errors.MethodNotAllowedError):
        return reply
    if isinstance(error, errors.UnknownModelError):
        return Reply.json({"Message": str(error)}, 400)._replace(headers=((_ERROR_TYPE, "ValidationError"),))
    content = reply.body.decode("utf-8", "replace").strip()
    side = "client" if reply.status < 500 else "server"
    body = {
        "Message": f'Received {side} error ({reply.status}) from primary with message "{content}"',
        "OriginalMessage": content,
        "OriginalStatusCode": reply.status,
    }
    answer = Reply.json(body, _FAILED_DEPENDENCY)
    return answer._replace(headers=(*reply.headers, (_ERROR_TYPE, "ModelError")))


# Streams as SageMaker's runtime sends them, for clients that use this server in its place.
#
# `invoke_endpoint_with_response_stream` of boto3 reads messages of AWS's event stream: the model's bytes are in the
# events `PayloadPart`, an error in the stream is the exception `ModelStreamError` or `InternalStreamFailure` of
# botocore's model of sagemaker-runtime.


_logger = logging.getLogger(__name__)

CONTENT_TYPE = "application/vnd.amazon.eventstream"
_FORWARDED_API = "x-amzn-sagemaker-forwarded-api"
_ACCEPT = "x-amzn-sagemaker-accept"
_STRING = 7
_ENDS = {"application/jsonlines": b"\n", "text/event-stream": b"\n\n"}
"""The bytes that end a line, or an event, in a stream of that type."""
_MOST_BYTES = 2**20
"""The most bytes of a part: botocore takes up to 16 MB, other clients take less."""


def forwarded(request: RawRequest) -> RawRequest:
    """The request as SageMaker passes it on to the container."""
    properties = {**request.properties, _FORWARDED_API: "InvokeEndpointWithResponseStream"}
    # `Accept` is that of the event stream.
    properties["accept"] = properties.pop(_ACCEPT, "")
    return replace(request, properties=properties)


def event_stream(call: Call) -> Call:
    """The call with its response inside an event stream."""
    headers = (*call.headers, ("X-Amzn-SageMaker-Content-Type", call.encoder.content_type))
    return replace(call, encoder=EventStreamEncoder(call.encoder), headers=headers)


class EventStreamEncoder(ResponseEncoder):
    """Puts the bytes of another encoder into SageMaker's events, one for each line or event.

    Behind SageMaker an event has what the model sent at once, nearly always one line. Some clients (litellm 1.106)
    parse each event as one JSON object, and lose those of an event with several.

    An error is in the stream as the other encoder writes it, if its format can, and then as an exception, so that
    boto3 raises it.
    """

    stream = True
    content_type = CONTENT_TYPE

    def __init__(self, encoder: ResponseEncoder) -> None:
        self._encoder = encoder
        self.wants_prompt_tokens = encoder.wants_prompt_tokens
        self._end = _ENDS.get(encoder.content_type)
        self._begun = False
        self._failed = False

    def begin(self, prompt: Prompt) -> None:
        self._encoder.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        if self._failed:
            return b""
        try:
            data = self._parts(self._encoder.encode(chunk))
        except errors.RequestError:
            raise
        except Exception as error:
            if not self._begun:
                raise
            _logger.exception("encoding a response failed")
            raise _Defect(DEFECT) from error
        if chunk.finished is not None and chunk.finished.error is not None:
            data += self._exception(chunk.finished.error)
        return data

    def error(self, error: errors.RequestError) -> bytes:
        return self._parts(b"" if isinstance(error, _Defect) else self._encoder.error(error)) + self._exception(error)

    def _parts(self, data: bytes) -> bytes:
        self._begun |= bool(data)
        parts = self._split(data)
        slices = (part[at : at + _MOST_BYTES] for part in parts for at in range(0, len(part), _MOST_BYTES))
        return b"".join([message(piece, _PART) for piece in slices])

    def _split(self, data: bytes) -> list[bytes]:
        """The lines or events."""
        if self._end is None:
            return [data]
        *whole, rest = data.split(self._end)
        return [*(part + self._end for part in whole), rest]

    def _exception(self, error: errors.RequestError) -> bytes:
        self._failed = True
        kind, body = "ModelStreamError", {"Message": str(error)}
        if isinstance(error, _Defect):
            kind = "InternalStreamFailure"
        elif isinstance(error, errors.RequestTimeoutError):
            body["ErrorCode"] = "ModelInvocationTimeExceeded"
        else:
            body["ErrorCode"] = "StreamBroken"
        headers = {":message-type": "exception", ":exception-type": kind, ":content-type": "application/json"}
        return message(orjson.dumps(body), encode_headers(headers))


class _Defect(errors.GenerationError):
    """A defect of the server: the other encoder raised an exception that is not a RequestError."""


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Headers of a message, all of them strings."""
    return b"".join(
        pack("!B", len(name)) + name.encode() + pack("!BH", _STRING, len(value)) + value.encode()
        for name, value in headers.items()
    )


def message(payload: bytes, headers: bytes) -> bytes:
    """A message of the event stream: lengths and their checksum, headers, payload, and a checksum of it all."""
    prelude = pack("!II", 16 + len(headers) + len(payload), len(headers))
    content = b"%b%b%b%b" % (prelude, pack("!I", crc32(prelude)), headers, payload)
    return content + pack("!I", crc32(content))


_PART = encode_headers(
    {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
)
