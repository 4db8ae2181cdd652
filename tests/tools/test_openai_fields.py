"""Each field of OpenAI's schema has an outcome, and the page has it.

The package of OpenAI takes more than a second to import, which collecting the tests does without.
"""

from __future__ import annotations

from importlib.metadata import version


def test_the_page_is_what_the_parser_says_today() -> None:
    """The page is of the newest package, which `scripts/test-clients` installs. An older one has fewer fields."""
    from tools import openai_fields

    today, written = openai_fields.page().splitlines(), openai_fields.PAGE.read_text().splitlines()
    of_the_package = f"`openai` {version('openai')};"
    assert [line for line in today if line not in written and of_the_package not in line] == []
    if any(of_the_package in line for line in written):
        assert today == written


def test_no_outcome_is_unknown() -> None:
    from tools import openai_fields

    for title, member, *types in openai_fields.APIS:
        found = openai_fields.rows(member, tuple(types))
        assert {row.outcome.split(":")[0] for row in found} == {
            "served with effect",
            "served with a note",
            "refused by name",
        }, title
        assert {member, "model", "stream", "user"} < {row.name for row in found}, title
