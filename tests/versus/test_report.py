"""What a comparison says of rounds that are known: the table, who is ahead, prices, JSON and the picture."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest

from djl_trtllm.bench.client import Target
from djl_trtllm.bench.figures import Figures
from djl_trtllm.bench.report import Chart
from djl_trtllm.bench.session import Load, Plan
from djl_trtllm.quality.figures import Continuation, Position
from djl_trtllm.sizing.machines import PRICES, instance_named
from djl_trtllm.version import __version__
from djl_trtllm.versus import rounds as rounds_module
from djl_trtllm.versus.engines import Engine
from djl_trtllm.versus.rounds import Measured, Versus, round_of

CLIENTS = (1, 16)


def figures(clients: int, rate: float, ttft: float = 0.1) -> Figures:
    found = Figures(f"{clients} clients", 0.0, 10.0, concurrency=clients)
    found.tokens = round(10 * rate)
    found.succeeded = found.sent = 1
    found.ttft.add(np.array([ttft]))
    return found


PRICED = instance_named("g5.xlarge")


def measured(name: str, *rates: tuple[float, float], words: str = "") -> Measured:
    """An engine with a round for each pair of throughputs, that of one client and that of 16."""
    memory, price = {"memory_bytes": 1_000_000, "gpu_memory_bytes": None}, PRICED.hourly_price
    loads = ([figures(*each) for each in zip(CLIENTS, pair, strict=True)] for pair in rates)
    rounds = [round_of(10.0 * number, each, memory, price) for number, each in enumerate(loads, 1)]
    positions = [Position(word, {word: -0.1}) for word in words.split()]
    return Measured(Engine(name, "python"), rounds, [Continuation(positions)] if words else [])


def versus(*engines: Measured) -> Versus:
    loads = tuple(Load(concurrency=clients) for clients in CLIENTS)
    return Versus("story", Plan(Target.parse("http://127.0.0.1", {}), 128, 128, loads=loads), list(engines))


def rows(found: Versus) -> dict[str, list[str]]:
    return {name: cells for name, *cells in found.table()}


def test_cells_are_medians_with_the_lowest_and_the_highest() -> None:
    found = versus(measured("a", (10, 200), (30, 220), (20, 210)), measured("b", (10, 50)))
    cells = rows(found)
    assert cells[""] == ["a", "b"]
    assert cells["tok/s, 1 client"] == ["20 (10-30)", "10"]
    assert cells["most tok/s"] == ["210 (200-220)", "50"]
    assert cells["start"] == ["20 s (10 s-30 s)", "10 s"] and cells["memory"] == ["1.0 MB"] * 2
    assert cells["TTFT p50, 16 clients"][1] == "100 ms"
    assert cells["ITL p50, 1 client"] == ["-", "-"], "nothing was measured"
    assert "GPU memory" not in cells


def test_the_knee_is_the_fewest_clients_with_nearly_all_of_the_throughput() -> None:
    cells = rows(versus(measured("a", (100, 102)), measured("b", (100, 120))))
    assert cells["knee, clients"] == ["1", "16"]


def test_an_engine_is_ahead_if_its_slowest_round_is_faster_than_all_others() -> None:
    slow = measured("slow", (10, 100), (10, 109))
    for rates, ahead in (((110, 300), "fast"), ((108, 300), None)):
        found = versus(slow, measured("fast", *((10, rate) for rate in rates)))
        assert (found.ahead and found.ahead.engine.name) == ahead
        assert found.as_json()["ahead"] == ahead
        assert next(found.conclusion()).startswith("fast is ahead" if ahead else "No engine is ahead")
    assert versus(measured("a", (1, 9)), measured("b", (1, 1))).ahead is None, "one round"


def test_a_third_engine_between_the_two_fastest_is_not_overlooked() -> None:
    fast, steady, wild = (
        measured("a", (1, 20), (1, 30)),
        measured("b", (1, 19), (1, 19)),
        measured("c", (1, 1), (1, 25)),
    )
    assert versus(fast, steady).ahead is fast
    assert versus(fast, steady, wild).ahead is None


def test_the_price_of_a_million_tokens_follows_from_the_instances_hour() -> None:
    found = versus(measured("a", (10, 100)), measured("b", (10, 200)))
    found.instance, hourly = PRICED, PRICED.hourly_price or 0
    cells = rows(found)["$ per million tokens"]
    assert [float(cell) for cell in cells] == pytest.approx([hourly / 0.36, hourly / 0.72], rel=0.01)
    (first, _) = found.as_json()["engines"]
    assert first["rounds"][0]["usd_per_million_tokens"] == pytest.approx(hourly / 0.36)
    assert "us-east-1" in list(found.conclusion())[-1]
    nothing = versus(measured("a", (0, 0)), measured("b", (10, 200)))
    nothing.instance = PRICED
    assert rows(nothing)["$ per million tokens"][0] == "-"


def test_answers_are_compared_with_those_of_the_first_engine() -> None:
    found = versus(measured("a", (1, 2), words="x y"), measured("b", (1, 2), words="x z"), measured("c", (1, 2)))
    cells = rows(found)["tokens that agree"]
    assert cells == ["the reference", "50.00 % (differs)", "not available"]
    assert any(line.startswith("b answers otherwise than a") for line in found.conclusion())
    found.engines[2].no_answers = "no log-probabilities"
    assert versus(found.engines[2], found.engines[0]).agreement(found.engines[0]) is None
    assert any("no log-probabilities" in line for line in found.conclusion())


def test_json_is_whole_and_the_picture_has_all_engines() -> None:
    found = versus(measured("aa", (1, 2), words="x"), measured("bb", (1, 3), words="x"))
    found.differing, found.limits, found.warnings = {"option.x": ["1", "y" * 100]}, {"max_input_len": 7}, ["a warning"]
    found.instance = PRICED
    written = json.loads(json.dumps(found.as_json(), allow_nan=False))
    engines = written.pop("engines")
    assert written == {
        "version": __version__,
        "model": "story",
        "api": "chat",
        "dataset": "synthetic",
        "prompt_tokens": 128,
        "output_tokens": 128,
        "limits": {"max_input_len": 7},
        "interrupted": False,
        "ahead": None,
        "instance": {"name": "g5.xlarge", "usd_per_hour": pytest.approx(1.0, rel=0.2), "prices": str(PRICES)},
        "configuration": {"option.x": {"aa": "1", "bb": "y" * 100}},
        "warnings": ["a warning"],
    }
    loads = [engine["rounds"][0].pop("loads") for engine in engines]
    assert [[load["concurrency"] for load in each] for each in loads] == [[1, 16]] * 2
    assert engines[0] == {
        "engine": "aa",
        "python": "python",
        "rounds": [
            {
                "output_tokens_per_second": 2.0,
                "knee": 16,
                "start_seconds": 10.0,
                "memory_bytes": 1_000_000,
                "gpu_memory_bytes": None,
                "usd_per_million_tokens": pytest.approx(139.7, rel=0.01),
            }
        ],
        "answers": None,
        "no_answers": None,
    }
    assert engines[1]["answers"]["verdict"] == "agrees"
    assert len(found.configuration()[1][2]) < 100
    if find_spec("matplotlib") is not None:
        drawn = found.picture()
        assert ">aa<" in drawn and ">bb<" in drawn


def test_a_spread_leaves_out_rounds_without_a_value() -> None:
    found = versus(measured("a", (1, 2), (1, 2), (1, 2)), measured("b", (1, 2)))
    for each, value in zip(found.engines[0].rounds, (None, 3 << 20, 1 << 20), strict=True):
        each["gpu_memory_bytes"] = value
    assert rows(found)["GPU memory"] == ["2.1 MB (1.0 MB-3.1 MB)", "-"]


def test_latencies_have_their_percentiles_in_seconds() -> None:
    one = figures(1, 10)
    one.ttft, one.itl = (type(one.ttft)() for _ in range(2))
    one.ttft.add(np.array([0.1] * 98 + [4.0] * 2))
    one.itl.add(np.array([0.02] * 98 + [0.5] * 2))
    found = versus(*(Measured(Engine(name, ""), [round_of(1.0, [one, one], {}, None)]) for name in "ab"))
    for path, expected in (
        ("ttft_seconds.p50", 0.1),
        ("ttft_seconds.p99", 4.0),
        ("itl_seconds.p50", 0.02),
        ("itl_seconds.p99", 0.5),
    ):
        for load in (0, 1):
            assert found.engines[0].spread(path, load).median == pytest.approx(expected, rel=0.05)


def test_the_middle_round_is_that_of_the_median_throughput_or_the_faster_one_next_to_it() -> None:
    for speeds, middle in {(10,): 10, (10, 30): 30, (30, 10, 20): 20, (40, 10, 30, 20): 30}.items():
        found = measured("a", *((1, speed) for speed in speeds)).middle
        assert found["output_tokens_per_second"] == middle


def test_failed_requests_are_those_with_an_error_and_those_without_an_end() -> None:
    one = measured("a", (1, 2), (1, 2))
    assert one.failed == 0
    for number, each in enumerate(load for one_round in one.rounds for load in one_round["loads"]):
        each["requests"] |= {"failed": 10**number, "unfinished": 2 * 10**number}
    assert one.failed == 3333
    assert rows(versus(measured("b", (1, 2)), one))["failed requests"] == ["0", "3,333"]


def test_the_conclusion_says_how_far_the_fastest_is_ahead_of_the_next() -> None:
    engines = measured("a", (1, 10), (1, 10)), measured("b", (1, 50), (1, 50)), measured("c", (1, 20), (1, 20))
    ahead = next(versus(*engines).conclusion())
    assert ahead.startswith("b is ahead") and "fastest of c" in ahead and "2.50 times" in ahead and "2 rounds" in ahead
    nothing = measured("a", (0, 0), (0, 0))
    assert "inf times" in next(versus(nothing, engines[1]).conclusion())
    one = next(versus(measured("a", (1, 10)), measured("b", (1, 50))).conclusion())
    assert one.startswith("b has the most") and "--rounds" in one
    assert len(list(versus(*engines).conclusion())) == 1, "no price and no answers"


def test_json_of_a_comparison_that_is_not_whole_has_no_winner() -> None:
    found = versus(measured("a", (1, 10), (1, 10)), measured("b", (1, 50), (1, 50)))
    written = found.as_json()
    assert (found.complete, written["ahead"], written["instance"]) == (True, "b", None)
    found.engines.append(Measured(Engine("c", "python"), no_answers="no memory"))
    written = found.as_json()
    assert (found.complete, written["ahead"]) == (False, None)
    assert [each["no_answers"] for each in written["engines"]] == [None, None, "no memory"]


def test_charts_have_each_engine_by_clients_and_the_answers_beside_the_first_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Chart] = []

    def picture(charts: list[Chart]) -> str:
        drawn.extend(charts)
        return "svg"

    monkeypatch.setattr(rounds_module, "picture", picture)
    found = versus(
        *(measured(name, (10, 40), (20, 80), words=words) for name, words in {"a": "x", "b": "x", "c": ""}.items())
    )
    assert found.picture() == "svg"
    speeds, first, between, agreeing = drawn
    assert [line.name for line in speeds.lines] == ["a", "b", "c"]
    assert (speeds.x, speeds.y, speeds.log) == ("clients", "tokens per second", "x")
    assert speeds.lines[0].points == [(1.0, 15.0), (16.0, 60.0)] and speeds.lines[0].labels == ["1", "16"]
    for chart in (first, between):
        assert (chart.x, chart.y, chart.log, len(chart.lines)) == ("clients", "seconds", "x", 3)
    assert [x for x, _ in first.lines[0].points] == [1.0, 16.0]
    assert [y for _, y in first.lines[0].points] == pytest.approx([0.1, 0.1], rel=0.05)
    assert [line.name for line in agreeing.lines] == ["b"] and agreeing.lines[0].steps
    assert (agreeing.x, agreeing.y) == ("tokens", "share") and agreeing.title.endswith("a")
    drawn.clear()
    versus(measured("a", (1, 2)), measured("b", (1, 2))).picture()
    assert len(drawn) == 3, "no answers to compare"
