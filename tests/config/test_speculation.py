"""Every spelling of speculation resolves to one value, and what makes none is one line."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.config import load
from djl_trtllm.config.speculation import Speculation, speculation_of
from djl_trtllm.errors import ConfigError
from tests.support.tables import by_table


def found(folder: Path, text: str) -> Speculation | None:
    (folder / "drafts.yaml").write_text("method: eagle3\nnum_speculative_tokens: 3\nmodel: org/head\n")
    (folder / "serving.properties").write_text(text.replace(";", "\n"))
    return speculation_of(load(folder, {}))


@by_table("text", "expected")
def test_each_spelling_is_the_same_value(tmp_path: Path, text: str, expected: dict[str, Any] | None) -> None:
    speculation = found(tmp_path, text)
    if speculation is None or expected is None:
        assert (speculation is None) == (expected is None)
        return
    unset: dict[str, Any] = {"extra": {}, **dict.fromkeys(asdict(speculation))}
    assert asdict(speculation) == {**unset, "setting": speculation.setting, "extra": {}, **expected}
    assert speculation.setting.startswith("option.") and "serving.properties:" in speculation.setting


@by_table("text", "said")
def test_what_is_no_speculation_is_one_line_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        found(tmp_path, text)
    (problem,) = refused.value.problems
    assert said in problem and "serving.properties:" in problem
