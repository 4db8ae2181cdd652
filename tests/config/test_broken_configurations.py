"""Five broken configurations, as somebody new reads them: every message says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.config import load
from djl_trtllm.errors import ConfigError

BROKEN = Path(__file__).parent / "broken"


def problems_of(case: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(BROKEN / case, {})
    return str(caught.value).replace(str(BROKEN / case) + "/", "")


@pytest.mark.parametrize("case", sorted(path.name for path in BROKEN.iterdir() if path.is_dir()))
def test_the_message_is_the_one_to_be_read(case: str) -> None:
    expected = (BROKEN / case / "message.txt").read_text().rstrip("\n")
    assert problems_of(case) == expected


def test_there_are_five() -> None:
    assert len([path for path in BROKEN.iterdir() if path.is_dir()]) == 5
