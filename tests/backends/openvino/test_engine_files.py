from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.backends.openvino.compiler import COMPILER
from djl_trtllm.backends.openvino.engine_files import (
    NO_ATTENTION,
    NoAttentionError,
    check_engine,
    ir_problems,
    require_attention,
)
from djl_trtllm.engines.manifest import Manifest
from djl_trtllm.errors import EngineMismatchError
from tests.engines.helpers import write_engine_files


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_engine_files(tmp_path / "engine")


def test_an_engine_without_a_manifest_is_no_error(directory: Path) -> None:
    assert check_engine(directory) is None


def test_a_whole_engine_is_its_manifest(directory: Path) -> None:
    manifest = Manifest.of(directory, backend="openvino", checkpoint="x", options={}, versions={}, platform="x86_64")
    manifest.write(directory)
    assert check_engine(directory) == manifest
    assert ir_problems(directory / "openvino_model.xml") == []


def test_the_weights_reach_as_far_as_the_furthest_constant(tmp_path: Path) -> None:
    data = [(0, 10), (500, 100), (20, 30)]
    constants = "".join(f'<data element_type="f16" offset="{at}" size="{size}" />' for at, size in data)
    (tmp_path / "model.xml").write_text(f"<net>{constants}</net>\n")
    (tmp_path / "model.bin").write_bytes(bytes(600))
    assert ir_problems(tmp_path / "model.xml") == []
    (tmp_path / "model.bin").write_bytes(bytes(599))
    assert ir_problems(tmp_path / "model.xml") == ["model.bin: truncated, 599 bytes where model.xml refers to 600"]


def test_weights_are_never_empty(tmp_path: Path) -> None:
    (tmp_path / "model.xml").write_text("<net></net>")
    (tmp_path / "model.bin").touch()
    assert ir_problems(tmp_path / "model.xml") == ["model.bin: truncated, 0 bytes where model.xml refers to 1"]
    (tmp_path / "model.bin").write_bytes(b"x")
    assert ir_problems(tmp_path / "model.xml") == []


def test_files_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    (tmp_path / "model.xml").mkdir()
    (problem,) = ir_problems(tmp_path / "model.xml")
    assert problem.startswith("model.xml: cannot be read (") and "Is a directory" in problem
    (tmp_path / "other.xml").write_text("<net></net>")
    (tmp_path / "other.bin").symlink_to("other.bin")
    (problem,) = ir_problems(tmp_path / "other.xml")
    assert problem.startswith("other.bin: ") and "symbolic links" in problem


def test_truncated_weights_are_named_with_both_sizes_by_the_manifest(directory: Path) -> None:
    Manifest.of(directory, backend="openvino", checkpoint="x", options={}, versions={}, platform="x86_64").write(
        directory
    )
    (directory / "openvino_model.bin").write_bytes(bytes(999))
    with pytest.raises(
        EngineMismatchError, match=r"is damaged:\n  - openvino_model\.bin: truncated, 999 of 1000 bytes"
    ):
        check_engine(directory)


@pytest.mark.parametrize("size", [0, 999])
def test_truncated_weights_are_found_without_a_manifest(directory: Path, size: int) -> None:
    (directory / "openvino_model.bin").write_bytes(bytes(size))
    with pytest.raises(EngineMismatchError) as caught:
        check_engine(directory)
    assert f"openvino_model.bin: truncated, {size} bytes where openvino_model.xml refers to 1000" in str(caught.value)
    assert "copy it again, or compile it again" in str(caught.value)


def test_a_cut_off_model_file_is_found_without_a_manifest(directory: Path) -> None:
    xml = directory / "openvino_model.xml"
    xml.write_bytes(xml.read_bytes()[:40])
    assert ir_problems(xml) == ["openvino_model.xml: not a complete OpenVINO model, 40 bytes that do not end in </net>"]


def test_missing_files_are_named(directory: Path) -> None:
    (directory / "openvino_model.bin").unlink()
    assert ir_problems(directory / "openvino_model.xml") == ["openvino_model.bin: missing"]
    assert ir_problems(directory / "other.xml") == ["other.xml: missing"]


def test_a_model_without_attention_cannot_be_run(directory: Path) -> None:
    xml = directory / "openvino_model.xml"
    with pytest.raises(NoAttentionError, match=rf"^{NO_ATTENTION}: openvino_model\.xml has no attention layer"):
        require_attention(xml)
    xml.write_text('<net><layer type="ScaledDotProductAttention" /></net>')
    require_attention(xml)
    found = COMPILER.cause_of([f"{NO_ATTENTION}: ..."])
    assert found is not None and found[0].name == "unsupported architecture"
