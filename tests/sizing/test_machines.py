"""Machines as a command line names them."""

from __future__ import annotations

import pytest

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.machines import (
    GPUS,
    INSTANCES,
    PRICES,
    aws_machines,
    bytes_of,
    gpu_found,
    gpu_named,
    instance_named,
    of_gpu,
    of_instance,
    of_memory,
    split,
)
from tests.support.tables import by_rows, by_table

# -- GPUs and instance types by the names that people and NVML give them --


MIB, GIB = 1 << 20, 1 << 30


@by_table("text", "name")
def test_a_gpu_is_named_as_people_write_it(text: str, name: str) -> None:
    assert gpu_named(text).name == name


@by_table("text", "message")
def test_another_name_is_refused_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(SizingError, match=message):
        gpu_named(text)


@by_table("name", "mib", "found")
def test_a_gpu_is_found_by_what_nvml_reports(name: str | None, mib: int | None, found: str | None) -> None:
    model = gpu_found(name, None if mib is None else mib * MIB)
    assert (model and model.name) == found


@by_rows("text", ["g5.12xlarge", "g5.12xl", "ml.g5.12xlarge", "ml.g5.12xl", " G5.12XLarge ", "ML.G5.12XL"])
def test_an_instance_type_has_several_spellings(text: str) -> None:
    found = instance_named(text)
    assert (found.name, found.gpu.name, found.gpus) == ("g5.12xlarge", "A10G", 4)
    assert found.host_memory == 192 << 30
    assert found.hourly_price == 5.672


def test_the_smallest_sizes_are_read_too() -> None:
    assert instance_named("g5.xl").name == "g5.xlarge"
    assert instance_named("g4dn.metal").gpus == 8
    assert instance_named("p6-b200.48xl").gpu.name == "B200"
    assert instance_named("p5e.48xlarge").hourly_price is None


@by_table("text", "message")
def test_another_instance_type_is_refused_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(SizingError, match=message):
        instance_named(text)


def test_every_instance_type_has_a_gpu_of_the_table_and_prices_say_which_they_are() -> None:
    assert all(instance.gpu is GPUS[instance.gpu.name] for instance in INSTANCES.values())
    assert str(PRICES) == "EC2 on demand, Linux, USD per hour, us-east-1, 2026-07-20"
    assert all(instance.hourly_price is None or instance.hourly_price > 0 for instance in INSTANCES.values())


def test_a_gpu_may_have_a_count() -> None:
    one, eight = of_gpu("h200"), of_gpu("NVIDIA-H200:8")
    assert (one.name, one.gpus, eight.gpus) == ("H200", None, 8)
    assert one.memory == eight.memory == GPUS["H200"].memory
    assert (one.compute_capability, one.known, one.hourly_price, one.host_memory) == ((9, 0), GPUS["H200"], None, None)
    assert (str(one), str(eight)) == ("H200 with 140.4 GiB", "8 x H200 with 140.4 GiB")


@by_table("text", "name", "count")
def test_a_count_stands_before_or_after_the_name(text: str, name: str, count: int | None) -> None:
    machine = of_gpu(text)
    assert (machine.gpu, machine.gpus) == (name, count)


@by_rows("count", ["0", "-1", "two", "", "1.5", "1025", "\u0663"])
def test_a_count_that_is_no_number_of_gpus_is_refused(count: str) -> None:
    expected = f"h200:{count}: expected 1 to 1024 GPUs, as H200:8, and not {count or 'nothing'}"
    with pytest.raises(SizingError, match=expected):
        of_gpu(f"h200:{count}")
    with pytest.raises(SizingError, match=r"8xh200:2: expected 1 to 1024 GPUs.*8 and 2"):
        of_gpu("8xh200:2")


def test_an_instance_type_has_gpus_a_price_and_a_host() -> None:
    machine = of_instance("ml.g5.12xl")
    assert str(machine) == "g5.12xlarge: 4 x A10G with 22.5 GiB"
    assert (machine.gpus, machine.hourly_price, machine.host_memory) == (4, 5.672, 192 * GIB)
    assert machine.known is INSTANCES["g5.12xlarge"]


@by_table("text", "size")
def test_memory_is_bytes_or_has_a_unit(text: str, size: int) -> None:
    machine = of_memory(text)
    assert (machine.memory, machine.gpus, machine.known) == (size, None, None)
    assert machine.name == f"a GPU of {size / GIB:.1f} GiB"
    assert of_memory("1GiB").memory == GIB
    with pytest.raises(SizingError, match="write a unit, as "):
        of_memory(str(GIB - 1))


@by_table("text", "message")
def test_other_memory_is_refused(text: str, message: str) -> None:
    with pytest.raises(SizingError, match=message):
        of_memory(text)


def test_all_instance_types_are_in_order_of_price() -> None:
    machines = aws_machines()
    assert len(machines) == len(INSTANCES)
    prices = [machine.hourly_price for machine in machines]
    known = [price for price in prices if price is not None]
    assert known == sorted(known) and prices[: len(known)] == known


def test_values_are_given_several_times_or_with_commas() -> None:
    assert split(["a, b", "c", ""]) == ["a", "b", "c"]


@by_table("unit", "size")
def test_units_are_those_of_the_standards(unit: str, size: int) -> None:
    assert bytes_of(f"3{unit}") == 3 * size
    assert bytes_of(f"3 {unit.upper()}") == 3 * size
