"""The simulation of fleets keeps the laws of queues, and its rules of autoscaling are those that are shipped."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
import pytest

from benchmarks.fleet.arrivals import Lengths, Request, arrivals, burst, read_trace, steady
from benchmarks.fleet.measured import ALONE, PLACES, Measured, compare
from benchmarks.fleet.replica import Gpu, Replica, Scripted
from benchmarks.fleet.rules import Figures, Fixed, Keda, Ray, Rule, queries
from benchmarks.fleet.simulation import ColdStart, Fleet, Result, Simulation, Troubles
from djl_trtllm.api.base import RawRequest
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import OutputChunk
from djl_trtllm.service.lifecycle import ModelService
from tests.serving.test_kubernetes import ask_queries, container, needs_promtool, pod, series_of
from tests.support import virtual_time
from tests.support.in_process import PROMPT, Hosts, loaded
from tests.support.tables import by_rows

QUICK = ColdStart(20, 10, 0, 0)
SLOW = ColdStart(20, 10, 600, 0)


def fleet(cold_start: ColdStart = QUICK, *, places: int = 8, queue: int = 10_000, drain: float = 130) -> Fleet:
    """Replicas with as many places as the batch has."""
    return Fleet(Scripted(50), places, places, queue, cold_start, drain)


def load(rate: float, seconds: float = 600, output: float = 50, factor: float = 1) -> list[Request]:
    """The same requests each time; with a factor, a burst from 120 s on for 240 s."""
    return list(arrivals(burst(rate, factor, 120, 240), rate * factor, seconds, Lengths(10, output), seed=3))


def scaled(rule: Callable[[], Rule], cold_start: ColdStart = QUICK) -> Simulation:
    """What became of a burst of four times the load that one replica carries."""
    simulation = Simulation(fleet(cold_start), rule())
    simulation.run(load(5, seconds=900, factor=4))
    return simulation


RULES: dict[str, Callable[[], Rule]] = {"KEDA": lambda: Keda(1, 10), "Ray": lambda: Ray(1, 10, 6)}


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [1, 8])
def test_requests_in_the_system_are_their_rate_times_their_time_in_it(places: int) -> None:
    result = Simulation(fleet(places=places), Fixed(3)).run(load(2))
    stayed = sum(request.ended - request.arrived for request in result.requests if request.ended is not None)
    assert result.request_seconds == pytest.approx(stayed)


@by_rows("rule", [*RULES.values(), lambda: Fixed(1)])
def test_every_request_has_one_end_after_its_beginning(rule: Callable[[], Rule]) -> None:
    requests = load(20, factor=3)
    result = Simulation(fleet(queue=20, drain=1), rule()).run(requests)
    assert len(result.requests) == len(requests)
    for request in requests:
        assert request.outcome in ("complete", "refused", "cut")
        assert request.ended is not None
        if request.outcome == "complete":
            assert request.started is not None
            assert request.first_token is not None
            assert request.arrived <= request.started < request.first_token <= request.ended + 1e-6


def test_one_place_is_the_queue_of_pollaczek_and_khinchine() -> None:
    # Constant service of one second, 0.7 of the time: the mean wait is rho / 2 / (1 - rho) services.
    requests = [Request(each.arrived, 1, 50) for each in load(0.7, seconds=100_000)]
    Simulation(fleet(places=1), Fixed(1)).run(requests)
    waited = statistics.mean(each.started - each.arrived for each in requests if each.started is not None)
    assert waited == pytest.approx(0.7 / 2 / 0.3, rel=0.05)


def test_sequences_that_run_together_share_the_steps_of_their_number() -> None:
    replica = Replica(Gpu(alone=100, full=800, batch=16, prefill=1000), places=16, queue=0)
    first, second = Request(0, 100, 100), Request(0, 200, 100)
    replica.add(first, 0.0)
    assert replica.next_end(0.0) == pytest.approx(0.1 + 1.0)
    replica.add(second, 0.0)
    step = replica.speed.step_seconds(2)
    assert 1 / 100 < step < 16 / 800
    # Both prompts hold up both sequences.
    assert replica.next_end(0.0) == pytest.approx(0.3 + 100 * step)
    assert replica.end_due(0.3 + 100 * step) == [first]
    assert replica.next_end(0.3 + 100 * step) == pytest.approx(0.3 + 100 * step + 0.5 / 100)


# -- troubles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [1, 4])
def test_clients_that_send_again_get_what_was_refused_in_a_burst(attempts: int) -> None:
    troubles = Troubles(attempts, pause=60)
    result = Simulation(fleet(queue=4), Fixed(1), troubles=troubles).run(load(4, factor=4))
    given_up = [each for each in result.requests if each.outcome == "refused"]
    assert result.attempts["refused"] == sum(each.attempts - (each.outcome == "complete") for each in result.requests)
    assert {each.attempts for each in given_up} == {attempts}
    assert max(each.attempts for each in result.requests) == attempts
    if attempts > 1:
        again = [each for each in result.of("complete") if each.attempts > 1]
        assert again and all(each.started is not None and each.started - each.arrived > 59 for each in again)
    assert len(given_up) + len(result.of("complete")) == len(result.requests)


def test_what_a_replica_had_when_it_died_is_cut_and_goes_elsewhere_if_it_is_sent_again() -> None:
    requests = load(20, seconds=300)
    alive = Simulation(fleet(), Fixed(4)).run(load(20, seconds=300))
    for attempts in (1, 2):
        troubles = Troubles(attempts, pause=1, deaths=(100.0,))
        result = Simulation(fleet(), Fixed(4), troubles=troubles).run(load(20, seconds=300))
        cut = result.attempts["cut"]
        assert 1 <= cut <= 8 + 10
        assert len(result.of("cut")) == (cut if attempts == 1 else 0)
        assert len(result.of("complete")) == len(requests) - len(result.of("cut"))
        assert statistics.mean(result.first_tokens()) > statistics.mean(alive.first_tokens()), (
            "for 30 s there are three"
        )


@pytest.mark.slow
def test_a_choice_at_random_costs_little_where_batches_are_large_and_much_where_they_are_small() -> None:
    def late(places: int, at_random: bool) -> float:
        few = Simulation(fleet(places=places), Fixed(8), troubles=Troubles(at_random=at_random))
        return statistics.mean(few.run(load(0.7 * 8 * places, seconds=60)).first_tokens())

    assert late(4, at_random=True) > 2 * late(4, at_random=False)
    assert late(256, at_random=True) == pytest.approx(late(256, at_random=False), rel=0.05)


# -- rules -------------------------------------------------------------------------------------------------------------


@by_rows("rule", RULES)
def test_a_rule_adds_replicas_for_a_burst_and_takes_them_away(rule: str) -> None:
    simulation = scaled(RULES[rule])
    fixed = Simulation(fleet(), Fixed(1)).run(load(5, seconds=900, factor=4))
    result = simulation.result
    assert 3 <= result.most_replicas <= 10
    assert statistics.mean(result.first_tokens()) < statistics.mean(fixed.first_tokens()) / 2
    assert result.replica_seconds < result.most_replicas * result.seconds
    assert result.of("cut") == []


@needs_promtool
def test_the_simulation_has_the_values_of_the_manifests_queries(tmp_path: Path) -> None:
    chance = random.Random(4)
    fleets = [
        [
            Figures(chance.choice([0, 0, chance.randrange(600)]), chance.randrange(257), 256, chance.random() < 0.3)
            for _ in range(chance.randrange(12))
        ]
        for _ in range(40)
    ]
    cases = []
    for figures in fleets:
        series: dict[str, str] = {}
        for number, each in enumerate(figures):
            usage = 0.95 if each.full_cache else 0.94
            series |= series_of(f"pod-{number}", each.waiting, each.running, each.places, usage)
        cases.append((series, queries(figures)))
    assert {tuple(value is None for value in wanted) for _, wanted in cases} == {
        *((True, True), (False, True), (False, False))
    }
    ask_queries(tmp_path, cases)


def test_keda_is_bounded_by_the_manifests_policies() -> None:
    crowd = [Figures(1000, 100, 100)]
    rule = Keda(1, 100)
    assert rule.wanted(0, 1, crowd) == 3  # two pods
    assert rule.wanted(15, 3, crowd * 3) == 3  # in this minute it was one, and may be two more
    assert rule.wanted(70, 3, crowd * 3) == 6
    idle = [Figures(0, 0, 100)] * 7
    assert rule.wanted(100, 7, idle) == 7
    assert rule.wanted(665, 7, idle) == 7
    assert rule.wanted(700, 7, idle) == 5  # a fifth, rounded up


def test_keda_does_what_the_controller_of_kubernetes_did() -> None:
    # kube-controller-manager 1.33.4 with an HPA as KEDA makes it of the manifest, synchronised every 5 seconds, and
    # external metrics of 0.5 batches, 6 after 30 s, none after 260 s.
    seen = {59: 3, 119: 6, 179: 8, 864: 6, 925: 4, 986: 3, 1047: 2, 1106: 1}
    rule, replicas, changes = Keda(1, 8), 1, []
    for now in range(0, 1200, 5):
        batches = 0.5 if now < 30 else 6 if now < 260 else 0
        wanted = rule.wanted(now, replicas, [Figures(0, round(batches * 100), 100)])
        if wanted != replicas:
            changes.append((now, wanted))
        replicas = wanted
    assert [count for _, count in changes] == list(seen.values())
    # A change comes with the first synchronisation after a period, which is not a multiple of these.
    passed = [[after - before for before, after in itertools.pairwise(times)] for times in (dict(changes), seen)]
    assert passed[0] == pytest.approx(passed[1], abs=5)


def test_a_replica_is_taken_away_as_the_deployment_does_it() -> None:
    from benchmarks.fleet_simulation import parse

    pause = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    timeout = {each["name"]: each.get("value") for each in container()["env"]}["SERVING_SHUTDOWN_TIMEOUT"]
    assert timeout is not None
    assert parse([]).drain == pause + int(timeout) <= pod()["terminationGracePeriodSeconds"]


# -- arrivals ----------------------------------------------------------------------------------------------------------


def test_arrivals_have_their_rate_and_mean_lengths_and_follow_from_the_seed() -> None:
    first, second = (list(arrivals(steady(20), 20, 2000, Lengths(500, 300), seed)) for seed in (1, 1))
    assert first == second
    assert len(first) == pytest.approx(40_000, rel=0.03)
    assert statistics.mean(each.prompt_tokens for each in first) == pytest.approx(500, rel=0.03)
    assert statistics.mean(each.output_tokens for each in first) == pytest.approx(300, rel=0.03)
    assert all(one.arrived < other.arrived for one, other in itertools.pairwise(first))


def test_a_trace_of_azure_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,0\n"
    )
    read = [(each.arrived, each.prompt_tokens, each.output_tokens) for each in read_trace(file, speed=2)]
    assert read == [(0, 374, 44), (pytest.approx(2.157289), 396, 1)]


# -- A simulated replica is a server's queue and batch: the same requests take as long in both -------------------------


@pytest.mark.parametrize("seed", [1, 7])
def test_a_simulated_replica_has_the_figures_of_a_server(hosts: Hosts, tokenizer: Tokenizer, seed: int) -> None:
    def measure(planned: Sequence[Request]) -> Measured:
        return Measured(Result(0, 60, virtual_time.run(_send(hosts, tokenizer, planned))))

    rows = compare(ALONE, 60, seed, measure)
    assert sum(row.measured > 0 for row in rows) == 5
    assert {row.name: row.off for row in rows if row.off > 0.02} == {}


async def _send(hosts: Hosts, tokenizer: Tokenizer, planned: Sequence[Request]) -> list[Request]:
    """What `compare` does with a real server, in virtual time."""
    hosts.alone, hosts.step_seconds = True, 1 / ALONE.steps_per_second
    service = await loaded(tokenizer, max_rolling_batch_size=PLACES, job_queue_size=len(planned))
    done = list(await asyncio.gather(*(_one(service, request) for request in planned)))
    await service.close()
    return done


async def _one(service: ModelService, request: Request) -> Request:
    clock = asyncio.get_running_loop().time
    times: list[float] = []
    ended = asyncio.Event()

    def took(update: OutputChunk) -> None:
        times.append(clock())
        if update.finished is not None:
            ended.set()

    await asyncio.sleep(request.arrived - clock())
    payload = {"inputs": PROMPT, "parameters": {"max_new_tokens": request.output_tokens}}
    arrived = clock()
    await service.generate(DEFAULT.parse(RawRequest(orjson.dumps(payload), {}), service.model), took)
    await ended.wait()
    return dataclasses.replace(request, arrived=arrived, first_token=times[0], ended=times[-1], outcome="complete")
