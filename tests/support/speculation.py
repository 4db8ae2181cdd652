"""Answers of servers that speculate, on any engine, beside those of a server that does not."""

from __future__ import annotations

import json
from typing import Any

from tests.support.client import Answer, lmi, raw_post, read_until
from tests.support.processes import wait_until
from tests.support.reference import SHORT
from tests.support.server import Server


def said(answer: Answer) -> tuple[int, list[int], str, dict[str, Any]]:
    """All that a response says, but for figures of drafts and the last digits of log-probabilities."""
    found = answer.json
    details = found["details"]
    tokens = details.pop("tokens")
    accepted = details.pop("accepted_tokens", None)
    details.pop("drafted_tokens", None)
    assert accepted is None or 0 <= accepted < len(tokens)
    assert all(token["log_prob"] is not None for token in tokens)
    return answer.status, [token["id"] for token in tokens], found["generated_text"], details


def check_that_a_client_may_leave(speculating: Server, server: Server) -> None:
    """A client that leaves a stream ends its own sequence, and the answers to others stay those of `server`."""
    cancelled = speculating.finished("cancelled")
    with speculating.connect() as leaving:
        endless = lmi(SHORT[0], stream=True, max_new_tokens=400, ignore_eos=True)
        leaving.sendall(raw_post(json.dumps(endless).encode()))
        read_until(leaving, b'"token"')
    asked = [lmi(text, max_new_tokens=60, details=True) for text in SHORT[:6]]
    assert [said(each) for each in speculating.together(asked)] == [said(each) for each in server.together(asked)]
    wait_until(lambda: speculating.finished("cancelled") == cancelled + 1, what="the request is cancelled")
    wait_until(lambda: speculating.metric("running") == 0)
