"""What pyproject.toml cannot declare: the package index's copy of the README. All else stands there."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
# Links to other files of the repository. The package index has none of them.
RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")


def readme() -> str:
    """The README with absolute links, by the Repository of [project.urls]; without one, links become their text."""
    repository = re.search(
        r'^Repository = "(.+)"$', (HERE / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    link = rf"[\1]({repository[1].rstrip('/')}/blob/HEAD/\2)" if repository else r"\1"
    return RELATIVE_LINK.sub(link, (HERE / "README.md").read_text(encoding="utf-8"))


setup(long_description=readme(), long_description_content_type="text/markdown")
