from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from djl_trtllm.errors import LayoutError
from djl_trtllm.model import weights


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    numpy = pytest.importorskip("numpy")
    file = tmp_path / "model.safetensors"
    save_file({"a": numpy.zeros((3, 5), numpy.float16), "b": numpy.zeros(7, numpy.float32)}, file, {"format": "pt"})
    return file


def test_the_header_of_a_real_file(saved: Path) -> None:
    header = weights.read_header(saved)
    assert header["a"]["shape"] == [3, 5]
    assert weights.parameter_bytes((saved,)) == 3 * 5 * 2 + 7 * 4


def test_a_prefix_of_a_file_is_never_whole(saved: Path) -> None:
    data = saved.read_bytes()
    for length in range(len(data)):
        saved.write_bytes(data[:length])
        with pytest.raises(LayoutError, match=r"truncated|not a safetensors file"):
            weights.read_header(saved)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data_offsets", "a"]), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_a_header_of_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    encoded = json.dumps(value).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    try:
        assert isinstance(weights.read_header(file), dict)
        weights.parameter_bytes((file,))
    except LayoutError as error:
        assert str(file) in str(error)


def test_other_formats_count_by_their_size(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(100))
    assert weights.parameter_bytes((tmp_path / "pytorch_model.bin",)) == 100
    assert weights.parameter_bytes(()) is None


def test_an_empty_weight_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(LayoutError, match="is empty"):
        weights.find_weights(tmp_path)


def test_weights_of_another_library_are_not_counted_twice(saved: Path) -> None:
    (saved.parent / "consolidated.safetensors").write_bytes(saved.read_bytes())
    assert weights.find_weights(saved.parent) == (saved,)


def test_a_truncated_pytorch_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(1000))
    assert weights.find_weights(tmp_path) == (file,)
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(LayoutError, match=r"pytorch_model\.bin is truncated: 900 bytes of a PyTorch file"):
        weights.find_weights(tmp_path)
