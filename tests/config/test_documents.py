"""What the documents promise: of declarations, of public files, and of configurations as people have them."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from djl_trtllm.backends.planning import plan_fitted, with_effects
from djl_trtllm.config import Backend, Config, Quantization, load
from djl_trtllm.config.compat import triton, truss
from djl_trtllm.config.explain import as_json
from djl_trtllm.config.options import OPTIONS, find
from djl_trtllm.config.options.option import Scope, as_text
from djl_trtllm.config.resolve import resolve
from djl_trtllm.config.rules import RULES, check_running
from djl_trtllm.config.sources import OriginKind, Source, parse_properties, read_environment
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import inspect
from tests.engines.helpers import gpu_machine, write_checkpoint
from tests.support.tables import by_rows
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


DATA = Path(__file__).parent / "public"
PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
KINDS = ("lmi", "triton", "truss")
SILENT = ("gpt_model_path", "source")
"""Triton's own engine is found by its place; Truss's source is the hub, as here."""
MOST = 4
"""Names that a verdict shows."""


def written(kind: str, settings: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The file, and the name of the setting on each line; "" for a line without a value."""
    if kind == "lmi":
        return "".join(f"{name}={value}\n" for name, value in settings.items()), list(settings)
    if kind == "triton":
        return "".join(f"{entry(name, str(value))}\n" for name, value in settings.items()), list(settings)
    text = yaml.safe_dump(dict(settings), sort_keys=False, width=10_000)
    words = [re.match(r"\s*(?:- )?([\w.-]+):\s*(\S?)", line) for line in text.splitlines()]
    return text, [word[1] if word is not None and word[2] else "" for word in words]


def in_environment(settings: Mapping[str, Any]) -> bool:
    return all(name.isupper() for name in settings)


def entry(name: str, value: str) -> str:
    if name == "decoupled":
        return f"model_transaction_policy {{ decoupled: {value} }}"
    if name == "max_batch_size":
        return f"max_batch_size: {value}"
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


def sources(kind: str, where: str, text: str, settings: Mapping[str, Any]) -> tuple[str, list[Source]]:
    path = "/".join(where.split("#")[0].split("/")[-2:])
    if kind == "lmi" and in_environment(settings):
        return path, list(read_environment(settings))
    if kind == "lmi":
        return path, [parse_properties(text, path)]
    if kind == "triton":
        return path, [triton.parse_config(text, path), triton.triton_presets()]
    return path, truss.parse_config(text, path)


def named(messages: Iterable[str], path: str, names: list[str]) -> list[str]:
    """The settings that messages are about, by their lines, or by the names of variables."""
    if all(name.isupper() for name in names):
        words = set(re.findall(r"[A-Z][A-Z0-9_]+", " ".join(messages)))
        return [name for name in names if name in words]
    pattern = re.compile(rf"(?:{re.escape(path)}:|line )(\d+)")
    lines = {int(line) for message in messages for line in pattern.findall(message)}
    return list(dict.fromkeys(names[line - 1] or names[line] for line in sorted(lines)))


def shown(names: list[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny checkpoint that has a context as long, and as many heads, as the models of the files."""
    path = write_checkpoint(tmp_path / "model")
    like_theirs = {"max_position_embeddings": 1 << 18, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = json.loads((path / "config.json").read_text()) | like_theirs
    (path / "config.json").write_text(json.dumps(config))
    return path


def on_vllm(config: Config, model: Path) -> Config:
    """The configuration as it is planned on vLLM: a quantised model where the file says that it is."""
    asked = config.options.quantize
    described = json.loads((model / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "awq"} if asked is Quantization.AWQ else None
    (model / "config.json").write_text(json.dumps(described))
    config, plan = plan_fitted(config, inspect(model), replace(gpu_machine(None, 8), vllm="0.33.0"))
    config = with_effects(config, Backend.VLLM, plan)
    return replace(config, notes=(*config.notes, *plan.notes))


def verdict(kind: str, where: str, settings: Mapping[str, Any], model: Path) -> tuple[str, list[str]]:
    """The verdict on a file, and its settings that are neither used nor reported."""
    text, names = written(kind, settings)
    path, found = sources(kind, where, text, settings)
    by = ""
    try:
        config = resolve(found)
        if kind == "lmi" and config.options.backend is Backend.VLLM:
            config, by = on_vllm(config, model), " by vLLM"
    except ConfigError as error:
        return f"refused: {shown(named(error.problems, path, names))}", []
    origins = [str(origin) for origin in config.origins.values()]
    known = named([*origins, *config.warnings, *config.notes], path, names)
    reported = named(config.warnings, path, names)
    lost = [name for name in names if name and name not in (*known, *SILENT)]
    return f"served{by}" + (f"; reports {shown(reported)}" if reported else ""), lost


@pytest.mark.parametrize("kind", KINDS)
def test_a_public_file_ends_as_the_list_says_and_loses_no_setting(kind: str, model: Path) -> None:
    files = yaml.safe_load((DATA / f"{kind}.yaml").read_text())
    assert len(files) >= 60
    for file in files:
        assert verdict(kind, file["where"], file["set"], model) == (file["verdict"], []), file["where"]
        assert f"| {file['where']} | {file['verdict']} |" in PAGE


TROUBLESHOOTING = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()


def test_the_page_shows_the_errors_that_a_wrong_file_gets() -> None:
    match = re.search(r"^\$ djl-trtllm serve bad\nerror: (.*?)\n```", TROUBLESHOOTING, re.DOTALL | re.MULTILINE)
    assert match is not None
    wrong = re.findall(r"^  - (\S+) \(bad/serving\.properties:(\d+)\)", match[1], re.MULTILINE)
    text = "".join(f"{key}\n" for key, _ in sorted(wrong, key=lambda each: int(each[1])))
    with pytest.raises(ConfigError) as raised:
        resolve([parse_properties(text, "bad/serving.properties")])
    assert str(raised.value) == match[1] and len(wrong) > 3


# -- configurations as people have them --------------------------------------------------------------------------------


HERE = Path(__file__).parent
OLD = HERE / "old"
"""Configurations as people have them, of every release and server. A folder is one: `model/` is what they had, and
`expected.json` holds their variables (`environ`), every value that is not a default (`options`) and parts of the
expected messages (`told`)."""
BROKEN = HERE / "broken"
"""Files that are refused, with the message that somebody new reads. `docs/migrating.md` shows some of both."""


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def resolved(case: str) -> tuple[Config, dict[str, Any]]:
    expected = json.loads((OLD / case / "expected.json").read_text())
    model = OLD / case / "model"
    return load(model if model.is_dir() else None, expected["environ"]), expected


def not_default(config: Config) -> dict[str, Any]:
    """Every value with an origin other than default, as `config --json` prints it."""
    options = as_json(config)["options"]
    return {
        name: str(entry["value"]) if isinstance(entry["value"], list) else entry["value"]
        for name, entry in options.items()
        if entry["origin"]["kind"] != OriginKind.DEFAULT.value
    }


def test_there_are_twenty_of_every_kind_and_five_broken_ones() -> None:
    assert len(folders(OLD)) >= 20 and len(folders(BROKEN)) == 5
    assert {case.partition("_")[0] for case in folders(OLD)} == {"lmi", "triton", "truss"}


@by_rows("case", folders(OLD))
def test_it_resolves_as_its_author_meant(case: str) -> None:
    config, expected = resolved(case)
    assert not_default(config) == expected["options"] != {}


def test_each_is_answered_as_expected() -> None:
    silent, parts = [], 0
    for case in folders(OLD):
        config, expected = resolved(case)
        config = check_running(config, partial(getattr, config.options))
        told = "\n".join((*config.warnings, *config.notes))
        parts += len(expected["told"])
        silent += [(case, part) for part in expected["told"] if part not in told]
    assert silent == [] and parts > 20


def test_every_value_stands_in_the_line_of_its_origin() -> None:
    elsewhere, values = [], 0
    for case in folders(OLD):
        config, _ = resolved(case)
        for name in sorted(config.user_set):
            origin = config.origin(name)
            if origin.kind is not OriginKind.FILE:
                continue
            assert origin.line is not None
            values += 1
            line = Path(origin.where).read_text().splitlines()[origin.line - 1].lower()
            value = as_text(getattr(config.options, name)).lower()
            aliases = [word for word, meaning in OPTIONS[name].option.value_aliases.items() if meaning == value]
            if not any(word in line for word in (value, *aliases)):
                elsewhere.append((case, name, line.strip()))
    assert elsewhere == [("truss_trt_llm_v2", "backend", "inference_stack: v2")] and values > 200


def test_no_secret_is_shown() -> None:
    told = []
    for case in folders(OLD):
        config, _ = resolved(case)
        shown = json.dumps(as_json(config)) + "\n".join((*config.warnings, *config.notes))
        told += [(case, secret) for secret in ("my_hf_api_key", "hf_abc") if secret in shown]
    assert told == []
    files = [path for path in OLD.rglob("*") if path.is_file() and "expected" not in path.name]
    assert any("my_hf_api_key" in path.read_text(errors="replace") for path in files)


@by_rows("case", folders(BROKEN))
def test_a_broken_one_is_refused_with_what_to_write(case: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BROKEN / case, {})
    message = (BROKEN / case / "message.txt").read_text().strip()
    assert str(caught.value).replace(str(BROKEN / case) + "/", "") == message
    assert message in PAGE


SHOWN = {
    "llama3-70b": "lmi_029_llama3_70b_fp8_neo",
    "triton_model_repo": "triton_llama_workflow",
    "trtllm-truss": "truss_engine_repository",
}


def block_of(name: str) -> list[str]:
    match = re.search(rf"```\n\$ djl-trtllm config {name}\n(.*?)\n```", PAGE, re.DOTALL)
    assert match is not None
    return match[1].splitlines()


def as_shown(text: str, name: str) -> str:
    return text.replace(str(OLD / SHOWN[name] / "model"), name)


def rows(config: Config, name: str) -> dict[str, tuple[str, str]]:
    found = {}
    for entry in as_json(config)["options"].values():
        if entry["origin"]["kind"] != "default":
            value = str(entry["value"]).lower() if isinstance(entry["value"], bool) else str(entry["value"])
            unit = entry["unit"] if isinstance(entry["value"], (int, float)) and entry["unit"] else ""
            found[entry["key"]] = (f"{value} {unit}".strip(), as_shown(entry["origin"]["text"], name))
    return found


@by_rows("name", SHOWN)
def test_the_page_shows_the_resolved_values(name: str) -> None:
    config = load(OLD / SHOWN[name] / "model", {})
    lines = [line for line in block_of(name) if not line.startswith(("note:", "warning:"))]
    shown = {key: (value, origin) for key, value, origin in (re.split(r"\s{2,}", line) for line in lines)}
    assert shown == rows(config, name)


@by_rows("name", SHOWN)
def test_the_page_shows_the_messages(name: str) -> None:
    config = load(OLD / SHOWN[name] / "model", {})
    printed = [f"warning: {line}" for line in config.warnings] + [f"note: {line}" for line in config.notes]
    printed = [as_shown(line, name) for line in printed]
    shown = [line for line in block_of(name) if line.startswith(("note:", "warning:"))]
    assert shown
    for line in shown:
        begin, shortened, _ = line.partition("…")
        assert any(text == line or (shortened and text.startswith(begin)) for text in printed), line


@pytest.mark.parametrize(
    "path", ["lmi_029_llama3_70b_fp8_neo/model/serving.properties", "truss_engine_repository/model/config.yaml"]
)
def test_the_page_shows_the_old_files_whole(path: str) -> None:
    assert (OLD / path).read_text() in PAGE
