from __future__ import annotations

import pytest

from djl_trtllm.config.tables import read_table


@pytest.mark.parametrize("name", ["legacy.toml", "triton.toml", "truss.toml", "variables.toml"])
def test_a_table_is_text_lists_and_sections(name: str) -> None:
    assert all(isinstance(value, (dict, list)) for value in read_table(name).values())


def test_a_table_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        read_table("none.toml")
