"""The site of these documents. `scripts/docs` builds it from docs/ and the Markdown files at the top."""

from __future__ import annotations

project = html_title = "djl-trtllm"
extensions = ["myst_parser", "sphinx_external_toc"]
include_patterns = ["*.md", "docs/*.md", "docs/options/*.md", "docs/tutorials/*.md"]
external_toc_path = "docs/_toc.yml"
# Links may lead to headings, by the names that GitHub gives them.
myst_heading_anchors = 4
# The JSON of examples may be shortened by "...".
suppress_warnings = ["misc.highlighting_failure"]
# Nothing of furo's comes from elsewhere.
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_extra_path = ["_site"]
