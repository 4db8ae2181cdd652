"""Files that one can read in one go."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 400


def test_no_python_file_is_longer_than_400_lines() -> None:
    files = [
        file for folder in ("djl_trtllm", "tests", "tools", "benchmarks") for file in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 400
    lengths = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {name: length for name, length in sorted(lengths.items()) if length > MOST_LINES} == {}
