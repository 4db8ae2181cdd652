"""The site of the documents, whose dead links fail, and their English, that of messages, docstrings and comments."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from tests.support.tables import by_table, table

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md")])
# Elements with which a page loads something; links to elsewhere are no such thing.
LOADED = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?:https?:)?//|url\(['\"]?(?:https?:)?//")


def entries(node: Any) -> Iterator[str]:
    """The pages of the navigation."""
    if isinstance(node, dict):
        yield from (f"{value}.md" for key, value in node.items() if key in ("root", "file"))
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from entries(each)


def test_every_page_has_its_place_in_the_navigation() -> None:
    found = sorted(entries(yaml.safe_load((ROOT / "docs" / "_toc.yml").read_text())))
    assert found == sorted(str(page.relative_to(ROOT)) for page in PAGES)


def test_paths_that_documents_name_exist() -> None:
    folders = "benchmarks|djl_trtllm|docker|scripts|serving|tests|tools"
    named = {
        (page.name, path)
        for page in PAGES
        if page.name not in ("CHANGELOG.md", "models.md")  # that one names TensorRT-LLM's own tests
        for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text())
    }
    assert len(named) > 100
    assert sorted((page, path) for page, path in named if "/x/" not in path and not (ROOT / path).exists()) == []


def test_the_map_names_modules_that_exist() -> None:
    lost, found = [], 0
    for package, text in re.findall(
        r"^\| `(\w+(?:/\w+)?)/`.*?\| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    ):
        folder = ROOT / "djl_trtllm" / package
        if not folder.is_dir():
            continue  # tools and others beside the package
        named = " ".join(re.findall(r"\(([^()]+)\)", text))
        names = re.findall(r"`([a-z_]+)`", named)
        found += len(names)
        lost += [f"{package}/{name}" for name in names if not list(folder.glob(f"{name}*"))]
    assert lost == [] and found > 30


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, by the script; one process at a time makes the environment, and the site in it."""
    (ROOT / "build").mkdir(exist_ok=True)
    with FileLock(ROOT / "build" / "docs.lock"):
        done = subprocess.run([ROOT / "scripts" / "docs"], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1]).parent


def built(folder: Path, texts: Sequence[str], readme: str) -> subprocess.CompletedProcess[str]:
    """Return Sphinx's messages about a page for each text, another page and the README, with the site's settings."""
    docs = folder / "docs"
    docs.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "conf.py", docs)
    shutil.copytree(ROOT / "docs" / "_site", docs / "_site")
    names = ["README", "docs/other", *(f"docs/page{number}" for number in range(len(texts)))]
    (docs / "_toc.yml").write_text("root: docs/README\nentries:\n" + "".join(f"  - file: {name}\n" for name in names))
    (docs / "README.md").write_text("# Start\n")
    (docs / "other.md").write_text("# Other\n\n## A part\n")
    for number, text in enumerate(texts):
        (docs / f"page{number}.md").write_text(f"# Page\n\n{text}\n")
    (folder / "README.md").write_text(f"# Top\n\n{readme}\n")
    sphinx = ROOT / ".venv-docs" / "bin" / "sphinx-build"
    arguments: list[str | Path] = ["-q", "-W", "--keep-going", "-n", "-c", docs, folder, folder / "build"]
    return subprocess.run([sphinx, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_has_every_page_a_search_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in PAGES:
        assert (site / page.relative_to(ROOT)).with_suffix(".html").is_file()
    for file in ("index.html", "search.html", "searchindex.js"):
        assert (site / file).is_file()
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert [path for path in files if LOADED.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dead_link_anchor_or_picture_fails_it(site: Path, tmp_path: Path) -> None:
    rows = table(__file__, "a_dead_link_anchor_or_picture_fails_it")
    good = [text for text, problem in rows if problem is None]
    done = built(tmp_path / "good", good, "[a](docs/other.md#a-part)")
    assert done.returncode == 0, done.stderr
    bad = [(text, problem) for text, problem in rows if problem is not None]
    done = built(tmp_path / "bad", [text for text, _ in bad], "[a](docs/other.md#a-part) [b](docs/other.md#a-hart)")
    assert done.returncode != 0
    for number, (text, problem) in enumerate(bad):
        warnings = [line for line in done.stderr.splitlines() if f"page{number}.md" in line]
        assert any(problem in line for line in warnings), (text, problem, done.stderr)
    assert "a-hart" in done.stderr and "a-part" not in done.stderr


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
