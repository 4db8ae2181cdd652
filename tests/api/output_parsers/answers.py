"""What a parser finds in a text, and texts that look like calls."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from hypothesis import strategies as st

from djl_trtllm.api.output_parsers import CallArguments, CallStart, Content, OutputParser, Reasoning

MakeParser = Callable[[], OutputParser]


class Answer(NamedTuple):
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""


def parse(parser: OutputParser, *pieces: str) -> Answer:
    content = reasoning = ""
    calls: list[list[str]] = []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(name):
                calls.append([name, ""])
            case CallArguments(text):
                calls[-1][1] += text
        assert not isinstance(event, (Content, Reasoning)) or event.text
    return Answer(content, tuple((name, arguments) for name, arguments in calls), reasoning)


_PARTS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"),
    *('{"name": "f", "arguments": {"a": "b"}}', '{"name":"f","parameters":{}}', '{"name": "f"}', '"\\ud800"'),
    *('{"arguments": "{}", "name": "f"}', '{"name": "f", "arguments": {', '{"name": "f", "arguments": null}'),
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ":",
        ";",
        "<",
        "name",
        "arguments",
        " ",
        "\n",
        "f",
        "é",
        "x" * 300,
        " " * 300,
    ),
)
TEXTS = st.lists(st.sampled_from(_PARTS), max_size=12).map("".join)
"""Texts of markup, right and wrong."""


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    """A text in pieces."""
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=20)))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def check_cuts(make: MakeParser, pieces: list[str]) -> None:
    """However a text is cut, the answer is the same, and without calls it is the text."""
    text = "".join(pieces)
    whole = parse(make(), text)
    assert parse(make(), *pieces) == whole
    assert parse(make(), *text) == whole
    if not whole.calls and not whole.reasoning and "think>" not in text:
        assert whole.content == text or not text.strip()
