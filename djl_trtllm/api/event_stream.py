"""Streams as SageMaker's runtime sends them, for clients that use this server in its place.

`invoke_endpoint_with_response_stream` of boto3 reads messages of AWS's event stream: the model's bytes are in the
events `PayloadPart`, an error in the stream is the exception `ModelStreamError` or `InternalStreamFailure` of
botocore's model of sagemaker-runtime.
"""

from __future__ import annotations

import logging
from binascii import crc32
from collections.abc import Mapping
from struct import pack

import orjson

from djl_trtllm.api.base import Call, Prompt, RawRequest, ResponseEncoder
from djl_trtllm.errors import GenerationError, RequestError, RequestTimeoutError
from djl_trtllm.request import OutputChunk

_logger = logging.getLogger(__name__)

CONTENT_TYPE = "application/vnd.amazon.eventstream"
_FORWARDED_API = "x-amzn-sagemaker-forwarded-api"
_ACCEPT = "x-amzn-sagemaker-accept"
_STRING = 7
_ENDS = {"application/jsonlines": b"\n", "text/event-stream": b"\n\n"}
"""What ends a line, or an event, in a stream of that type."""
_MOST_BYTES = 2**20
"""Of a part: botocore takes up to 16 MB, other clients less."""


def forwarded(request: RawRequest) -> RawRequest:
    """The request as SageMaker passes it on to the container."""
    properties = {**request.properties, _FORWARDED_API: "InvokeEndpointWithResponseStream"}
    # `Accept` is that of the event stream.
    properties["accept"] = properties.pop(_ACCEPT, "")
    return RawRequest(request.body, properties, request.path, request.parameters, request.query)


def event_stream(call: Call) -> Call:
    """The call with its response inside an event stream."""
    headers = (*call.headers, ("X-Amzn-SageMaker-Content-Type", call.encoder.content_type))
    return call._replace(encoder=EventStreamEncoder(call.encoder), headers=headers)


class EventStreamEncoder:
    """A `ResponseEncoder` that puts the bytes of another one into events, one for each of its lines or events.

    Behind SageMaker an event has what the model sent at once, nearly always one line. Some clients (litellm 1.106)
    parse each event as one JSON object, and lose those of an event with several.

    An error is in the stream as the other encoder writes it, if its format can, and then as an exception, so that
    boto3 raises it.
    """

    stream = True
    content_type = CONTENT_TYPE

    def __init__(self, encoder: ResponseEncoder) -> None:
        self._encoder = encoder
        self._end = _ENDS.get(encoder.content_type)
        self._begun = False
        self._failed = False

    @property
    def wants_prompt_tokens(self) -> bool:
        return self._encoder.wants_prompt_tokens

    def begin(self, prompt: Prompt) -> None:
        self._encoder.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        if self._failed:
            return b""
        try:
            data = self._parts(self._encoder.encode(chunk))
        except RequestError:
            raise
        except Exception as error:
            if not self._begun:
                raise
            _logger.exception("encoding a response failed")
            raise _Defect("Internal server error, see the server's log.") from error
        if chunk.finished is not None and chunk.finished.error is not None:
            data += self._exception(chunk.finished.error)
        return data

    def error(self, error: RequestError) -> bytes:
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

    def _exception(self, error: RequestError) -> bytes:
        self._failed = True
        kind, body = "ModelStreamError", {"Message": str(error)}
        if isinstance(error, _Defect):
            kind = "InternalStreamFailure"
        elif isinstance(error, RequestTimeoutError):
            body["ErrorCode"] = "ModelInvocationTimeExceeded"
        else:
            body["ErrorCode"] = "StreamBroken"
        headers = {":message-type": "exception", ":exception-type": kind, ":content-type": "application/json"}
        return message(orjson.dumps(body), encode_headers(headers))


class _Defect(GenerationError):
    """The other encoder failed."""


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Headers of a message, all of them strings."""
    return b"".join(
        pack("!B", len(name)) + name.encode() + pack("!BH", _STRING, len(value)) + value.encode()
        for name, value in headers.items()
    )


def message(payload: bytes, headers: bytes) -> bytes:
    """A message: lengths and their checksum, headers, payload, and the checksum of it all."""
    prelude = pack("!II", 16 + len(headers) + len(payload), len(headers))
    content = b"%b%b%b%b" % (prelude, pack("!I", crc32(prelude)), headers, payload)
    return content + pack("!I", crc32(content))


_PART = encode_headers(
    {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
)
