from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.engines.staging import staged, sweep


def test_a_directory_appears_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "not" / "there" / "out"
    with staged(out) as partial:
        assert list(partial.iterdir()) == [] and not out.exists()
        assert partial.parent == out.parent
        (partial / "file").write_text("content")
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out / "file").read_text() == "content"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_fails_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), staged(tmp_path / "out") as partial:
        (partial / "file").touch()
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_reported_also_where_there_is_nothing_left_to_remove(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), staged(tmp_path / "out") as partial:
        partial.rmdir()
        raise ValueError("mine")


def test_a_directory_with_content_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(OSError, match="not empty"), staged(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_two_builders_do_not_meet(tmp_path: Path) -> None:
    with staged(tmp_path / "out") as one, staged(tmp_path / "other") as other, staged(tmp_path / "out") as two:
        assert len({one, two, other}) == 3
        one.rmdir()
        with pytest.raises(FileExistsError):
            two.mkdir()
        one.mkdir()
        two.rmdir()
        two.mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_what_killed_builders_left_is_removed_and_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    left = [tmp_path / f".out.{number}.abc.partial" for number in (1, 2)]
    others = [tmp_path / ".another.1.abc.partial", tmp_path / ".out.log", out]
    for path in (*left, *others):
        path.mkdir()
        (path / "file").touch()
    assert sweep(out) == left
    assert sorted(tmp_path.iterdir()) == sorted(others)
    assert sweep(out) == []


def test_what_a_builder_leaves_when_it_is_killed_is_swept(tmp_path: Path) -> None:
    manager = staged(tmp_path / "out")
    partial = manager.__enter__()
    assert sweep(tmp_path / "out") == [partial]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / ".out.1.abc.partial"
    file.touch()
    assert sweep(tmp_path / "out") == [file]
