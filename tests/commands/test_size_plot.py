"""The picture: it is written, has its labels, and what cannot be drawn is an error."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from djl_trtllm.commands.size_plot import _apart, draw
from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.machines import of_gpu, of_instance
from tests.commands.sized import BIG, described, report


def test_a_picture_has_parts_numbers_and_capacity(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    found = report(described(tmp_path / "model"), of_instance("g5.12xlarge"))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(tmp_path / "size.svg", found)
    text = (tmp_path / "size.svg").read_text()
    for label in ("weights", "activations", "overhead", "KV cache", "unused"):
        assert label in text
    assert "model on g5.12xlarge: 4 x A10G with 22.5 GiB, tensor parallel 1" in text
    assert "max_num_tokens 16,384" in text and "largest, measured: 24,000" in text
    assert f"{found.kv_tokens:,} tokens in the KV cache" in text


def test_a_png_is_written_too_and_out_of_memory_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "size.png", report(described(tmp_path / "model", **BIG), of_instance("g5.48xlarge"), 8))
    assert (tmp_path / "size.png").read_bytes().startswith(b"\x89PNG")


def test_other_files_and_places_are_refused(tmp_path: Path) -> None:
    found = report(described(tmp_path / "model"), of_gpu("h100"))
    with pytest.raises(SizingError, match=r"size\.pdf: expected a name that ends with \.png or \.svg"):
        draw(tmp_path / "size.pdf", found)
    pytest.importorskip("matplotlib")
    with pytest.raises(SizingError, match="cannot write it"):
        draw(tmp_path / "missing" / "size.png", found)


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(SizingError, match=r"pip install 'djl-trtllm\[plot\]'"):
        draw(tmp_path / "size.png", report(described(tmp_path / "model"), of_gpu("h100")))


def test_labels_do_not_overlap_and_stay_in_the_picture() -> None:
    positions = _apart([10, 10.1, 10.2, 17.9, 18], 18)
    assert positions == sorted(positions)
    assert all(second - first >= 0.999 for first, second in itertools.pairwise(positions))
    assert positions[-1] <= 18 * 1.04
