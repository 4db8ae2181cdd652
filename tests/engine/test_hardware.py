from __future__ import annotations

from pathlib import Path

import psutil

from djl_trtllm.engine.hardware import Hardware, available_memory


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


def test_usage_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    files(root, memory__max="1000", memory__current="2000", memory__stat="")
    assert available_memory(root, member(tmp_path, "0::/")) == 0


def test_without_limits_the_systems_figure_stands(tmp_path: Path) -> None:
    for membership in (tmp_path / "absent", member(tmp_path, "0::/")):
        assert 0 < available_memory(tmp_path / "cgroup", membership) <= psutil.virtual_memory().total


def test_probing_this_machine_finds_memory() -> None:
    assert Hardware.probe().available_memory > 0
