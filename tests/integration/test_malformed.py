"""Requests that are nearly right, in every dialect: each gets the dialect's own error, and soon."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import httpx
import pytest

from djl_trtllm.api.base import Dialect
from djl_trtllm.api.front_end import endpoint_error
from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError
from tests.support.client import raw_post, read_all
from tests.support.dialects import Way, ways
from tests.support.models import PROMPT
from tests.support.processes import PATIENCE

SAMPLING: dict[str, Any] = {"max_new_tokens": 2, "temperature": 0.5, "seed": 1}
DEEP = b"[" * 900 + b"]" * 900
NUMBERS = [b"1e400", b"-1e400", b"9" * 400, b"-" + b"9" * 400, b"1e999999999", b"0." + b"0" * 400 + b"1e-400", b"NaN"]
"""None of them is a number of tokens, a temperature or a seed."""
INFER = "/v2/models/ensemble/infer"


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
    with httpx.Client(base_url=address, trust_env=False, timeout=PATIENCE) as client:
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
    with socket.create_connection(("127.0.0.1", httpx.URL(address).port or 80), timeout=PATIENCE) as connection:
        promised = raw_post(content + b" " * 10, path=way.url("story"))
        connection.sendall(promised[:-10])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


# -- tensors -----------------------------------------------------------------------------------------------------------


def check_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 400, answer.text
    assert [*answer.json()] == ["error"] and "log" not in answer.json()["error"]


def test_bodies_that_cannot_be_unpacked(client: httpx.Client) -> None:
    packed = gzip.compress(json.dumps({"text_input": PROMPT, "max_tokens": 2}).encode())
    bomb = gzip.compress(bytes(50_000_000))
    for path in (INFER, "/v2/models/ensemble/generate", "/v2/repository/index"):
        for content in (packed[:-9], packed + b"x", b"\x1f\x8b", bomb, b""):
            check_refused(client.post(path, content=content, headers={"Content-Encoding": "gzip"}))
        check_refused(client.post(path, content=packed, headers={"Content-Encoding": "br"}))
