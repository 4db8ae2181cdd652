"""Lines or events: what a request says, its client, and the options."""

from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.api import Call
from djl_trtllm.api.lmi import parse as lmi
from djl_trtllm.config import Options

LINES, EVENTS = "application/jsonlines", "text/event-stream"
HUGGING_FACE = {"user-agent": "unknown/None; hf_hub/1.21.0"}
INPUTS: dict[str, Any] = {"inputs": "The wolf", "stream": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}


def parse(payload: dict[str, Any], headers: dict[str, str], **options: Any) -> Call:
    return lmi.parse_payload(payload, Options(**options), headers)


@pytest.mark.parametrize("payload", [INPUTS, CHAT], ids=["inputs", "chat"])
@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ({}, LINES),
        ({"accept": "*/*"}, LINES),
        ({"accept": EVENTS}, EVENTS),
        ({"accept": LINES}, LINES),
        (HUGGING_FACE, EVENTS),
        ({"user-agent": "OpenAI/Python 3.0"}, EVENTS),
    ],
)
def test_the_client_decides_between_lines_and_events(
    payload: dict[str, Any], headers: dict[str, str], shown: str
) -> None:
    assert parse(payload, headers).encoder.content_type == shown
    assert parse({**payload, "stream": False}, headers).encoder.content_type == "application/json"


@pytest.mark.parametrize(("payload", "suffix"), [(INPUTS, ""), (CHAT, "_chat")], ids=["inputs", "chat"])
def test_the_client_goes_before_the_option(payload: dict[str, Any], suffix: str) -> None:
    events, lines = f"sse{suffix}", f"jsonlines{suffix}"
    assert parse(payload, {}, output_formatter=events).encoder.content_type == EVENTS
    assert parse(payload, {"accept": LINES}, output_formatter=events).encoder.content_type == LINES
    assert parse(payload, {"accept": EVENTS}, output_formatter=lines).encoder.content_type == EVENTS
    assert parse(INPUTS, {"accept": LINES}, tgi_compat=True).encoder.content_type == LINES
    assert parse(INPUTS, {"accept": EVENTS}, output_formatter="none").encoder.content_type == "text/plain"


def test_the_formatter_that_a_request_names_goes_before_all() -> None:
    named = {**INPUTS, "parameters": {"output_formatter": "jsonlines"}}
    assert parse(named, {"accept": EVENTS}).encoder.content_type == LINES
    named = {**CHAT, "output_formatter": "jsonlines_chat"}
    assert parse(named, {"accept": EVENTS}).encoder.content_type == LINES


def test_hugging_faces_client_gets_the_names_that_it_reads() -> None:
    whole = {**INPUTS, "stream": False, "parameters": {"details": True}}
    for headers, compat in ((HUGGING_FACE, True), ({}, False)):
        encoder: Any = parse(whole, headers).encoder
        assert encoder._presentation.tgi_compat is compat
        assert encoder._presentation.details is True
        encoder = parse(INPUTS, headers).encoder
        assert (encoder._presentation.tgi_compat, encoder._presentation.details) == (compat, False)
