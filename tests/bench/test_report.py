from __future__ import annotations

import json
import math
import re
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from djl_trtllm import listing
from djl_trtllm.bench import report
from djl_trtllm.bench.client import Counted, Stream, Target
from djl_trtllm.bench.figures import Distribution, Figures, Timeline
from djl_trtllm.bench.report import Chart, Line, charts, describe, page, picture
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
    made = Result(Plan(Target("host", 8080, "/v1"), 16, 32), model="m", loads=list(loads))
    if swept:
        made.sweep = Sweep({each.concurrency or 0: each for each in loads}, knee)
    return made


def test_durations_and_numbers_have_three_digits_or_more_and_a_unit() -> None:
    durations = (0.0004, 0.0123, 0.999, 1.234, 123.4, 12345.6, math.nan)
    texts = ["0.4 ms", "12.3 ms", "999 ms", "1.23 s", "123 s", "12,346 s", "-"]
    assert list(map(listing.seconds, durations)) == texts
    assert list(map(listing.number, (0.1234, 12.34, 99.94, 12345.6))) == ["0.123", "12.3", "99.9", "12,346"]


def test_the_table_has_a_row_for_each_load() -> None:
    head, first, second = report.table(result(figures(1, 10), figures(2, 2000, failed=3)))
    assert head == ["clients", "tok/s", "req/s", "TTFT ms", "ITL ms", "E2E ms", "sent", "failed"]
    assert first == ["1", "10", "1", "250/250", "27.8/27.8", "500/500", "1", "0"]
    row = dict(zip(head, second, strict=True))
    assert (row["clients"], row["tok/s"], row["sent"], row["failed"]) == ("2", "2,000", "4", "3")
    load = figures(1, 10, failed=1)
    load.concurrency, load.rate = None, 2.5
    assert report.table(result(load))[1][0] == "2.5"
    assert "accepted" not in head
    load.accepted_tokens = 5
    accepted = [row[-1] for row in report.table(result(load, figures(2, 20)))]
    assert accepted == ["accepted", "50 %", "0 %"]


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
    load.cpu_share, load.shortened = 0.85, 1
    load.counted[Counted.EVENTS] = 1
    load.end = 0.6
    warnings = "\n".join(result(load).warnings)
    for text in ("1 clients: the client used 85 % of a core", "1 of 1 outputs are shorter", "longer --duration"):
        assert text in warnings
    assert "events are counted" in warnings
    load.cpu_share, load.rate = 0.84, 3.0
    late = Stream(0.0)
    late.sent, late.ended, late.error = 0.5, 0.6, "x"
    load.add(late, 1.0)
    assert re.search("requests were sent up to (499|500) ms late", "\n".join(result(load).warnings))
    punctual = Figures("3 requests/s", 0.0, end=1.0, rate=3.0)
    punctual.lag.add(np.array([0.01]))
    assert result(figures(1, 10)).warnings == result(punctual).warnings == []


def test_requests_without_an_end_are_warned_of_unless_ctrl_c_ended_the_load() -> None:
    load = figures(1, 10)
    load.add(Stream(0.0), 1.0)
    assert "1 requests had no end when --drain was over" in "\n".join(result(load).warnings)
    load.complete = False
    assert result(load).warnings == []


@drawn
def test_the_page_is_one_file_without_scripts_and_addresses_whatever_a_server_says() -> None:
    loads = [figures(1, 10), figures(2, 20), figures(4, 20, failed=1)]
    loads[-1].details["HTTP 429"], loads[-1].cpu_share = "<script>alert(1)</script>", 0.9
    made = result(*loads, knee=2, swept=True)
    made.model = "<img src=x>"
    text = page(made)
    assert "&lt;script&gt;" in text and "<script" not in text and "<img" not in text
    assert not re.findall(r"url\([^#]|@import|<[^>]+ (?:src|href)=", text)
    assert text.count("<svg") == 1 and text.count("<tr>") == 4
    assert "Knee: 2 clients" in text and ">knee</text" in text
    assert "Warning: 4 clients: the client used 90 % of a core" in text
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


@drawn
def test_a_chart_is_drawn_as_it_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    kept: list[Any] = []
    save = Figure.savefig

    def keep(self: Figure, *args: Any, **named: Any) -> None:
        kept.append(self)
        save(self, *args, **named)

    monkeypatch.setattr(Figure, "savefig", keep)
    dots = Chart("Dots", "x", "y", [Line("a", [(1, 2), (2000, 4), (3, math.nan)], ["one", "two", "none"])], "x", 2)
    picture([dots, Chart("Steps", "u", "v", [Line("b", [(0, 1)], steps=True)], "y"), Chart("None", "", "", [])])
    first, second, none, hidden = kept[0].axes
    assert [axes.get_title("left") for axes in kept[0].axes] == ["Dots", "Steps", "None", ""]
    assert (first.get_xlabel(), first.get_ylabel(), first.get_xscale(), first.get_yscale()) == (
        "x",
        "y",
        "log",
        "linear",
    )
    assert (second.get_xscale(), second.get_yscale(), first.get_ylim()[0], none.get_ylim()[0]) == (
        "linear",
        "log",
        0,
        0,
    )
    assert second.get_ylim()[0] > 0 and not hidden.axison and none.get_legend() is None
    assert first.xaxis.get_major_formatter()(2000, 0) == "2,000"
    across, up = (axis.get_gridlines()[0] for axis in (first.yaxis, first.xaxis))
    assert (across.get_visible(), across.get_alpha(), up.get_visible()) == (True, 0.4, False)
    line, knee = first.lines
    assert (line.get_label(), line.get_marker(), line.get_drawstyle(), list(knee.get_xdata())) == (
        "a",
        "o",
        "default",
        [2, 2],
    )
    assert (second.lines[0].get_marker(), second.lines[0].get_drawstyle()) == ("None", "steps-post")
    assert [(text.get_text(), text.xy) for text in first.texts] == [
        ("one", (1, 2)),
        ("two", (2000, 4)),
        ("knee", (2, 0.02)),
    ]


def test_a_bin_that_the_measurement_ended_in_has_no_rate() -> None:
    load = Figures("1 client", 0.0, end=1.5, concurrency=1)
    load.add(stream(0.0, (0.25, 1), (1.25, 3), ended=1.3), 1.5)
    assert charts(result(load))[3].lines[0].points == [(0.0, 1.0)]


def test_without_matplotlib_a_page_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match=r"djl-trtllm\[plot\]"):
        page(result(figures(1, 10)))


def test_the_line_has_what_runs_now() -> None:
    progress = Progress(Load(concurrency=3), figures(3, 10, failed=2), 3, 1234.5, 2.4, "measuring")
    expected = "3 clients: measuring 2 s, 3 in flight, 1 done, 1,234 tok/s, TTFT p50 250 ms, 2 failed"
    assert describe(progress) == expected


# -- figures -----------------------------------------------------------------------------------------------------------


def stream(
    intended: float, *arrivals: tuple[float, int], ended: float | None = None, error: str | None = None
) -> Stream:
    made = Stream(intended)
    for now, tokens in arrivals:
        made.add(now, tokens)
    made.ended, made.error, made.counted = ended, error, Counted.EACH
    return made


def test_percentiles_are_within_a_percent() -> None:
    values = np.linspace(0.001, 1.0, 1000)
    distribution = Distribution()
    distribution.add(values)
    for share in (0.01, 0.5, 0.9, 0.99):
        assert distribution.percentile(share) == pytest.approx(values[int(share * 1000)], rel=0.01)
    assert distribution.mean == pytest.approx(values.mean())
    assert (distribution.least, distribution.most, distribution.count) == (0.001, 1.0, 1000)
    distribution.add(np.array([0.0, 1e9]))
    assert distribution.percentile(0.0) < 2e-6 and distribution.count == 1002, "the first and the last bin"
    assert math.isnan(Distribution().percentile(0.5)) and math.isnan(Distribution().mean)
    assert Distribution().as_json() == {"count": 0}


def test_a_weight_is_that_number_of_values() -> None:
    distribution = Distribution()
    distribution.add(np.array([1.0, 4.0]), np.array([3, 1]))
    assert (distribution.count, distribution.mean) == (4, 1.75)
    assert distribution.percentile(0.5) == pytest.approx(1.0, rel=0.01)


def test_the_share_of_values_up_to_a_bound_grows_to_one() -> None:
    distribution = Distribution()
    distribution.add(np.array([0.1, 0.2, 0.2, 0.4]))
    bounds, shares = zip(*distribution.steps(), strict=True)
    assert shares == (0.25, 0.75, 1.0)
    assert all(value <= bound <= value * 1.0101 for value, bound in zip((0.1, 0.2, 0.4), bounds, strict=True))


def test_a_long_timeline_has_wider_bins_and_the_same_sums() -> None:
    timeline = Timeline()
    timeline.add("tokens", np.arange(600.0), np.full(600, 2))
    assert (timeline.width, timeline.used) == (1.0, 600)
    timeline.add("tokens", np.array([600.0]), np.array([7]))
    assert (timeline.width, timeline.used) == (2.0, 301)
    assert timeline.sums["tokens"].sum() == 1207
    assert timeline.as_json()["tokens_per_second"][:2] == [2.0, 2.0]


def test_tokens_belong_to_the_window_in_which_they_arrive() -> None:
    figures = Figures("", begin=10.0)
    # Sent in the warm-up, and complete after the end.
    figures.add(stream(9.0, (9.5, 1), (10.5, 2), (19.5, 1), (20.5, 5), ended=21.0), 20.0)
    figures.end = 20.0
    assert (figures.tokens, figures.events, figures.sent) == (3, 2, 0)
    assert figures.tokens_per_second == 0.3
    assert figures.itl.count == 3  # 2 of half a second, one of 9 seconds
    assert figures.itl.mean == pytest.approx((0.5 + 0.5 + 9.0) / 3)


def test_latencies_count_from_the_intended_time() -> None:
    figures = Figures("", begin=0.0)
    late = stream(1.0, (4.0, 1), (5.0, 1), ended=6.0)
    late.sent = 3.0
    figures.add(late, 10.0)
    assert (figures.ttft.mean, figures.e2e.mean, figures.lag.mean) == (3.0, 5.0, 2.0)


def test_requests_outside_the_window_have_no_latency() -> None:
    figures = Figures("", begin=5.0)
    figures.add(stream(4.9, (5.0, 1), ended=6.0), 10.0)
    figures.add(stream(10.0, (11.0, 1), ended=12.0), 10.0)
    assert (figures.ttft.count, figures.sent, figures.ended_in_window) == (0, 0, 1)
    figures.add(stream(4.5, (4.7, 1), ended=5.0), 10.0)
    figures.add(stream(4.5, (4.7, 1), ended=10.0), 10.0)
    assert figures.ended_in_window == 2, "the beginning belongs to the window, and the end does not"


def test_errors_are_counted_by_kind_with_one_example_and_kinds_are_bounded() -> None:
    figures = Figures("", begin=0.0)
    for number in range(3):
        failed = stream(1.0, ended=2.0, error="HTTP 429")
        failed.detail = f"number {number}"
        figures.add(failed, 10.0)
    assert (figures.errors, figures.details) == ({"HTTP 429": 3}, {"HTTP 429": "number 0"})
    assert (figures.failed, figures.succeeded, figures.sent, figures.ended_in_window) == (3, 0, 3, 0)
    for number in range(99):
        figures.add(stream(1.0, ended=2.0, error=f"error {number}"), 10.0)
    assert (len(figures.errors), figures.errors["other errors"]) == (21, 80)


def test_a_request_without_an_end_is_unfinished_and_its_tokens_count() -> None:
    figures = Figures("", begin=0.0)
    figures.add(stream(1.0, (2.0, 4)), 10.0)
    assert (figures.unfinished, figures.succeeded, figures.failed) == (1, 0, 0)
    assert (figures.tokens, figures.ttft.count, figures.e2e.count) == (4, 1, 0)


def test_outputs_shorter_than_asked_for_are_counted() -> None:
    figures = Figures("", begin=0.0)
    for requested in (0, 2, 3):
        made = stream(0.0, (1.0, 2), ended=2.0)
        made.requested = requested
        figures.add(made, 10.0)
    assert figures.shortened == 1


def test_the_json_has_rates_over_the_window_and_means_over_requests() -> None:
    figures = Figures("", begin=0.0, concurrency=3)
    first = stream(0.0, (1.0, 3), (2.0, 3), ended=2.0)
    first.prompt_tokens = 11
    figures.add(first, 4.0)
    figures.end = 4.0
    data = figures.as_json()
    assert (data["concurrency"], data["seconds"], data["requests_per_second"]) == (3, 4.0, 0.25)
    assert (data["output_tokens_per_second"], data["output_tokens_mean"], data["prompt_tokens_mean"]) == (
        1.5,
        6.0,
        11.0,
    )
    assert (data["tokens_per_event"], data["tokens_counted_by"]) == (3.0, {"token by token": 1})
    assert data["requests"] == {"sent": 1, "succeeded": 1, "failed": 0, "unfinished": 0}
    assert "rate" not in data
    assert data["timeline"]["ttft_mean_seconds"][0] == 1.0
    assert data["timeline"]["tokens_per_second"] == [0.0, 3.0, 3.0]
    assert (data["timeline"]["ended"], data["timeline"]["failed"]) == ([0, 0, 1], [0, 0, 0])
    means = {
        "accepted_tokens_share",
        "output_tokens_mean",
        "prompt_tokens_mean",
        "tokens_per_event",
        "tokens_counted_by",
    }
    rates = {"requests_per_second", "output_tokens_per_second"}
    times = {"ttft_seconds", "itl_seconds", "e2e_seconds"}
    rest = {"concurrency", "seconds", "complete", "requests", "errors", "client", "timeline"}
    assert set(data) == means | rates | times | rest
    assert set(data["ttft_seconds"]) == {"count", "mean", "min", "p50", "p90", "p95", "p99", "max"}
    assert set(data["client"]) == {"cpu_share", "send_lag_seconds"}
