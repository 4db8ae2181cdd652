from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.api.openai.tool_parameters import TOOLS
from djl_trtllm.api.parameters import Problems, Table
from tests.api.tables import check_rows

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
TABLE = Table(TOOLS)


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"tools": []}, {"tools": []}),
        ({"tools": [TOOL] * 128}, {"tools": [TOOL] * 128}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": TOOL}, {"tool_choice": {"name": "f"}}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"tools": None, "tool_choice": None}, {}),
    ],
)
def test_tools_are_read(given: dict[str, Any], values: dict[str, Any]) -> None:
    problems = Problems()
    assert TABLE.read(given, problems, "field") == values
    assert problems == Problems()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tools": {}}, "'tools' is {}: expected a list of up to 128"),
        ({"tools": [TOOL] * 129}, "'tools'"),
        ({"tools": [TOOL, {"type": "retrieval"}]}, "number 1"),
        ({"tools": [3]}, "number 0"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "number 0"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 257}}]}, "number 0"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "parameters of f"),
        ({"tool_choice": "any"}, '\'tool_choice\' is "any": expected "none", "auto", "required" or'),
        ({"tool_choice": {"type": "function"}}, "'tool_choice'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "'tool_choice'"),
        ({"parallel_tool_calls": 1}, "'parallel_tool_calls' is 1: expected true or false"),
    ],
)
def test_what_is_no_tool_is_refused(given: dict[str, Any], named: str) -> None:
    problems = Problems()
    TABLE.read(given, problems, "field")
    assert len(problems.invalid) == 1 and named in problems.invalid[0]


def test_the_rows() -> None:
    check_rows("openai-tools", TOOLS)
