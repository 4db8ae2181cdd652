from __future__ import annotations

import json
import math
import re
from importlib.util import find_spec

import numpy as np
import pytest

from djl_trtllm.bench import report
from djl_trtllm.bench.client import Counted, Stream, Target
from djl_trtllm.bench.figures import Figures
from djl_trtllm.bench.report import Line, charts, describe, page, picture
from djl_trtllm.bench.session import Load, Plan, Progress, Result, Sweep
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.listing import columns

drawn = pytest.mark.skipif(find_spec("matplotlib") is None, reason="charts need matplotlib")


def figures(clients: int, speed: int, *, failed: int = 0) -> Figures:
    """A second of a load with this throughput."""
    made = Figures(f"{clients} clients", 0.0, end=1.0, concurrency=clients)
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


def test_durations_and_numbers_have_three_digits_or_more_and_a_unit() -> None:
    durations = (0.0004, 0.0123, 0.999, 1.234, 123.4, 12345.6, math.nan)
    texts = ["0.4 ms", "12.3 ms", "999 ms", "1.23 s", "123 s", "12,346 s", "-"]
    assert list(map(report.seconds, durations)) == texts
    assert list(map(report.number, (0.1234, 12.34, 99.94, 12345.6))) == ["0.123", "12.3", "99.9", "12,346"]


def test_the_table_has_a_row_for_each_load() -> None:
    head, first, second = report.table(result(figures(1, 10), figures(2, 2000, failed=3)))
    assert dict(zip(head, first, strict=True))["TTFT ms"] == "250/250"
    row = dict(zip(head, second, strict=True))
    assert (row["clients"], row["tok/s"], row["sent"], row["failed"]) == ("2", "2,000", "4", "3")
    load = figures(1, 10, failed=1)
    load.concurrency, load.rate = None, 2.5
    assert report.table(result(load))[1][0] == "2.5"


def test_a_column_of_latencies_has_one_unit_and_the_table_fits_80_columns() -> None:
    loads = [figures(1, 10), figures(512, 12_345, failed=9_998)]
    loads[1].ttft.add(np.array([7.654321] * 9))
    loads[1].e2e.add(np.array([345.678] * 9))
    rows = report.table(result(*loads))
    assert rows[0][3:6] == ["TTFT s", "ITL ms", "E2E s"] and rows[1][3] == "0.25/0.25"
    assert max(map(len, columns(rows))) <= 80


def test_the_knee_is_a_sentence() -> None:
    loads = [figures(1, 10), figures(2, 20), figures(4, 20)]
    (line,) = report.conclusion(result(*loads, knee=2, swept=True))
    assert line.startswith("Knee: 2 clients, with 20 tok/s, at least 95 % of the 20 tok/s")


def test_errors_by_kind_with_an_example_and_how_tokens_are_counted_are_sentences() -> None:
    (line,) = report.conclusion(result(figures(1, 10, failed=2)))
    assert line == "1 clients: 2 failed: HTTP 429: the queue is full"
    assert report.counting(result(figures(1, 10))) == "How tokens are counted: usage in each event."
    assert report.counting(result()) == ""


def test_a_missing_knee_has_its_reason() -> None:
    loads = [figures(1, 10), figures(2, 20)]
    grows = result(*loads, swept=True)
    assert "still grows with 2 clients; see --max-concurrency" in report.conclusion(grows)[0]
    grows.interrupted = True
    assert "interrupted" in report.conclusion(grows)[0]
    grows.interrupted, loads[1].complete = False, False
    assert "every request failed" in report.conclusion(grows)[0]


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


@drawn
def test_the_page_is_one_file_without_scripts_and_addresses_whatever_a_server_says() -> None:
    loads = [figures(1, 10), figures(2, 20), figures(4, 20, failed=1)]
    loads[-1].details["HTTP 429"] = "<script>alert(1)</script>"
    made = result(*loads, knee=2, swept=True)
    made.model = "<img src=x>"
    text = page(made)
    assert "&lt;script&gt;" in text and "<script" not in text and "<img" not in text
    assert not re.findall(r"url\([^#]|@import|<[^>]+ (?:src|href)=", text)
    assert text.count("<svg") == 1 and text.count("<tr>") == 4
    assert "Knee: 2 clients" in text and ">knee</text" in text
    assert text == page(made), "the same figures give the same page"


def test_each_number_of_loads_has_its_charts() -> None:
    assert charts(result()) == []
    distributions = ["Time to first token: share of values up to", "Inter-token latency: share of values up to"]
    timelines = ["Output tokens per second", "Mean time to first token, by when requests were due"]
    one = [chart.title for chart in charts(result(figures(1, 10)))]
    assert one == [*distributions, "Whole request: share of values up to", *timelines]
    found = charts(result(*(figures(clients, 10) for clients in range(1, 12)), knee=2, swept=True))
    assert [chart.title for chart in found] == [
        "Throughput",
        "Latency against throughput",
        *distributions,
        *timelines,
    ]
    assert (found[0].x, found[0].log, found[0].knee) == ("clients", "x", 2)
    assert found[0].lines == [Line("output tokens", [(n, 10.0) for n in range(1, 12)], [str(n) for n in range(1, 12)])]
    assert [line.name for line in found[1].lines] == ["TTFT p50", "TTFT p99", "ITL p50"]
    assert (found[1].log, [chart.log for chart in found[2:]]) == ("y", ["x", "x", "", ""])
    assert [line.name for line in found[2].lines] == [f"{n} clients" for n in (1, 3, 5, 7, 9, 11)]
    assert found[4].lines[0].points == [(0.0, 10.0)]
    assert found[5].lines[0].points == [(0.0, 0.25)]


def size_of(svg: str) -> list[float]:
    (box,) = re.findall(r'viewBox="0 0 (\S+ \S+)"', svg.partition(">")[0])
    return [float(number) for number in box.split()]


@drawn
def test_an_open_loop_is_drawn_by_its_rate_and_an_empty_load_too() -> None:
    loads = [figures(1, 10), figures(1, 20)]
    for load, rate in zip(loads, (0.5, 2.5), strict=True):
        load.rate = rate
    loads[1].ttft.counts = np.zeros_like(loads[1].ttft.counts)
    assert (charts(result(*loads))[0].x, charts(result(*loads))[0].log) == ("requests per second that were sent", "")
    assert ">2.5</text>" in picture(charts(result(*loads)))
    chart = charts(result(*loads))[0]
    one, two, three = (size_of(picture([chart] * count)) for count in (1, 2, 3))
    assert (two[0], three[0], three[1]) == (2 * one[0], 2 * one[0], 2 * one[1]), "two in a row"
    assert page(result()).startswith("<!doctype html>")


def test_without_matplotlib_a_page_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match=r"djl-trtllm\[plot\]"):
        page(result(figures(1, 10)))


def test_the_line_has_what_runs_now() -> None:
    progress = Progress(Load(concurrency=3), figures(3, 10, failed=2), 3, 1234.5, 2.4, "measuring")
    expected = "3 clients: measuring 2 s, 3 in flight, 1 done, 1,234 tok/s, TTFT p50 250 ms, 2 failed"
    assert describe(progress) == expected
