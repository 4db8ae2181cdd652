from __future__ import annotations

import json

import pytest

from djl_trtllm.api.base import (
    Call,
    Dialect,
    RawRequest,
    SequenceCollector,
    WholeEncoder,
    dump_line,
)
from djl_trtllm.api.dialects.openai.dialect import OPENAI
from djl_trtllm.api.dialects.tgi import TGI
from djl_trtllm.api.registry import LMI
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    AuthenticationError,
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
)
from djl_trtllm.request import FinishReason, GenerationRequest, OutputChunk, Sampling, SequenceResult, Token
from tests.api.models import FAILED, FAILURE, answer, several
from tests.support.models import WordEncoder
from tests.support.plugin import TRIAL
from tests.support.tables import by_table


def test_a_request_has_the_content_type_of_its_headers() -> None:
    assert RawRequest(b"", {}).content_type is None
    assert RawRequest(b"", {"content-type": "text/plain"}).content_type == "text/plain"


def test_a_call_counts_the_sequences_of_all_its_requests() -> None:
    requests = tuple(GenerationRequest(sampling=Sampling(n=n, best_of=7)) for n in (1, 3))
    assert Call(requests, WordEncoder()).sequences == 4


@pytest.mark.parametrize(
    ("dialect", "statuses"),
    [
        # Invalid, no key, overloaded, not ready, too late, one that no table names, a defect.
        (TRIAL, (400, 401, 511, 512, 504, 500, 514)),
        (OPENAI, (400, 401, 511, 512, 504, 500, 514)),
        (LMI, (424, 401, 511, 512, 513, 424, 514)),
        (TGI, (422, 401, 429, 503, 500, 424, 514)),
    ],
)
def test_the_servers_options_change_the_statuses_of_its_state(dialect: Dialect, statuses: tuple[int, ...]) -> None:
    options = Options(
        throttle_error_http_code=511, wlm_error_http_code=512, timeout_http_code=513, server_error_http_code=514
    )
    errors = (
        InvalidRequestError(""),
        AuthenticationError(""),
        OverloadedError("", queue_depth=0, capacity=0, retry_after=1),
        NotReadyError(""),
        RequestTimeoutError(""),
        RequestError(""),
        ValueError(""),
    )
    assert tuple(dialect.encode_error(error, options).status for error in errors) == statuses


@by_table("message", "parameter")
def test_openais_errors_name_the_parameter_if_there_is_one(message: str, parameter: bytes) -> None:
    assert b'"param":' + parameter in OPENAI.encode_error(InvalidRequestError(message), Options()).body
    assert b'"param":null' in OPENAI.encode_error(GenerationError(message), Options()).body


def test_a_line_has_no_character_that_ends_a_line() -> None:
    text = "".join(map(chr, (*range(0x20), 0x7F, 0x85, 0x2028, 0x2029, 0xFEFF, 0xE9)))
    line = dump_line({"text": text})
    assert json.loads(line) == {"text": text}
    assert len(line.decode().splitlines()) == 1
    assert dump_line("a\x85é\u2028🦊\u2029") == '"a\\u0085é\\u2028🦊\\u2029"'.encode()
    assert dump_line({"a": [1, None]}) == b'{"a":[1,null]}'


def test_each_generation_has_its_own_sequences() -> None:
    collector = SequenceCollector(2, 2)
    assert collector.sequences[0].text == ""
    for generation, first in ((1, "c"), (0, "a")):
        for index in (0, 1):
            finished = SequenceResult(FinishReason.LENGTH, 1, None, None)
            token = Token(1, chr(ord(first) + index), None, False)
            done = collector.add(OutputChunk(index, [token], finished, generation))
    assert done
    assert [each.text for each in collector.sequences] == ["a", "b", "c", "d"]


class Texts(WholeEncoder):
    """The texts of all sequences."""

    def _body(self) -> bytes:
        return " ".join(sequence.text for sequence in self._output.sequences).encode()


def test_a_whole_answer_comes_when_every_sequence_has_ended() -> None:
    encoder = Texts(2)
    assert (encoder.stream, encoder.content_type, encoder.wants_prompt_tokens) == (False, "application/json", False)
    assert [encoder.encode(chunk) for chunk in several(2)] == [b"", b"", b"", b"00 01 10 11"]
    batch = [chunk for generation in range(3) for chunk in several(2, generation)]
    encoder = Texts(2, 3)
    assert [encoder.encode(chunk) for chunk in batch] == [b""] * 11 + [b" ".join([b"00 01 10 11"] * 3)]


def test_a_whole_answer_never_comes_with_an_error() -> None:
    assert answer(Texts(1), FAILED) == Texts(1).error(FAILURE) == b""
