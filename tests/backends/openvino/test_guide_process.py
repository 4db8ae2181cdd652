from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from djl_trtllm.backends.openvino.guide_process import judge
from djl_trtllm.executor.guide_process import Verdict, decode_verdict, encode_guide
from djl_trtllm.request import Guide, GuideKind

GUIDE = Guide(GuideKind.REGEX, "a")
VOCABULARY = 2048


class Played:
    """A compiler that takes CPU seconds: for a guide the first time, for each later time, and for a token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: float, again: float, token: float) -> None:
        self.seconds = 0.0
        self.first, self.again, self.token = first, again, token
        monkeypatch.setattr(time, "process_time", lambda: self.seconds)

    def compile(self, guide: Guide, tokens: int = 1) -> None:
        self.seconds += self.first if not self.seconds else self.again + (tokens * self.token if tokens > 1 else 0)


@pytest.mark.parametrize(
    ("first", "again", "token", "problem"),
    [
        (9.0, 0.25, 0.1, None),
        (9.0, 0.26, 0.1, "it is too large: each sequence would stop the others for 0.26 seconds"),
        (9.0, 0.25, 0.11, "it is too complex: each token would take 0.11 seconds"),
    ],
)
def test_what_would_stop_other_requests_is_refused(
    monkeypatch: pytest.MonkeyPatch, first: float, again: float, token: float, problem: str | None
) -> None:
    monkeypatch.setattr("djl_trtllm.backends.openvino.guide_process._AGAIN_SECONDS", 0.2500001)
    monkeypatch.setattr("djl_trtllm.backends.openvino.guide_process._TOKEN_SECONDS", 0.1000001)
    assert judge(Played(monkeypatch, first, again, token), GUIDE) == problem  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("Exception from src/x.cpp:1:\n[12:00:00] /a/b/regex.cc:75: Regex is wrong.\n\n", "Regex is wrong."),
        ("/a/b/json.cc:3: Check failed: (a.is<b>()) is false: Type is wrong", "Type is wrong"),
        ("plain", "plain"),
        ("", "unknown"),
    ],
)
def test_the_reason_is_the_last_part_of_the_engines_message(message: str, problem: str) -> None:
    class Refusing:
        def compile(self, guide: Guide, tokens: int = 1) -> None:
            raise RuntimeError(message)

    assert judge(Refusing(), GUIDE) == problem  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def process(tiny_stories: Path) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    """The real one, with the bundled engine."""
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        module = "djl_trtllm.backends.openvino.guide_process"
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(fd), str(tiny_stories / "engine")], pass_fds=(fd,)
        )
    with Connection(ours.detach()) as connection:
        yield process, connection
    assert process.wait(20) == 0, "it ends with its connection"


def asked(process: tuple[subprocess.Popen[bytes], Connection], guide: Guide) -> Verdict:
    process[1].send_bytes(encode_guide(guide))
    assert process[1].poll(60)
    return decode_verdict(process[1].recv_bytes())


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        (GuideKind.JSON_OBJECT, "", None),
        (GuideKind.JSON_SCHEMA, '{"type": "string", "pattern": "a+"}', None),
        (GuideKind.REGEX, "(yes|no)", None),
        (GuideKind.GRAMMAR, 'root ::= "a" root | "b"', None),
        (GuideKind.JSON_SCHEMA, '{"type": 5}', "Type should be a string"),
        (GuideKind.REGEX, "(", "Regex parsing error at position 2: The parenthesis is not closed."),
        (GuideKind.GRAMMAR, "x ::= y", 'EBNF parser error at line 1, column 1: The root rule with name "root" is not '),
    ],
)
def test_the_real_compiler_judges(
    process: tuple[subprocess.Popen[bytes], Connection], kind: GuideKind, value: str, problem: str | None
) -> None:
    verdict = asked(process, Guide(kind, value))
    assert verdict.vocabulary == VOCABULARY
    assert (verdict.problem is None) is (problem is None)
    assert problem is None or (verdict.problem or "").startswith(problem)


def test_it_is_not_ended_by_signals_for_the_server(process: tuple[subprocess.Popen[bytes], Connection]) -> None:
    asked(process, GUIDE)
    for number in (2, 15):
        os.kill(process[0].pid, number)
    assert asked(process, GUIDE).problem is None
