from __future__ import annotations

import posixpath
import re
from pathlib import Path

import pytest

from djl_trtllm.config import parse_properties, resolve
from djl_trtllm.config.options import OPTIONS, find
from djl_trtllm.config.options.option import Scope
from djl_trtllm.config.rules import RULES
from tools.disagreements import DISAGREEMENTS
from tools.options_docs import example_file, main, pages
from tools.options_tasks import FIRST, TASKS

REPOSITORY = Path(__file__).resolve().parents[2]


def example_lines() -> list[str]:
    """The examples of all options that may stand in a file; `serving.properties.example` has the first of them."""
    return [
        f"{declared.key}={declared.example}"
        for declared in OPTIONS.values()
        if declared.option.scope is not Scope.OPERATOR
    ]


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


def test_the_example_is_short_and_names_only_what_has_an_effect_in_a_file() -> None:
    text = example_file()
    assert len(text.splitlines()) <= 120
    lines = [line[1:] for line in text.splitlines() if line.startswith("#") and not line.startswith("# ")]
    assert [line.partition("=")[0] for line in lines] == list(FIRST) and len(FIRST) == 12
    assert set(lines) <= set(example_lines())
    more = set(re.findall(r"[a-z_.]+_[a-z_]+", text.partition("by task")[2]))
    found = [find(key) for key in more]
    assert found and all(each and each.option.scope is not Scope.OPERATOR and not each.option.legacy for each in found)


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


def test_each_row_has_two_opinions_a_choice_and_a_reason_and_is_on_the_page() -> None:
    page = pages()["options/rules.md"]
    lacking = [
        row.option
        for row in DISAGREEMENTS
        if len({value for _, value in row.said}) < 2
        or not row.choice
        or not row.why
        or f"{row.said[0][1]} (" not in page
    ]
    assert lacking == []
    choices = {row.option: row.choice for row in DISAGREEMENTS}
    assert (choices["max_input_len"], choices["enable_kv_cache_reuse"]) == ("1024", "false")
    assert choices["max_num_tokens"] == OPTIONS["max_num_tokens"].option.default_note != ""


def test_the_lmi_document_counts_where_it_speaks() -> None:
    said = {
        row.option: (dict(row.said)["lmi-trt-llm.md"], row.choice)
        for row in DISAGREEMENTS
        if "lmi-trt-llm.md" in dict(row.said)
    }
    assert len(said) > 8
    assert [option for option, (text, choice) in said.items() if not choice.startswith(text)] == []
