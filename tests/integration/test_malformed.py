"""Requests that are nearly right, in every dialect: each gets the dialect's own error, and soon."""

from __future__ import annotations

import gzip
import json
import socket
import struct
from typing import Any

import httpx
import pytest

from djl_trtllm.api import Dialect
from djl_trtllm.api.endpoint_errors import endpoint_error
from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError
from tests.support.client import raw_post, read_all
from tests.support.dialects import Way, ways
from tests.support.models import PROMPT

SECONDS = 30
"""For an answer, on a busy machine."""
SAMPLING: dict[str, Any] = {"max_new_tokens": 2, "temperature": 0.5, "seed": 1}
DEEP = b"[" * 900 + b"]" * 900
NUMBERS = [b"1e400", b"-1e400", b"9" * 400, b"-" + b"9" * 400, b"1e999999999", b"0." + b"0" * 400 + b"1e-400", b"NaN"]
"""None of them is a number of tokens, a temperature or a seed."""
INFER = "/v2/models/ensemble/infer"
LENGTH = "Inference-Header-Content-Length"


def shape(value: Any) -> Any:
    """The members of a JSON value, without what is in them."""
    return {name: shape(each) for name, each in value.items()} if isinstance(value, dict) else None


def dialect_of(way: Way) -> Dialect:
    (dialect,) = (each for each in DIALECTS if type(each).__name__ == way.dialect)
    return dialect


def check_own(answer: httpx.Response, way: Way) -> None:
    """The error of an invalid request in the dialect of a path."""
    dialect, error = dialect_of(way), InvalidRequestError("no")
    expected = dialect.encode_error(error, Options())
    if "{endpoint}" in way.path and dialect.sagemaker:
        expected = endpoint_error(error, expected)
    assert answer.status_code == expected.status, answer.text
    assert shape(answer.json()) == shape(json.loads(expected.body))
    for name, value in expected.headers:
        assert answer.headers[name] == value


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    with httpx.Client(base_url=address, trust_env=False, timeout=SECONDS) as client:
        yield client


@pytest.fixture(autouse=True)
def _it_still_answers(client: httpx.Client) -> Any:
    yield
    assert client.post("/predict", json={"prompt": PROMPT, "max_tokens": 2}).status_code == 200


def post(client: httpx.Client, way: Way, content: bytes) -> httpx.Response:
    return client.post(way.url("story"), content=content, headers={"Content-Type": "application/json"})


def with_numbers(way: Way, number: bytes) -> list[bytes]:
    """The body with the number in the place of each number of it."""
    marks = {"max_new_tokens": 1111, "temperature": 0.4375, "seed": 3333}
    content = json.dumps(way.body(PROMPT, marks)).encode()
    bodies = [content.replace(json.dumps(mark).encode(), number) for mark in marks.values()]
    assert content not in bodies
    return bodies


@pytest.mark.parametrize("way", ways(), ids=lambda way: way.name)
def test_numbers_that_are_none(client: httpx.Client, way: Way) -> None:
    for number in NUMBERS:
        bodies = with_numbers(way, number)
        if number.startswith(b"0."):
            del bodies[1]  # a temperature near 0 is 0
        for content in bodies:
            check_own(post(client, way, content), way)


@pytest.mark.parametrize("way", ways(), ids=lambda way: way.name)
def test_deep_values(client: httpx.Client, way: Way) -> None:
    body = way.body(PROMPT, SAMPLING)
    for name in body:
        without = {key: value for key, value in body.items() if key != name}
        content = json.dumps({**without, name: "here"}).encode().replace(b'"here"', DEEP)
        check_own(post(client, way, content), way)
    check_own(post(client, way, b"[" * 400_000), way)
    check_own(post(client, way, b'{"a":' * 150_000), way)


@pytest.mark.parametrize("way", ways(), ids=lambda way: way.name)
def test_bodies_that_are_shorter_than_they_say_and_longer(client: httpx.Client, address: str, way: Way) -> None:
    content = json.dumps(way.body(PROMPT, SAMPLING)).encode()
    for cut in (1, len(content) // 2, len(content) - 1):
        check_own(post(client, way, content[:cut]), way)
    check_own(post(client, way, content + b"}"), way)
    # The client promises more than it sends, and closes its side: nothing is left waiting.
    with socket.create_connection(("127.0.0.1", httpx.URL(address).port or 80), timeout=SECONDS) as connection:
        promised = raw_post(content + b" " * 10, path=way.url("story"))
        connection.sendall(promised[:-10])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


# -- tensors -----------------------------------------------------------------------------------------------------------

TEXT = struct.pack("<I", len(PROMPT)) + PROMPT.encode()


def tensor(name: str, datatype: str, shape: Any, size: Any = None, **more: Any) -> dict[str, Any]:
    parameters = {} if size is None else {"parameters": {"binary_data_size": size}}
    return {"name": name, "datatype": datatype, "shape": shape, **parameters, **more}


MAX_TOKENS = tensor("max_tokens", "INT32", [1, 1], data=[2])
TEXT_INPUT = tensor("text_input", "BYTES", [1, 1], len(TEXT))


def infer(
    client: httpx.Client, inputs: list[Any], raw: bytes = TEXT, length: Any = None, **headers: str
) -> httpx.Response:
    head = json.dumps({"inputs": inputs}).encode()
    given = {LENGTH: str(len(head) if length is None else length), **headers}
    content = head + raw
    return client.post(INFER, content=content, headers=given)


def check_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 400, answer.text
    assert [*answer.json()] == ["error"] and "log" not in answer.json()["error"]


def test_binary_tensors_that_are_right(client: httpx.Client) -> None:
    assert infer(client, [TEXT_INPUT, MAX_TOKENS]).status_code == 200


@pytest.mark.parametrize("size", [0, 1, 4, len(TEXT) - 1, len(TEXT) + 1, -1, 2**31, 2**63, 2**64, 1.5, "7", None, True])
def test_sizes_that_are_not_the_tensors(client: httpx.Client, size: Any) -> None:
    given = {**TEXT_INPUT, "parameters": {"binary_data_size": size}}
    check_refused(infer(client, [given, MAX_TOKENS]))
    check_refused(infer(client, [tensor("max_tokens", "INT32", [1, 1], size), TEXT_INPUT], bytes(5) + TEXT))


@pytest.mark.parametrize(
    "raw",
    [b"", TEXT[:-1], TEXT + b"x", b"\xff" * len(TEXT), b"\xff\xff\xff\x7f" + TEXT[4:], bytes(len(TEXT)), TEXT * 2],
)
def test_bytes_that_are_no_string(client: httpx.Client, raw: bytes) -> None:
    check_refused(infer(client, [TEXT_INPUT, MAX_TOKENS], raw))


@pytest.mark.parametrize("length", ["", "-1", "1e3", "99999999", "9" * 5000, "0", "5", "0x10", "12 13"])
def test_lengths_of_the_json_that_are_none(client: httpx.Client, length: str) -> None:
    check_refused(infer(client, [TEXT_INPUT, MAX_TOKENS], length=length))


@pytest.mark.parametrize(
    "shape",
    [
        *([], [1], [0, 1], [1, 2], [2, 1], [1, 1, 1], [-1, 1], [65, 1], [1, 2**31], [2**31 - 1] * 2, [2**64, 1]),
        *([1.0, 1], ["1", 1], [True, True], [[1], [1]], None, "11", {}, [1] * 1000, [2**31 - 1] * 1000),
    ],
)
@pytest.mark.parametrize("datatype", ["BYTES", "INT32"])
def test_shapes_that_are_none(client: httpx.Client, shape: Any, datatype: str) -> None:
    text, count = dict(TEXT_INPUT), dict(MAX_TOKENS)
    (text if datatype == "BYTES" else count)["shape"] = shape
    check_refused(infer(client, [text, count]))


@pytest.mark.parametrize("datatype", ["STRING", "int32", "FP8", "", None, 7, ["INT32"], {}, "INT32 " * 1000])
def test_datatypes_that_are_none(client: httpx.Client, datatype: Any) -> None:
    check_refused(infer(client, [TEXT_INPUT, {**MAX_TOKENS, "datatype": datatype}]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1.0, 3.4e38])
@pytest.mark.parametrize("code", ["f", "e", "d"])
def test_floats_that_are_no_share_of_the_tokens(client: httpx.Client, value: float, code: str) -> None:
    datatype = {"f": "FP32", "e": "FP16", "d": "FP64"}[code]
    raw = struct.pack(f"<{code}", float("inf") if code == "e" and value > 65504 else value)
    share = tensor("min_p" if value < 0 else "top_p", datatype, [1, 1], len(raw))
    temperature = tensor("temperature", datatype, [1, 1], len(raw))
    check_refused(infer(client, [TEXT_INPUT, share, MAX_TOKENS], TEXT + raw))
    if value != 3.4e38:
        check_refused(infer(client, [TEXT_INPUT, temperature, MAX_TOKENS], TEXT + raw))


def test_bodies_that_cannot_be_unpacked(client: httpx.Client) -> None:
    packed = gzip.compress(json.dumps({"text_input": PROMPT, "max_tokens": 2}).encode())
    bomb = gzip.compress(bytes(50_000_000))
    for path in (INFER, "/v2/models/ensemble/generate", "/v2/repository/index"):
        for content in (packed[:-9], packed + b"x", b"\x1f\x8b", bomb, b""):
            check_refused(client.post(path, content=content, headers={"Content-Encoding": "gzip"}))
        check_refused(client.post(path, content=packed, headers={"Content-Encoding": "br"}))
