from __future__ import annotations

from djl_trtllm.commands.columns import columns


def test_cells_are_aligned_and_lines_have_no_space_at_their_end() -> None:
    rows = [("name", "GiB", ""), ("a", "10.5", "note"), ("long name", "1.5", "")]
    assert columns(rows, right=(1,), indent="  ") == [
        "  name        GiB",
        "  a          10.5  note",
        "  long name   1.5",
    ]
    assert columns([]) == []
