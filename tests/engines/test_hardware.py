from __future__ import annotations

import inspect
from pathlib import Path

import psutil
import pytest
from packaging.version import Version

from djl_trtllm.engines import hardware
from djl_trtllm.engines.hardware import Hardware, available_memory, release_of
from tests.engines.helpers import H200, gpu_machine


def files(directory: Path, **contents: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (directory / name.replace("__", ".")).write_text(content)
    return directory


def member(tmp_path: Path, line: str) -> Path:
    path = tmp_path / "membership"
    path.write_text(line + "\n")
    return path


def test_the_limit_of_a_version_2_group_counts_less_its_droppable_page_cache(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    files(
        root / "app", memory__max="1000000\n", memory__current="700000\n", memory__stat="anon 1\ninactive_file 200000\n"
    )
    assert available_memory(root, member(tmp_path, "0::/app")) == 500_000


def test_the_limit_of_an_ancestor_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    files(root / "pod", memory__max="1000000", memory__current="900000", memory__stat="")
    files(root / "pod" / "app", memory__max="max", memory__current="800000", memory__stat="")
    assert available_memory(root, member(tmp_path, "0::/pod/app")) == 100_000


def test_inside_a_container_the_root_is_the_group(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    files(root, memory__max="1000000", memory__current="400000", memory__stat="")
    assert available_memory(root, member(tmp_path, "0::/docker/not-visible-here")) == 600_000


def test_the_limit_of_a_version_1_group_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    files(
        root / "memory" / "app",
        memory__limit_in_bytes="1000000",
        memory__usage_in_bytes="300000",
        memory__stat="total_inactive_file 100000\n",
    )
    assert available_memory(root, member(tmp_path, "4:cpu,memory:/app")) == 800_000


def test_page_cache_above_the_usage_frees_no_more_than_the_limit(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    files(root, memory__max="1000", memory__current="500", memory__stat="inactive_file 800")
    assert available_memory(root, member(tmp_path, "0::/")) == 1000


def test_usage_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    files(root, memory__max="1000", memory__current="2000", memory__stat="")
    assert available_memory(root, member(tmp_path, "0::/")) == 0


def test_without_limits_the_systems_figure_stands(tmp_path: Path) -> None:
    for membership in (tmp_path / "absent", member(tmp_path, "0::/")):
        assert 0 < available_memory(tmp_path / "cgroup", membership) <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("version", "there"),
    [("1.0.0", True), ("1.2.1", True), ("1.2.1+cu130", True), ("1.3.0rc20", True), ("1.3.0rc20.post1", True),
     ("1.3.0rc21", False), ("1.3.0", False), ("1.4.0rc0", False), ("of unknown version", True), (None, False)],
)  # fmt: skip
def test_where_files_do_not_tell_the_version_does(version: str | None, there: bool) -> None:
    assert gpu_machine(version).has_engine_backend is there


def test_a_local_version_is_the_release_it_was_built_from() -> None:
    assert release_of("1.2.1+cu130") == Version("1.2.1") != release_of("1.2.1rc1")
    assert release_of("of unknown version") is None and release_of(None) is None


def test_probing_asks_for_gpus_driver_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(hardware, "visible_gpus", lambda environ: ((H200,), environ["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setattr(hardware, "available_memory", lambda: 77)
    found = Hardware.probe()
    assert (found.gpus, found.driver, found.available_memory) == ((H200,), "0", 77)


def test_the_limits_are_those_of_this_process() -> None:
    assert inspect.signature(available_memory).parameters["cgroup"].default == Path("/sys/fs/cgroup")
    assert inspect.signature(available_memory).parameters["membership"].default == Path("/proc/self/cgroup")
    assert 0 < available_memory() <= psutil.virtual_memory().total
