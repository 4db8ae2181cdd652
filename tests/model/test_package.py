"""`model.tar.gz` made of a directory."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from djl_trtllm.errors import ModelError
from djl_trtllm.model.archive import extract
from djl_trtllm.model.package import package


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "engine").mkdir(parents=True)
    (directory / "serving.properties").write_text("option.max_input_len=256\n")
    (directory / "engine" / "model.bin").write_bytes(bytes(range(256)) * 100)
    (directory / "run.sh").write_text("#!/bin/sh\n")
    (directory / "run.sh").chmod(0o755)
    (directory / "__pycache__").mkdir()
    (directory / "__pycache__" / "x.pyc").write_bytes(b"x")
    (directory / ".git").mkdir()
    (directory / ".git" / "config").write_text("")
    return directory


def test_an_archive_holds_the_files_at_its_top(model: Path, tmp_path: Path) -> None:
    names = package(model, tmp_path / "model.tar.gz")
    assert names == ["engine/model.bin", "run.sh", "serving.properties"]
    opened = extract(tmp_path / "model.tar.gz", tmp_path / "opened")
    assert (opened / "engine" / "model.bin").read_bytes() == (model / "engine" / "model.bin").read_bytes()
    assert os.access(opened / "run.sh", os.X_OK)


def test_the_same_files_make_the_same_bytes(model: Path, tmp_path: Path) -> None:
    package(model, tmp_path / "a.tar.gz")
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    package(copy, tmp_path / "b.tar.gz")
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()


def test_an_archive_inside_its_own_directory_does_not_hold_itself(model: Path) -> None:
    package(model, model / "model.tar.gz")
    assert package(model, model / "model.tar.gz") == ["engine/model.bin", "run.sh", "serving.properties"]


def test_links_inside_are_followed_and_links_out_are_refused(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").symlink_to(model / "serving.properties")
    assert "tokenizer.json" in package(model, tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert all(member.isreg() for member in archive)
    (model / "secret").symlink_to("/etc/passwd")
    with pytest.raises(ModelError, match="is a link out of"):
        package(model, tmp_path / "b.tar.gz")
    assert not list(tmp_path.glob("*b.tar.gz*"))


def test_nothing_to_pack_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no files to pack"):
        package(tmp_path / "empty", tmp_path / "model.tar.gz")


def test_an_archive_that_cannot_be_written_is_an_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot write"):
        package(model, tmp_path / "missing" / "model.tar.gz")
