from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from djl_trtllm.bench.figures import Figures
from djl_trtllm.bench.sweep import Sweep, find_knee


def swept(throughput: Callable[[int], float], most: int = 1024, stop_at: int | None = None) -> tuple[Sweep, list[int]]:
    """A sweep of a server with this throughput by number of clients, and the numbers in the order of measuring."""
    order: list[int] = []

    async def measure(clients: int) -> Figures:
        order.append(clients)
        figures = Figures(f"{clients} clients", begin=0.0, end=1.0, sent=1, tokens=round(1000 * throughput(clients)))
        figures.complete = clients != stop_at
        return figures

    sweep = Sweep()
    asyncio.run(find_knee(measure, most, sweep))
    return sweep, order


@pytest.mark.parametrize("places", [1, 2, 3, 7, 12, 24, 60, 100, 256, 300])
def test_the_knee_is_within_ten_percent_of_the_places_of_the_batch(places: int) -> None:
    sweep, order = swept(lambda clients: 5.0 * min(clients, places))
    assert sweep.knee is not None
    assert places * 0.9 - 0.5 <= sweep.knee <= places * 1.1
    assert sweep.capacity == pytest.approx(5000.0 * places, rel=0.04)
    assert len(order) <= 16


@pytest.mark.parametrize("places", [24, 100])
def test_noise_of_some_percent_does_not_move_it_far(places: int) -> None:
    sweep, _ = swept(lambda clients: min(clients, places) * (1 + 0.03 * ((clients * 7919) % 3 - 1)))
    assert sweep.knee is not None
    assert places * 0.85 <= sweep.knee <= places * 1.15


def test_clients_double_until_that_brings_no_more() -> None:
    _, order = swept(lambda clients: min(clients, 4))
    assert order[:4] == [1, 2, 4, 8]


def test_throughput_that_falls_under_load_has_its_knee_before() -> None:
    sweep, _ = swept(lambda clients: clients if clients <= 10 else 10 - clients / 100)
    assert sweep.knee is not None and 9 <= sweep.knee <= 11


def test_a_server_that_is_not_saturated_has_no_knee() -> None:
    sweep, order = swept(float, most=50)
    assert sweep.knee is None
    assert order == [1, 2, 4, 8, 16, 32, 50]


def test_an_interrupted_sweep_keeps_what_it_has() -> None:
    sweep, order = swept(float, stop_at=4)
    assert (sweep.knee, sorted(sweep.points), order) == (None, [1, 2, 4], [1, 2, 4])


def test_an_interrupt_between_the_brackets_ends_it_too() -> None:
    sweep, _ = swept(lambda clients: min(clients, 12), stop_at=11)
    assert sweep.knee is None
    assert 11 in sweep.points
