"""Request bodies over HTTP: compressed ones are unpacked within a bound, JSON is read whatever the content type."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

import orjson

from djl_trtllm.api.base import RawRequest
from djl_trtllm.api.json_body import read_json
from djl_trtllm.api.parameters import show
from djl_trtllm.errors import InvalidRequestError, RequestTooLargeError

_GZIP_OR_ZLIB = 47
"""zlib's `wbits` for either, told apart by their first bytes."""
_FASTEST = 1


def read_body(request: RawRequest, limit: int) -> bytes:
    """The body without its Content-Encoding, at most `limit` bytes of it.

    Raises InvalidRequestError and RequestTooLargeError.
    """
    encoding = request.properties.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return request.body
    if encoding not in ("gzip", "deflate"):
        raise InvalidRequestError(f"the content-encoding is {show(encoding)}: expected 'gzip', 'deflate' or 'identity'")
    unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        body = unpacker.decompress(request.body, limit + 1)
    except zlib.error as error:
        raise InvalidRequestError(f"the body is not valid {encoding}: {error}") from None
    if len(body) > limit:
        raise RequestTooLargeError(f"the unpacked request body is larger than max_request_size={limit} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidRequestError(f"the body is not valid {encoding}: it has no end, or more after it")
    return body


def read_object(data: bytes, what: str = "the body") -> dict[str, Any]:
    """JSON that is an object. Raises InvalidRequestError."""
    try:
        value = read_json(data)
    except orjson.JSONDecodeError as error:
        shown = data[:80].decode(errors="replace")
        raise InvalidRequestError(f"{what} is not valid JSON: {error}. Received {shown!r}") from None
    if type(value) is not dict:
        raise InvalidRequestError(f"{what} is {show(value)}: expected a JSON object")
    return value


def read_parameters(given: dict[str, Any]) -> dict[str, Any]:
    """The member `parameters`, an object. Raises InvalidRequestError."""
    parameters = given.get("parameters")
    if parameters is None:
        return {}
    if type(parameters) is not dict:
        raise InvalidRequestError(f"'parameters' is {show(parameters)}: expected an object")
    return parameters


def read_id(given: dict[str, Any]) -> str:
    """The member `id`, "" without one. Raises InvalidRequestError."""
    identifier = given.get("id")
    if identifier is not None and type(identifier) is not str:
        raise InvalidRequestError(f"'id' is {show(identifier)}: expected a string")
    return identifier or ""


def accepted_encoding(request: RawRequest) -> str:
    """How the client wants its response compressed: `gzip`, `deflate` or ""."""
    wanted = [
        part.partition(";")[0].strip() for part in request.properties.get("accept-encoding", "").lower().split(",")
    ]
    return next((encoding for encoding in ("gzip", "deflate") if encoding in wanted), "")


def compress(body: bytes, encoding: str) -> bytes:
    return gzip.compress(body, _FASTEST, mtime=0) if encoding == "gzip" else zlib.compress(body, _FASTEST)
