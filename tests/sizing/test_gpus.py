"""GPUs and instance types by the names that people and NVML give them."""

from __future__ import annotations

import pytest

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.gpus import GPUS, INSTANCES, PRICES, gpu_found, gpu_named, instance_named

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h200", "H200"),
        ("NVIDIA H100", "H100"),
        ("a100", "A100-80GB"),
        ("A100-40GB", "A100-40GB"),
        ("a100_80gb", "A100-80GB"),
        ("rtx-4090", "RTX4090"),
        ("h100-nvl", "H100-NVL"),
    ],
)
def test_a_gpu_is_named_as_people_write_it(text: str, name: str) -> None:
    assert gpu_named(text).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h201", "h201: expected a GPU: did you mean h20 or h200"),
        ("", "no GPU: expected a GPU: known are t4, a100-40gb"),
        ("mi300x", "mi300x: expected a GPU: known are t4"),
    ],
)
def test_another_name_is_refused_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(SizingError, match=message):
        gpu_named(text)


@pytest.mark.parametrize(
    ("name", "mib", "found"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA A100-SXM4-40GB", None, "A100-40GB"),
        ("A100-PCIE-40GB", 40536, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 81251, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", None, "A100-80GB"),
        ("NVIDIA A100", None, None),
        ("NVIDIA A10G", 23028, "A10G"),
        ("NVIDIA A10", 23028, "A10"),
        ("NVIDIA A10G-24Q", 23028, "A10G"),
        ("NVIDIA L4", 23034, "L4"),
        ("NVIDIA L40S", 46068, "L40S"),
        ("NVIDIA L40", 49140, "L40"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100"),
        ("NVIDIA H100 NVL", 95830, "H100-NVL"),
        ("NVIDIA H100 PCIe", 81559, "H100"),
        ("NVIDIA H200", 143771, "H200"),
        ("NVIDIA GH200 480GB", 97871, "GH200"),
        ("NVIDIA B300 SXM6 AC", 275040, "B300"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "RTXPRO6000"),
        ("Tesla T4", 15109, "T4"),
        ("NVIDIA H100 80GB HBM3", 40000, None),
        ("NVIDIA RTX 6000 Ada Generation", 49140, None),
        (None, 81559, None),
    ],
)
def test_a_gpu_is_found_by_what_nvml_reports(name: str | None, mib: int | None, found: str | None) -> None:
    model = gpu_found(name, None if mib is None else mib * MIB)
    assert (model and model.name) == found


@pytest.mark.parametrize(
    "text", ["g5.12xlarge", "g5.12xl", "ml.g5.12xlarge", "ml.g5.12xl", " G5.12XLarge ", "ML.G5.12XL"]
)
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("g5.13xlarge", "g5.13xlarge: expected an AWS instance type with GPUs: did you mean g5.1"),
        ("m5.large", "m5.large: expected an AWS instance type with GPUs"),
        ("", "no instance: expected an AWS instance type with GPUs: known are g4dn.xlarge"),
    ],
)
def test_another_instance_type_is_refused_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(SizingError, match=message):
        instance_named(text)


def test_every_instance_type_has_a_gpu_of_the_table_and_prices_say_which_they_are() -> None:
    assert all(instance.gpu is GPUS[instance.gpu.name] for instance in INSTANCES.values())
    assert str(PRICES) == "EC2 on demand, Linux, USD per hour, us-east-1, 2026-07-20"
    assert all(instance.hourly_price is None or instance.hourly_price > 0 for instance in INSTANCES.values())


def test_memory_is_what_nvml_reports() -> None:
    assert {name: GPUS[name].memory // MIB for name in ("A10G", "A100-40GB", "H100", "H200", "GB300")} == {
        "A10G": 23028,
        "A100-40GB": 40960,
        "H100": 81559,
        "H200": 143771,
        "GB300": 284208,
    }


def test_a_longer_name_is_another_gpu() -> None:
    for name in ("NVIDIA H100 NVL", "NVIDIA H100"):
        found = gpu_found(name, None)
        assert found is not None and f"NVIDIA {found.nvml}" == name
