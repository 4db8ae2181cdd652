"""What pyproject.toml cannot declare: the package index's copy of the README, and the model of `serve --demo`."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
DEMO = HERE / "serving" / "models" / "tiny-stories" / "engine"
# Links to other files of the repository. The package index has none of them.
RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")


def readme() -> str:
    """The README with absolute links, by the Repository of [project.urls]; without one, links become their text."""
    repository = re.search(
        r'^Repository = "(.+)"$', (HERE / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    link = rf"[\1]({repository[1].rstrip('/')}/blob/HEAD/\2)" if repository else r"\1"
    return RELATIVE_LINK.sub(link, (HERE / "README.md").read_text(encoding="utf-8"))


class BuildWithDemo(build_py):
    """Adds the demonstration model, if the source has it: images are built without it."""

    def run(self) -> None:
        super().run()
        if DEMO.is_dir() and not self.editable_mode:
            self.copy_tree(str(DEMO), str(Path(self.build_lib, "djl_trtllm", "demo", "tiny-stories")))


setup(long_description=readme(), long_description_content_type="text/markdown", cmdclass={"build_py": BuildWithDemo})
