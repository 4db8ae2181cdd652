"""Each field of OpenAI's schema has an outcome, and the page has it."""

from __future__ import annotations

import pytest

from tools import openai_fields


def test_the_page_is_what_the_parser_says_today() -> None:
    assert openai_fields.page() == openai_fields.PAGE.read_text()


@pytest.mark.parametrize(("title", "member", "types"), [(each[0], each[1], each[2:]) for each in openai_fields.APIS])
def test_no_outcome_is_unknown(title: str, member: str, types: tuple[type, ...]) -> None:
    found = openai_fields.rows(member, types)
    assert {row.outcome.split(":")[0] for row in found} == {
        "served with effect",
        "served with a note",
        "refused by name",
    }
    assert {member, "model", "stream", "user"} < {row.name for row in found}
