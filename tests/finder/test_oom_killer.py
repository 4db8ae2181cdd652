"""What the kernel killed."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.finder.oom_killer import oom_kills


def test_the_control_group_counts_its_own_kills(tmp_path: Path) -> None:
    own = tmp_path / "cgroup" / "X:a" / "b"
    own.mkdir(parents=True)
    (tmp_path / "membership").write_text("4:memory:/other\n0::/X:a/b\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 40\n")
    arguments = (tmp_path / "cgroup", tmp_path / "vmstat", tmp_path / "membership")
    assert oom_kills(*arguments) == 40
    (tmp_path / "cgroup" / "memory.events").write_text("low 0\noom 9\noom_kill 3\n")
    assert oom_kills(*arguments) == 3
    (own / "memory.events").write_text("oom_kill 2\noom_group_kill 0\n")
    assert oom_kills(*arguments) == 2


def test_where_the_kernel_does_not_say_there_are_no_kills(tmp_path: Path) -> None:
    assert oom_kills(tmp_path, tmp_path / "none", tmp_path / "none") == 0
    (tmp_path / "vmstat").write_text("oom_kill many\n")
    assert oom_kills(tmp_path, tmp_path / "vmstat", tmp_path / "none") == 0


def test_this_machine_says_something() -> None:
    assert oom_kills() >= 0
