"""The request of Truss's README, as `requests` and curl send it."""

from __future__ import annotations

import httpx
import pytest

from tests.support.models import PROMPT
from tests.support.server import Server


@pytest.mark.parametrize("path", ["/predict", "/v1/models/model:predict"])
def test_text_comes_raw_and_in_pieces(server: Server, path: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "bad_words_list": [""], "stop_words_list": [""], "beam_width": 1}
    with server.http.stream("POST", path, json=body) as answer:
        pieces = list(answer.iter_raw())
    assert answer.status_code == 200 and len(pieces) > 2
    whole = server.http.post(path, json={**body, "stream": False})
    assert whole.json() == {"text": b"".join(pieces).decode()}


def test_a_stream_that_fails_has_no_end_and_a_whole_answer_a_status(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 77}
    whole = server.http.post("/predict", json={**body, "stream": False})
    assert (whole.status_code, whole.json()) == (500, {"error": "scripted error"})
    for _ in range(50):
        try:
            # A busy server may have the error before it has sent anything, and answers with its status then.
            assert server.http.post("/predict", json=body).status_code == 500
        except httpx.RemoteProtocolError:
            return
    pytest.fail("a stream that failed was ended as if it were whole")
