"""Machines as a command line names them."""

from __future__ import annotations

import pytest

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.gpus import GPUS, INSTANCES
from djl_trtllm.sizing.machines import aws_machines, bytes_of, known_gpus, of_gpu, of_instance, of_memory, split

GIB = 1 << 30


def test_a_gpu_may_have_a_count() -> None:
    one, eight = of_gpu("h200"), of_gpu("NVIDIA-H200:8")
    assert (one.name, one.gpus, eight.gpus) == ("H200", None, 8)
    assert one.memory == eight.memory == GPUS["H200"].memory
    assert (one.compute_capability, one.known, one.hourly_price, one.host_memory) == ((9, 0), GPUS["H200"], None, None)
    assert (str(one), str(eight)) == ("H200 with 140.4 GiB", "8 x H200 with 140.4 GiB")


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("h100x2", "H100", 2),
        ("8xH100", "H100", 8),
        ("1024xh100", "H100", 1024),
        (" NVIDIA A100 40GB: 4 ", "A100-40GB", 4),
        ("l40sX2", "L40S", 2),
        ("rtx4090", "RTX4090", None),
        ("RTX4090x2", "RTX4090", 2),
    ],
)
def test_a_count_stands_before_or_after_the_name(text: str, name: str, count: int | None) -> None:
    machine = of_gpu(text)
    assert (machine.gpu, machine.gpus) == (name, count)


def test_one_count_is_enough() -> None:
    with pytest.raises(SizingError, match="8xh200:2: 8 and 2 is no number of GPUs"):
        of_gpu("8xh200:2")


@pytest.mark.parametrize("count", ["0", "-1", "two", "", "1.5", "1025", "\u0663"])
def test_a_count_that_is_no_number_of_gpus_is_refused(count: str) -> None:
    with pytest.raises(SizingError, match=f"h200:{count}: {count or 'nothing'} is no number of GPUs.*as H200:8"):
        of_gpu(f"h200:{count}")


def test_an_instance_type_has_gpus_a_price_and_a_host() -> None:
    machine = of_instance("ml.g5.12xl")
    assert str(machine) == "g5.12xlarge: 4 x A10G with 22.5 GiB"
    assert (machine.gpus, machine.hourly_price, machine.host_memory) == (4, 5.672, 192 * GIB)
    assert machine.known is INSTANCES["g5.12xlarge"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("85520809984", 85520809984), ("80GB", 80 * 10**9), (" 22.5 GiB ", int(22.5 * GIB)), ("24576mib", 24 * GIB)],
)
def test_memory_is_bytes_or_has_a_unit(text: str, size: int) -> None:
    machine = of_memory(text)
    assert (machine.memory, machine.gpus, machine.known) == (size, None, None)
    assert machine.name == f"a GPU of {size / GIB:.1f} GiB"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("80", "80: 80 bytes are no memory of a GPU; write a unit, as 80GB"),
        ("", "no memory: expected the memory of a GPU in bytes"),
        ("80 parsec", "80 parsec: expected the memory of a GPU in bytes, or with a unit, as 80GB or 22.5GiB"),
        ("-5GB", "-5GB: expected the memory"),
    ],
)
def test_other_memory_is_refused(text: str, message: str) -> None:
    with pytest.raises(SizingError, match=message):
        of_memory(text)


def test_all_instance_types_are_in_order_of_price() -> None:
    machines = aws_machines()
    assert len(machines) == len(INSTANCES)
    prices = [machine.hourly_price for machine in machines]
    known = [price for price in prices if price is not None]
    assert known == sorted(known) and prices[: len(known)] == known
    assert [machine.gpu for machine in known_gpus()] == list(GPUS)


def test_values_are_given_several_times_or_with_commas() -> None:
    assert split(["a, b", "c", ""]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("unit", "size"),
    [
        ("", 1),
        ("b", 1),
        ("kb", 10**3),
        ("mb", 10**6),
        ("gb", 10**9),
        ("tb", 10**12),
        ("kib", 1 << 10),
        ("mib", 1 << 20),
        ("gib", 1 << 30),
    ],
)
def test_units_are_those_of_the_standards(unit: str, size: int) -> None:
    assert bytes_of(f"3{unit}") == 3 * size
    assert bytes_of(f"3 {unit.upper()}") == 3 * size


def test_one_gib_is_enough_to_be_a_gpu() -> None:
    assert of_memory("1GiB").memory == GIB
    with pytest.raises(SizingError, match="are no memory of a GPU"):
        of_memory(str(GIB - 1))
