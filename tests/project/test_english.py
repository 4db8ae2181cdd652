"""Documents, messages, docstrings and comments in plain English: active, present tense, the field's words."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path
from typing import Any

from tests.support.tables import by_table, table

ROOT = Path(__file__).parents[2]

INSTEAD: dict[str, Any] = table(__file__, "INSTEAD")
"""Phrases that a reader stumbles over, and what to write."""


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def modules() -> list[Path]:
    return [file for folder in ("djl_trtllm", "tools") for file in (ROOT / folder).rglob("*.py")]


def prose_of_page(text: str) -> str:
    """The page with its code replaced by blanks, so that lines keep their numbers."""
    code = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
    return code.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def prose_of_module(text: str) -> str:
    """Comments and strings, each on its own lines, without quotes and comment signs."""
    lines = [""] * (text.count("\n") + 2)
    inside = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in inside:
            for number, line in enumerate(token.string.split("\n"), token.start[0]):
                lines[number - 1] += " " + re.sub(r"^[rbfRBF]*[\"']+|[\"']+$|^#", "", line.strip())
    return "\n".join(lines)


def prose_of_test(text: str) -> str:
    """Comments and docstrings: other strings of tests have what clients and engines write."""
    lines = [""] * (text.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        alone = token.type == tokenize.STRING and token.line.lstrip().startswith(token.string.split("\n")[0])
        if token.type == tokenize.COMMENT or (alone and token.string.startswith('"""')):
            for number, line in enumerate(token.string.split("\n"), token.start[0]):
                lines[number - 1] += re.sub(r"`[^`]+`", "", line.strip(" #"))
    return "\n".join(lines)


def found_in(text: str) -> list[str]:
    """Each phrase with its line; a phrase may continue on the next line."""
    found = []
    for phrase, instead in INSTEAD.items():
        for match in re.finditer(phrase.replace(" ", r"\s+"), text, re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{line}: {' '.join(match[0].split())!r}: write {instead}")
    return found


def test_documents_and_messages_are_plain_english() -> None:
    found = {file: found_in(prose_of_page(file.read_text(encoding="utf-8"))) for file in pages()}
    found |= {file: found_in(prose_of_module(file.read_text(encoding="utf-8"))) for file in modules()}
    assert {str(file.relative_to(ROOT)): phrases for file, phrases in found.items() if phrases} == {}


def test_comments_and_docstrings_of_tests_are_plain_too() -> None:
    files = [file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    found = {
        file: found_in(prose_of_test(file.read_text(encoding="utf-8"))) for file in files if file != Path(__file__)
    }
    assert {str(file.relative_to(ROOT)): phrases for file, phrases in found.items() if phrases} == {}


def test_strings_of_tests_may_have_any_words() -> None:
    found = found_in(prose_of_test('def f() -> None:\n    """It is told."""\n    g("it is told")  # it tells\n'))
    assert [line.split(": ")[0] for line in found] == ["2", "3"]


@by_table("prose", "line")
def test_a_phrase_is_found_in_comments_strings_and_over_lines(prose: str, line: int) -> None:
    (found,) = found_in(prose_of_module(prose))
    assert found.startswith(f"{line}: ")


def test_code_may_have_any_name() -> None:
    assert found_in(prose_of_module("def tell(told: str) -> None:\n    tell(told)\n")) == []
    assert found_in(prose_of_page("Write `tell`.\n\n```\nit is told\n```\n")) == []
    assert len(found_in(prose_of_page("It is told.\n\n```\nit is told\n```\nSo it is told.\n"))) == 2
