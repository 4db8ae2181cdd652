from __future__ import annotations

import json
import math
import re

import pytest

from djl_trtllm.bench import report
from djl_trtllm.bench.client import Target
from djl_trtllm.bench.figures import Figures, Objectives
from djl_trtllm.bench.session import Plan, Result
from djl_trtllm.bench.streams import Counted, Stream
from djl_trtllm.bench.sweep import Sweep


def figures(clients: int, speed: int, *, failed: int = 0, objectives: Objectives | None = None) -> Figures:
    """A second of a load with this throughput."""
    made = Figures(f"{clients} clients", 0.0, objectives or Objectives(), end=1.0, concurrency=clients)
    stream = Stream(0.0)
    stream.add(0.25, 1)
    stream.add(0.5, speed - 1)
    stream.ended, stream.counted = 0.5, Counted.USAGE
    made.add(stream, 1.0)
    for _ in range(failed):
        bad = Stream(0.0)
        bad.ended, bad.error, bad.detail = 0.5, "HTTP 429", "the queue is full"
        made.add(bad, 1.0)
    return made


def result(*loads: Figures, knee: int | None = None, swept: bool = False) -> Result:
    made = Result(Plan(Target("host", 8080, "/v1")), model="m", loads=list(loads))
    if swept:
        made.sweep = Sweep({each.concurrency or 0: each for each in loads}, knee)
    return made


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0004, "0.4 ms"),
        (0.0123, "12.3 ms"),
        (0.999, "999 ms"),
        (1.234, "1.23 s"),
        (123.4, "123 s"),
        (12345.6, "12,346 s"),
        (math.nan, "-"),
    ],
)
def test_a_duration_has_a_unit_and_three_digits(value: float, text: str) -> None:
    assert report.seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.1234, "0.123"), (12.34, "12.3"), (99.94, "99.9"), (12345.6, "12,346")])
def test_a_number_has_three_digits_or_more(value: float, text: str) -> None:
    assert report.number(value) == text


def test_the_table_has_a_row_for_each_load() -> None:
    head, first, second = report.table(result(figures(1, 10), figures(2, 2000, failed=3)))
    assert dict(zip(head, first, strict=True))["TTFT p50 / p99"] == "250 ms / 250 ms"
    row = dict(zip(head, second, strict=True))
    assert (row["load"], row["tok/s"], row["requests"], row["failed"]) == ("2 clients", "2,000", "4", "3")
    assert "goodput" not in head


def test_objectives_add_the_goodput() -> None:
    head, row = report.table(result(figures(1, 10, failed=1, objectives=Objectives({"ttft": 1.0}))))
    assert (head[-1], row[-1]) == ("goodput", "50.0 %, 1 req/s")


def test_unfinished_requests_stand_beside_the_failed_ones() -> None:
    load = figures(1, 10)
    load.unfinished = 2
    assert report.table(result(load))[1][7] == "0 (+2 unfinished)"


def test_the_knee_is_a_sentence() -> None:
    loads = [figures(1, 10), figures(2, 20), figures(4, 20)]
    (line,) = report.conclusion(result(*loads, knee=2, swept=True))
    assert line.startswith("Knee: 2 clients, with 20 tok/s, at least 95 % of the 20 tok/s")


def test_a_missing_knee_has_its_reason() -> None:
    loads = [figures(1, 10), figures(2, 20)]
    grows = result(*loads, swept=True)
    assert "still grows with 2 clients; see --max-concurrency" in report.conclusion(grows)[0]
    grows.interrupted = True
    assert "interrupted" in report.conclusion(grows)[0]
    grows.interrupted, loads[1].complete = False, False
    assert "every request failed" in report.conclusion(grows)[0]


def test_errors_are_listed_by_kind_with_an_example() -> None:
    (line,) = report.conclusion(result(figures(1, 10, failed=2)))
    assert line == "1 clients: 2 failed: HTTP 429: the queue is full"


def test_the_report_says_how_tokens_are_counted() -> None:
    assert report.counting(result(figures(1, 10))) == "How tokens are counted: usage in each event."
    assert report.counting(result()) == ""


def test_the_json_is_json_with_the_load_and_the_knee() -> None:
    data = json.loads(json.dumps(report.as_json(result(figures(1, 10), figures(2, 10), knee=1, swept=True))))
    assert (data["server"], data["api"], data["model"]) == ("http://host:8080/v1", "chat", "m")
    assert data["knee"] == {"concurrency": 1, "capacity_output_tokens_per_second": 10.0}
    assert [load["concurrency"] for load in data["loads"]] == [1, 2]
    assert report.as_json(result())["knee"] is None


def test_what_makes_figures_doubtful_is_a_warning() -> None:
    load = figures(1, 10)
    load.cpu_share, load.shortened = 0.97, 1
    load.counted[Counted.EVENTS] = 1
    load.end = 0.6
    warnings = "\n".join(result(load).warnings)
    for text in ("1 clients: the client used 97 % of a core", "1 of 1 outputs are shorter", "longer --duration"):
        assert text in warnings
    assert "events are counted" in warnings
    load.cpu_share, load.rate = 0.5, 3.0
    late = Stream(0.0)
    late.sent, late.ended, late.error = 0.5, 0.6, "x"
    load.add(late, 1.0)
    assert re.search("requests were sent up to (499|500) ms late", "\n".join(result(load).warnings))
    assert result(figures(1, 10)).warnings == []


def test_requests_without_an_end_are_warned_of_unless_ctrl_c_ended_the_load() -> None:
    load = figures(1, 10)
    load.add(Stream(0.0), 1.0)
    assert "1 requests had no end when --drain was over" in "\n".join(result(load).warnings)
    load.complete = False
    assert result(load).warnings == []
