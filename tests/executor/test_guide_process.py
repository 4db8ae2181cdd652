"""The process that tries guides, without a compiler."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from djl_trtllm.executor import guide_process
from djl_trtllm.executor.guide_process import Judge, Verdict, decode_verdict, encode_guide, reason_of, serve_judge
from djl_trtllm.request import Guide, GuideKind


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Exception from src/x.cpp:1:\n[12:00:00] /a/b/regex.cc:75: Regex is wrong.\n\n", "Regex is wrong."),
        ("/a/b/json.cc:3: Check failed: (a.is<b>()) is false: Type is wrong", "Type is wrong"),
        ("plain", "plain"),
        ("", "unknown"),
    ],
)
def test_the_reason_is_the_last_part_of_the_compilers_message(message: str, reason: str) -> None:
    assert reason_of(message) == reason


def test_guides_are_judged_one_by_one_until_the_engine_process_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("leave_end_to_parent", "write_no_core_file"):
        monkeypatch.setattr(guide_process, name, lambda: None)
    bounds: list[int] = []
    monkeypatch.setattr(guide_process, "allow_more_memory", bounds.append)
    directories: list[Path] = []

    def make_judge(directory: Path) -> Judge:
        directories.append(directory)
        return lambda guide: Verdict(f"not {guide.value}", 7)

    ours, theirs = socket.socketpair()
    stack = threading.stack_size()
    serving = threading.Thread(target=serve_judge, args=(make_judge, ["", str(theirs.detach()), str(tmp_path)]))
    serving.start()
    with Connection(ours.detach()) as connection:
        for value in ("a", "b"):
            connection.send_bytes(encode_guide(Guide(GuideKind.REGEX, value)))
            assert decode_verdict(connection.recv_bytes()) == Verdict(f"not {value}", 7)
        connection.send_bytes(encode_guide(Guide(GuideKind.REGEX, "x" * 1000)))
        assert decode_verdict(connection.recv_bytes()).problem == "not " + "x" * 293 + "..."
    serving.join(20)
    threading.stack_size(stack)
    assert not serving.is_alive()
    assert (directories, bounds) == ([tmp_path], [2 * 1024**3])
