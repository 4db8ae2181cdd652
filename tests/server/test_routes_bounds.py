"""What a route refuses before it reads the body."""

from __future__ import annotations

import pytest

from djl_trtllm.model import Tokenizer
from djl_trtllm.service import served as served_models
from tests.server.application import application
from tests.support.in_process import Hosts
from tests.support.virtual_time import in_virtual_time


@pytest.mark.parametrize("path", ["/invocations", "/v1/chat/completions", "/generate"])
@in_virtual_time
async def test_a_body_that_holds_no_prompt_that_fits_is_refused_by_its_length(
    hosts: Hosts, tokenizer: Tokenizer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_models, "_LEAST_BODY", 300)
    monkeypatch.setattr(served_models, "_BYTES_OF_A_CHARACTER", 0)
    async with application(tokenizer) as served:
        answer = await served.client.post(path, b"{}", {"Content-Length": "301"})
        assert answer.status == 413
        assert b"a prompt that fits the model has at most 300" in answer.body
