from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

import pytest

from djl_trtllm.logs.context import of_request
from djl_trtllm.logs.formats import JsonLines, TextFormatter, printable

FORGED = "x\n2026-11-22 20:00:00,000 INFO djl_trtllm.server.app: forged\r\x1b[2K\x9b\u2028\u202e\x00"


def record(message: str, *values: object, **extra: object) -> logging.LogRecord:
    line = logging.getLogger("a.b").makeRecord("a.b", logging.INFO, "", 0, message, values, None, extra=extra)
    line.created, line.msecs = 1_795_375_200.25, 250.0
    return line


def parsed(line: logging.LogRecord) -> dict[str, Any]:
    text = JsonLines().format(line)
    assert text.isascii()
    assert text.isprintable()  # one line, whatever reads it
    found: dict[str, Any] = json.loads(text)
    return found


def test_text_has_time_level_logger_and_message() -> None:
    assert re.fullmatch(
        r"2026-11-2\d \d\d:\d\d:00,250 INFO a\.b: loaded 3 files", TextFormatter().format(record("loaded %d files", 3))
    )


def test_text_begins_with_the_id_of_the_request() -> None:
    assert TextFormatter(short=True).format(record("gone", **of_request("r-1"))) == "[r-1] gone"
    assert TextFormatter().format(record("gone", **of_request("r-1"))).endswith("INFO a.b: [r-1] gone")


@pytest.mark.parametrize("message", ["model %s", "%s"])
def test_a_name_cannot_forge_a_line_of_text(message: str) -> None:
    lines = TextFormatter().format(record(message, FORGED)).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("  2026-11-22")
    assert lines[1].endswith("forged\\r\\x1b[2K\\x9b\\u2028\\u202e\\x00")


def test_an_id_cannot_forge_a_line_of_text() -> None:
    assert all(
        line.startswith("  ") for line in TextFormatter().format(record("x", **of_request(FORGED))).splitlines()[1:]
    )


def test_the_lines_of_a_traceback_are_indented() -> None:
    line = record("failed")
    line.exc_text = "Traceback\nValueError: x\x1b[31m"
    assert TextFormatter(short=True).format(line) == "failed\n  Traceback\n  ValueError: x\\x1b[31m"


def test_json_has_the_members_of_text_by_name() -> None:
    assert parsed(record("loaded %d files", 3, **of_request("r-1"))) == {
        "time": "2026-11-22T19:20:00.250Z",
        "level": "INFO",
        "logger": "a.b",
        "message": "loaded 3 files",
        "request_id": "r-1",
    }


def test_times_in_json_are_utc_wherever_the_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "EAST-5")
    try:
        time.tzset()
        assert parsed(record("x"))["time"] == "2026-11-22T19:20:00.250Z"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_json_has_what_belongs_to_the_line_and_not_what_a_library_repeats() -> None:
    found = parsed(record("x", status=404, unwritten={"404": 2}, color_message="\x1b[1mx"))
    assert (found["status"], found["unwritten"], "color_message" in found) == (404, {"404": 2}, False)


def test_json_of_a_name_that_forges_is_one_line_with_the_name() -> None:
    assert parsed(record("model %s", FORGED))["message"] == f"model {FORGED}"


def test_json_has_the_traceback() -> None:
    line = record("failed")
    line.exc_text = "Traceback\nValueError: x"
    assert parsed(line)["traceback"] == line.exc_text


def test_text_that_can_be_printed_stays_as_it_is() -> None:
    assert printable("Straße 漢字 🐺\tx\n") == "Straße 漢字 🐺\tx\n"


def test_half_a_surrogate_pair_can_be_written() -> None:
    assert printable("\ud800").encode() == b"\\ud800"
