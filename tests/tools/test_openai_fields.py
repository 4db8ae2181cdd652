"""Each field of OpenAI's schema has an outcome, and the page has it."""

from __future__ import annotations

from importlib.metadata import version

from tests.support.tables import by_rows
from tools import openai_fields


def test_the_page_is_what_the_parser_says_today() -> None:
    """The page is of the newest package, which `scripts/test-clients` installs. An older one has fewer fields."""
    today, written = openai_fields.page().splitlines(), openai_fields.PAGE.read_text().splitlines()
    of_the_package = f"`openai` {version('openai')};"
    assert [line for line in today if line not in written and of_the_package not in line] == []
    if any(of_the_package in line for line in written):
        assert today == written


@by_rows(("title", "member", "types"), [(each[0], each[1], each[2:]) for each in openai_fields.APIS])
def test_no_outcome_is_unknown(title: str, member: str, types: tuple[type, ...]) -> None:
    found = openai_fields.rows(member, types)
    assert {row.outcome.split(":")[0] for row in found} == {
        "served with effect",
        "served with a note",
        "refused by name",
    }
    assert {member, "model", "stream", "user"} < {row.name for row in found}
