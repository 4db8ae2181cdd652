from __future__ import annotations

import base64
import contextlib
import json
import socket
from typing import Any

import httpx
import pytest

from djl_trtllm.model import Tokenizer
from tests.support.client import JSON, body, raw_post, read_all, read_until
from tests.support.models import PROMPT
from tests.support.server import Server
from tests.support.waiting import wait_until


def test_ping_names_the_model_and_its_state(server: Server) -> None:
    answer = server.http.get("/ping")
    assert (answer.status_code, answer.json()) == (200, {"scripted": {"status": "Healthy"}})
    assert server.http.head("/ping").status_code == 200
    assert server.http.post("/ping", content=b"{}").json() == answer.json()


@pytest.mark.parametrize("path", ["/invocations", "/predictions/scripted", "/endpoints/whatever/invocations"])
def test_every_path_of_a_model_generates(server: Server, tokenizer: Tokenizer, path: str) -> None:
    answer = server.http.post(path, content=body(5), headers=JSON)
    assert answer.status_code == 200
    assert answer.json()["generated_text"] == tokenizer.decode(tokenizer.encode(PROMPT)[:5])


def test_a_stream_joins_to_the_whole_answer(server: Server) -> None:
    whole = server.generate(7).json()["generated_text"]
    answer = server.generate(7, stream=True)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert answer.headers["content-type"] == "application/jsonlines"
    assert len(lines) == 7
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"] == whole


def test_boto3_invokes_an_endpoint(runtime: Any) -> None:
    answer = runtime.invoke_endpoint(EndpointName="story", Body=body(3), ContentType="application/json")
    assert "generated_text" in json.loads(answer["Body"].read())


@pytest.mark.parametrize(
    ("content", "status", "expected"),
    [
        (body(0), 424, "max_new_tokens"),
        (b"{", 424, "Invalid"),
        (b" " * 300_000, 413, "max_request_size=200000"),
    ],
)
def test_boto3_raises_model_error_with_the_message(runtime: Any, content: bytes, status: int, expected: str) -> None:
    with pytest.raises(runtime.exceptions.ModelError, match=expected) as raised:
        runtime.invoke_endpoint(EndpointName="story", Body=content, ContentType="application/json")
    response = raised.value.response
    assert response["OriginalStatusCode"] == status
    assert expected in response["OriginalMessage"]
    assert f"Received client error ({status}) from primary" in response["Error"]["Message"]
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 424


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_unknown_path_is_404_in_djls_shape(server: Server, method: str) -> None:
    answer = server.http.request(method, "/nowhere")
    assert answer.status_code == 404
    assert answer.json() == {
        "code": 404,
        "type": "ResourceNotFoundException",
        "message": "there is nothing at /nowhere",
    }


def test_an_unknown_model_is_404_and_names_the_loaded_ones(server: Server) -> None:
    answer = server.http.post("/predictions/other", content=body(), headers=JSON)
    assert answer.status_code == 404
    assert "'other'" in answer.json()["message"]
    assert "scripted" in answer.json()["message"]


@pytest.mark.parametrize(("method", "path", "allow"), [("GET", "/invocations", "POST"), ("PUT", "/ping", "GET, POST")])
def test_a_wrong_method_is_405_and_names_the_right_one(server: Server, method: str, path: str, allow: str) -> None:
    answer = server.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert answer.json()["type"] == "MethodNotAllowedException"


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_above_the_limit_is_413(server: Server, declared: bool) -> None:
    content = b" " * 300_000
    answer = server.http.post("/invocations", content=content if declared else iter([content]), headers=JSON)
    assert answer.status_code == 413
    assert "max_request_size=200000" in answer.json()["message"]
    assert server.generate().status_code == 200


def test_a_websocket_where_there_is_none_is_refused(server: Server) -> None:
    key = base64.b64encode(bytes(16)).decode()
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key}
    assert server.http.get("/invocations", headers=headers).status_code in (403, 404, 405)
    assert server.http.get("/invocations", headers={**headers, "Sec-WebSocket-Key": "a"}).status_code == 400


@pytest.mark.parametrize("offer", ["websocket", "h2c", "other"])
def test_a_request_with_a_body_is_answered_whatever_protocol_it_offers(server: Server, offer: str) -> None:
    headers = {**JSON, "Connection": "Upgrade", "Upgrade": offer}
    for content in (body(2), iter([body(2)])):
        answer = server.http.post("/invocations", content=content, headers=headers)
        assert answer.json() == server.generate(2).json()


def test_the_request_id_is_echoed_or_made(server: Server) -> None:
    given = server.http.post("/invocations", content=body(), headers={**JSON, "X-Request-Id": "story-1"})
    assert given.headers["x-request-id"] == "story-1"
    assert len(server.generate().headers["x-request-id"]) == 36
    bad = server.http.post("/invocations", content=b"{", headers={**JSON, "X-Request-Id": "story-2"})
    assert bad.headers["x-request-id"] == "story-2"


def test_a_bad_request_is_424_in_the_handlers_shape(server: Server) -> None:
    answer = server.http.post("/invocations", content=b"{", headers=JSON)
    assert answer.status_code == 424
    assert set(answer.json()) == {"error", "code"}


def test_a_prompt_that_is_too_long_is_424_with_the_numbers(server: Server) -> None:
    content = json.dumps({"inputs": "wolf " * 5000}).encode()
    answer = server.http.post("/invocations", content=content, headers=JSON)
    assert answer.status_code == 424
    assert "max_input_len is 4096" in answer.json()["error"]


def test_more_sequences_than_there_ever_is_room_for_are_no_overload(server: Server) -> None:
    answer = server.generate(2, n=6, do_sample=True)
    assert answer.status_code == 424
    assert "6 sequences" in answer.json()["error"]


def test_an_error_of_one_request_is_its_own(server: Server) -> None:
    whole = server.generate(77)
    # A busy server may have the error before it has sent anything, and answers with its status then.
    attempts = (server.generate(77, stream=True) for _ in range(50))
    streamed = next(attempt for attempt in attempts if attempt.status_code == 200)
    assert whole.status_code == 424
    assert whole.json() == {"error": "scripted error", "code": 424}
    last = json.loads(streamed.text.splitlines()[-1])
    assert last["token"]["error_msg"] == "scripted error"
    assert last["details"]["finish_reason"] == "error"


def test_a_format_without_errors_ends_in_the_middle(server: Server) -> None:
    statuses = []
    for _ in range(50):
        try:
            statuses.append(server.generate(77, stream=True, output_formatter="none").status_code)
        except httpx.RemoteProtocolError:
            break
    else:
        pytest.fail("a stream that failed was ended as if it were whole")
    # A busy server may have the error before it has sent anything, and answers with its status then.
    assert set(statuses) <= {424}


def test_metrics_count_requests_tokens_and_ends(server: Server) -> None:
    def counts() -> list[float]:
        names = ("requests_total", "generated_tokens_total", "http_responses_total")
        return [*(server.metric(name) for name in names), server.finished("length")]

    before = counts()
    server.generate(6)
    requests, tokens, responses, lengths = [b - a for a, b in zip(before, counts(), strict=True)]
    assert (requests, tokens, lengths) == (1, 6, 1)
    assert responses >= 1


def test_over_capacity_is_503_with_retry_after_and_the_queue_depth(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(server.connect()).sendall(raw_post(body(1_000_000)))
        wait_until(lambda: server.metric("waiting") == 3)
        refused = server.generate()
        assert refused.status_code == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.json() == {
            "code": 503,
            "type": "WlmCapacityException",
            "message": "the request queue is full: 3 waiting, job_queue_size is 3",
            "queue_depth": 3,
            "queue_capacity": 3,
        }
        assert server.ping() == 200
    wait_until(lambda: server.metric("waiting") == 0)
    assert server.generate().status_code == 200


def test_a_connection_is_used_again(server: Server) -> None:
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(raw_post(body(2)))
            assert b"generated_text" in read_until(connection, b"}")
            connection.sendall(raw_post(body(20, stream=True)))
            assert read_until(connection, b"\r\n0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    with server.connect() as connection:
        ping = b"GET /ping HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
        connection.sendall(raw_post(body(20, stream=True)) + raw_post(body(2)) + ping)
        received = read_all(connection)
    stream, whole, pong = received.index(b"jsonlines"), received.rindex(b"generated_text"), received.index(b"Healthy")
    assert received.count(b"HTTP/1.1 200") == 3
    assert stream < whole < pong


def test_an_http_1_0_client_gets_its_answer_and_the_end_of_the_connection(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(raw_post(body(3), version="1.0"))
        head, _, content = read_all(connection).partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert f"content-length: {len(content)}".encode() in head
    with server.connect() as connection:
        connection.sendall(raw_post(body(3, stream=True), version="1.0"))
        assert b"generated_text" in read_all(connection)


def test_a_half_closed_client_is_gone(server: Server) -> None:
    before = server.finished("cancelled")
    with server.connect() as connection:
        connection.sendall(raw_post(body(2000)))
        wait_until(lambda: server.metric("running") == 1)
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: server.metric("running") == 0)
    assert server.finished("cancelled") == before + 1


@pytest.mark.parametrize("part", [0.2, 0.9])
def test_a_client_that_goes_while_it_sends_leaves_nothing(server: Server, part: float) -> None:
    request = raw_post(body(5))
    before = server.metric("requests_total")
    with server.connect() as connection:
        connection.sendall(request[: int(len(request) * part)])
    assert server.generate().status_code == 200
    assert server.metric("requests_total") == before + 1


def test_what_is_no_http_is_400(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"hello there\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 400")
