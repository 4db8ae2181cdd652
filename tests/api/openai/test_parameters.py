from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.api.openai.parameters import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    STREAM_OPTIONS,
    TOKENIZE_FIELDS,
)
from djl_trtllm.api.parameters import Problems, Table
from tests.api.tables import check_tables

NO_MEANING: dict[str, Any] = {
    "user": "u",
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "reasoning_effort": "low",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prediction": {"type": "content", "content": "x"},
    "verbosity": "low",
}


@pytest.mark.parametrize("table", [CHAT_FIELDS, COMPLETION_FIELDS])
def test_fields_for_openais_own_service_are_accepted(table: Table) -> None:
    problems = Problems()
    assert table.read(NO_MEANING, problems, "field") == {}
    assert problems == Problems()


def test_parallel_tool_calls_mean_nothing_to_a_completion() -> None:
    problems = Problems()
    assert COMPLETION_FIELDS.read({"parallel_tool_calls": False}, problems, "field") == {}
    assert problems == Problems()


def test_the_tables() -> None:
    check_tables(
        "openai",
        chat=CHAT_FIELDS,
        completion=COMPLETION_FIELDS,
        stream_options=STREAM_OPTIONS,
        tokenize=TOKENIZE_FIELDS,
        detokenize=DETOKENIZE_FIELDS,
    )


@pytest.mark.parametrize(("value", "problems"), [(["text"], 0), (["text", "audio"], 1), ("text", 1), ([], 1)])
def test_text_is_the_only_modality(value: Any, problems: int) -> None:
    found = Problems()
    CHAT_FIELDS.read({"modalities": value}, found, "field")
    assert len(found.invalid) == problems
