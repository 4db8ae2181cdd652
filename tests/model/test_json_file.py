"""JSON files of a model, whole, damaged or not fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.errors import LayoutError
from djl_trtllm.model.json_file import is_lfs_pointer, read_object

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


def test_an_object_is_read_with_or_without_a_byte_order_mark(file: Path) -> None:
    for mark in (b"", b"\xef\xbb\xbf"):
        file.write_bytes(mark + '{"name": "Wölfe"}'.encode())
        assert read_object(file, LayoutError) == {"name": "Wölfe"}


def test_a_file_that_is_not_there_is_none(file: Path) -> None:
    assert read_object(file, LayoutError) is None
    assert read_object(file.parent, LayoutError) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON: .*; copy it from the model again"),
        (b"\xff", "is not valid JSON: .*; copy it from the model again"),
        (b"[" * 200_000, "is not valid JSON: .*; copy it from the model again"),
        (b"[1]", "holds a JSON list, expected an object; copy it from the model again"),
        (POINTER, "is a Git LFS pointer, not the file; fetch the files with `git lfs pull`"),
    ],
)
def test_anything_else_is_an_error_that_names_the_file(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(LayoutError, match=rf"config\.json.* {message}"):
        read_object(file, LayoutError)


def test_only_a_small_file_that_begins_as_one_is_a_pointer(file: Path) -> None:
    for content, is_pointer in (
        (POINTER, True),
        (POINTER.ljust(1024), True),
        (POINTER.ljust(1025), False),
        (b" " + POINTER, False),
    ):
        file.write_bytes(content)
        assert is_lfs_pointer(file) is is_pointer, content
