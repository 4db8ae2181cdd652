from __future__ import annotations

import json
from pathlib import Path

import pytest

from djl_trtllm.engine.manifest import Manifest
from djl_trtllm.errors import EngineMismatchError

from .helpers import write_engine_files

VERSIONS = {"openvino": "2026.4.0", "openvino-genai": "2026.4.0.0"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_engine_files(tmp_path / "engine")


def described(directory: Path) -> Manifest:
    options = {"dtype": "fp16", "quantize": "int8"}
    manifest = Manifest.of(
        directory,
        backend="openvino",
        checkpoint="sha256:abc",
        options=options,
        versions=VERSIONS,
        platform="x86_64",
    )
    manifest.write(directory)
    return manifest


def test_what_was_written_is_read_back(directory: Path) -> None:
    manifest = described(directory)
    assert Manifest.read(directory) == manifest
    assert set(manifest.files) == {"openvino_model.xml", "openvino_model.bin"}
    assert (manifest.versions, manifest.platform) == (VERSIONS, "x86_64")
    assert manifest.created


def test_no_manifest_is_none(directory: Path) -> None:
    assert Manifest.read(directory) is None
    assert Manifest.read(directory / "nowhere") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\xfe"])
def test_a_broken_manifest_is_named_as_broken(directory: Path, content: bytes) -> None:
    (directory / "manifest.json").write_bytes(content)
    with pytest.raises(EngineMismatchError, match=r"manifest\.json is broken .*compile the engine again"):
        Manifest.read(directory)


def test_a_manifest_of_another_format_says_which(directory: Path) -> None:
    described(directory)
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(EngineMismatchError, match=r"has format 99, this version of djl-trtllm reads format 1"):
        Manifest.read(directory)


def test_fields_of_later_versions_are_no_error(directory: Path) -> None:
    manifest = described(directory)
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gpu": "H200"}))
    assert Manifest.read(directory) == manifest


def test_a_whole_directory_verifies(directory: Path) -> None:
    assert described(directory).verify(directory) == []


def test_each_bad_file_is_named_with_what_is_wrong(directory: Path) -> None:
    manifest = described(directory)
    (directory / "openvino_model.xml").unlink()
    (directory / "openvino_model.bin").write_bytes(bytes(400))
    assert manifest.verify(directory) == [
        "openvino_model.bin: truncated, 400 of 1000 bytes",
        "openvino_model.xml: missing",
    ]


def test_a_changed_byte_is_found_by_contents_and_not_by_sizes(directory: Path) -> None:
    manifest = described(directory)
    (directory / "openvino_model.bin").write_bytes(b"x" + bytes(999))
    assert manifest.verify(directory, contents=False) == []
    assert manifest.verify(directory) == ["openvino_model.bin: changed, same size and another SHA-256"]


def test_differences_name_the_option_what_the_engine_has_and_what_was_asked(directory: Path) -> None:
    lines = described(directory).differences(
        backend="tensorrt", checkpoint="sha256:def", options={"quantize": "none", "dtype": "fp16"}
    )
    assert lines == [
        "option.backend: engine has openvino, asked for tensorrt",
        "checkpoint: engine was made from sha256:abc, this one is sha256:def",
        "option.quantize: engine has int8, asked for none",
    ]


@pytest.mark.parametrize(
    ("installed", "differs"),
    [("2026.3.0", True), ("2025.4.1", True), ("2026.4.0", False), ("2026.4.9", False), ("2027.1.0", False)],
)
def test_only_an_older_runtime_differs(directory: Path, installed: str, differs: bool) -> None:
    manifest = described(directory)
    manifest.versions["openvino"] = "2026.4.1-1-abc"
    lines = manifest.differences(versions={"openvino": installed, "something-else": "1.0"})
    expected = f"openvino: engine was made with 2026.4.1-1-abc, installed is the older {installed}"
    assert lines == ([expected] if differs else [])
