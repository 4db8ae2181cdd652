from __future__ import annotations

import posixpath
import re
from pathlib import Path

import pytest

from djl_trtllm.config import parse_properties, resolve
from djl_trtllm.config.options.option import Scope
from djl_trtllm.config.options.registry import OPTIONS, find
from djl_trtllm.config.rules.table import RULES
from tools.options_docs import example_file, main, pages
from tools.options_tasks import TASKS

REPOSITORY = Path(__file__).resolve().parents[2]


def example_lines() -> list[str]:
    return [line[1:] for line in example_file().splitlines() if line.startswith("#") and not line.startswith("# ")]


def test_the_files_in_the_repository_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--root", str(REPOSITORY)]) == 0, capsys.readouterr().err


def test_check_says_what_is_out_of_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert "python -m tools.options_docs" in capsys.readouterr().err
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--check", "--root", str(tmp_path)]) == 0
    for page in ("options.md", "options/kv_cache.md", "tensorrt-llm-names.md"):
        (tmp_path / "docs" / page).write_text("old")
        assert main(["--check", "--root", str(tmp_path)]) == 1
        assert page in capsys.readouterr().err
        assert main(["--root", str(tmp_path)]) == 0


def test_the_page_has_every_option_with_its_aliases() -> None:
    found = pages()
    lacking = [
        name
        for declared in OPTIONS.values()
        for name in declared.spellings
        if f"`{name}`" not in found[f"options/{'legacy' if declared.option.legacy else declared.group.name}.md"]
    ]
    assert lacking == [] and len(OPTIONS) > 300


def test_every_link_of_a_page_leads_to_a_heading() -> None:
    found = pages()
    links = [(page, link) for page, text in found.items() for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert len(links) > 100
    broken = []
    for page, link in links:
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        headings = re.findall(r"^#+ (.+)$", found.get(target, ""), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if target not in found or (anchor and anchor not in anchors):
            broken.append((page, link))
    assert broken == []


def test_a_page_of_no_group_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path)]) == 0
    (tmp_path / "docs" / "options" / "former.md").write_text("old")
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert "former.md belongs to no group" in capsys.readouterr().err


def test_every_task_names_options_that_have_an_effect() -> None:
    keys = [key for _, keys in TASKS for key in keys]
    assert [key for key in keys if (found := find(key)) is None or found.option.legacy] == []


def test_the_keys_of_the_example_are_the_registrys() -> None:
    keys = [line.partition("=")[0] for line in example_lines()]
    expected = [declared.key for declared in OPTIONS.values() if declared.option.scope is not Scope.OPERATOR]
    assert keys == expected


def test_the_example_as_it_is_sets_nothing() -> None:
    config = resolve([parse_properties(example_file(), "serving.properties")])
    assert not config.user_set and not config.warnings


def test_each_line_of_the_example_alone_resolves_to_what_it_says() -> None:
    lines = example_lines()
    assert len(lines) > 300
    # What has no effect alone, or no effect any more, is listed by name; nothing else is.
    concerned = {name for rule in RULES for name in rule.options}
    wrong, warned = [], 0
    for line in lines:
        config = resolve([parse_properties(line, "serving.properties")])
        key, _, value = line.partition("=")
        declared = find(key)
        assert declared is not None, line
        if getattr(config.options, declared.name) != declared.type.parse(value, declared.option):
            wrong.append(f"{line}: {getattr(config.options, declared.name)}")
        if config.user_set != {declared.name}:
            wrong.append(f"{line} sets {sorted(config.user_set)}")
        warned += len(config.warnings)
        told = declared.option.warn or declared.name in concerned
        wrong += [warning for warning in config.warnings if not told or not warning.startswith(f"{key}=")]
    assert wrong == [] and warned > 20
