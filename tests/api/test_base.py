from __future__ import annotations

from djl_trtllm.api.base import Call, Prompt, RawRequest, Reply, error_headers, nearest_row, status_from
from djl_trtllm.config import Options
from djl_trtllm.errors import GenerationError, InvalidRequestError, NotReadyError, PromptTooLongError, RequestError
from djl_trtllm.request import GenerationRequest, Sampling
from tests.api.error_rows import ERRORS, headers_of
from tests.support.word_encoder import WordEncoder


def test_a_request_has_the_content_type_of_its_headers() -> None:
    assert RawRequest(b"", {}).content_type is None
    assert RawRequest(b"", {"content-type": "text/plain"}).content_type == "text/plain"


def test_a_call_counts_the_sequences_of_all_its_requests() -> None:
    requests = tuple(GenerationRequest(sampling=Sampling(n=n, best_of=7)) for n in (1, 3))
    assert Call(requests, WordEncoder()).sequences == 4


def test_a_reply_may_be_json() -> None:
    assert Reply.json({"a": [1]}) == Reply(200, "application/json", b'{"a":[1]}')
    assert Reply.json([], 202).status == 202


def test_a_prompt_may_come_without_its_tokens() -> None:
    assert Prompt("a", 1).tokens == ()


def test_an_error_has_the_row_of_its_nearest_base() -> None:
    table = {RequestError: "any", InvalidRequestError: "invalid", GenerationError: "engine"}
    assert nearest_row(table, PromptTooLongError(""), GenerationError) == "invalid"
    assert nearest_row(table, RequestError(""), GenerationError) == "any"
    del table[RequestError]
    assert nearest_row(table, RequestError(""), GenerationError) == "engine"


def test_errors_say_in_headers_when_to_come_back_and_what_to_use() -> None:
    for error in ERRORS.values():
        assert dict(error_headers(error)) == headers_of(error)
    assert error_headers(NotReadyError("no")) == error_headers(ValueError("no")) == ()


def test_a_status_may_be_that_of_an_option() -> None:
    options = Options(throttle_error_http_code=429)
    assert (status_from(404, options), status_from("throttle_error_http_code", options)) == (404, 429)
