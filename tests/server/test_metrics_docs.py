"""docs/metrics.md lists the metrics that the page has."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.server.test_metrics import GOLDEN

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
MARK = "UPDATE_GOLDEN=1 -->\n"


def table() -> str:
    """A row for each metric of the page of `test_metrics.py`, which has all."""
    text = GOLDEN.read_text()
    rows = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for name, help_text in re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE):
        kind = re.findall(rf"^# TYPE {name} (\w+)$", text, re.MULTILINE)[0]
        sample = re.findall(rf"^{name}(?:_bucket)?(?:\{{(.*)\}})? ", text, re.MULTILINE)[0]
        labels = [label for label in re.findall(r'(\w+)="', sample) if label != "le"]
        rows.append(f"| `{name}` | {kind} | {', '.join(labels)} | {help_text} |")
    rows.append(
        "| `process_*` | gauge, counter | | CPU time, memory, file descriptors and start of the server's process |"
    )
    return "\n".join(rows) + "\n"


def test_the_table_has_what_the_page_has() -> None:
    before, mark, found = PAGE.read_text().partition(MARK)
    assert mark
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(f"{before}{mark}\n{table()}")
        return
    assert found.strip() == table().strip()
