from __future__ import annotations

import gzip
import zlib
from typing import Any

import pytest

from djl_trtllm.api import RawRequest
from djl_trtllm.api.triton.content import (
    accepted_encoding,
    compress,
    read_body,
    read_id,
    read_object,
    read_parameters,
)
from djl_trtllm.errors import InvalidRequestError, RequestTooLargeError

BODY = b'{"a": 1}' * 10


def request(body: bytes, encoding: str) -> RawRequest:
    return RawRequest(body, {"content-encoding": encoding})


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("", BODY),
        ("identity", BODY),
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("GZIP ", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
    ],
)
def test_compressed_bodies_are_unpacked(encoding: str, body: bytes) -> None:
    assert read_body(request(body, encoding), len(BODY)) == BODY


def test_no_more_is_unpacked_than_the_limit() -> None:
    bomb = gzip.compress(bytes(10_000_000))
    with pytest.raises(RequestTooLargeError, match="larger than max_request_size=1000 bytes"):
        read_body(request(bomb, "gzip"), 1000)


@pytest.mark.parametrize(
    ("encoding", "body", "message"),
    [
        ("gzip", b"no", "not valid gzip"),
        ("deflate", zlib.compress(BODY)[:-1], "it has no end"),
        ("gzip", gzip.compress(BODY, mtime=0) + b"x", "or more after it"),
        ("br", BODY, "the content-encoding is \"br\": expected 'gzip', 'deflate'"),
    ],
)
def test_a_body_that_cannot_be_unpacked_is_refused(encoding: str, body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_body(request(body, encoding), 1000)


@pytest.mark.parametrize("data", [b"", b"[1]", b"nonsense", b"\xff", b'"a"', b"[" * 100_000, b'{"a":' * 5000])
def test_json_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"^the body "):
        read_object(data)


def test_parameters_and_id_have_their_types() -> None:
    assert read_object(b'{"id": "7"}') == {"id": "7"}
    assert (read_parameters({}), read_parameters({"parameters": {"a": 1}})) == ({}, {"a": 1})
    assert (read_id({}), read_id({"id": "7"})) == ("", "7")
    with pytest.raises(InvalidRequestError, match=r"'parameters' is \[\]: expected an object"):
        read_parameters({"parameters": []})
    with pytest.raises(InvalidRequestError, match="'id' is 7: expected a string"):
        read_id({"id": 7})


@pytest.mark.parametrize(
    ("header", "encoding"),
    [("", ""), ("gzip;q=0.5, br", "gzip"), ("deflate", "deflate"), ("Deflate, GZIP", "gzip"), ("br", "")],
)
def test_the_response_is_compressed_as_the_client_wants(header: str, encoding: str) -> None:
    assert accepted_encoding(RawRequest(b"", {"accept-encoding": header})) == encoding


def test_what_is_compressed_can_be_unpacked() -> None:
    unpack: dict[str, Any] = {"gzip": gzip.decompress, "deflate": zlib.decompress}
    for encoding, function in unpack.items():
        assert function(compress(BODY, encoding)) == BODY


def test_a_response_is_compressed_fast_and_always_the_same() -> None:
    body = bytes(number * number % 251 for number in range(20_000))
    assert compress(body, "gzip") == gzip.compress(body, 1, mtime=0) != gzip.compress(body, 2, mtime=0)
    assert compress(body, "deflate") == zlib.compress(body, 1)
