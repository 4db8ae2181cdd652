"""Limits that hold, through every request format."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.server.conftest import Start

CHAT = {"messages": [{"role": "user", "content": "the wolf"}], "temperature": 0}


@pytest.mark.parametrize("bedrock", [False, True])
def test_no_request_gets_more_tokens_than_the_limit_and_defaults_are_lowered_to_it(start: Start, bedrock: bool) -> None:
    limit = {"option.max_output_len": 20, "option.bedrock_compat": str(bedrock).lower()}
    server = start(**limit)
    prompt = {"prompt": "the wolf"} if bedrock else {"inputs": "the wolf", "parameters": {"details": True}}

    def ask(most: int | None) -> list[tuple[int, Any]]:
        length = {} if most is None else {"max_gen_len" if bedrock else "max_new_tokens": most}
        of_chat = {} if most is None else {"max_tokens": most}
        first = prompt | length if bedrock else {**prompt, "parameters": {"details": True, **length}}
        answers = [server.http.post("/invocations", json=body) for body in (first, CHAT | of_chat)]
        return [(answer.status_code, answer.json()) for answer in answers]

    def count(answers: list[tuple[int, Any]]) -> tuple[int, int]:
        (_, first), (_, chat) = answers
        counted = first["metering"]["outputTokenCount"] if bedrock else first["details"]["generated_tokens"]
        return counted, chat["usage"]["completion_tokens"]

    assert count(ask(20)) == (20, 20)
    assert count(ask(None)) == (20, 20)
    for status, body in ask(21):
        assert status == 424
        assert "the request asks for 21 new tokens, max_output_len is 20" in body["error"]
