"""Configurations as people have them, of every release and server: they resolve as their authors meant.

A folder of `old/` is one: `model/` is what they had, and `expected.json` holds their variables (`environ`), every value
that is not a default (`options`) and parts of the expected messages (`told`). A folder of `broken/` is one
that is refused, with the message that somebody new reads. `docs/migrating.md` shows some of both.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.config import Config, OriginKind, load
from djl_trtllm.config.explain import as_json
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.options.option import as_text
from djl_trtllm.config.rules import check_running
from djl_trtllm.errors import ConfigError

HERE = Path(__file__).parent
OLD = HERE / "old"
BROKEN = HERE / "broken"
PAGE = (HERE.parents[1] / "docs" / "migrating.md").read_text()


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


@pytest.mark.parametrize("case", folders(OLD))
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


@pytest.mark.parametrize("case", folders(BROKEN))
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


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_shows_the_resolved_values(name: str) -> None:
    config = load(OLD / SHOWN[name] / "model", {})
    lines = [line for line in block_of(name) if not line.startswith(("note:", "warning:"))]
    shown = {key: (value, origin) for key, value, origin in (re.split(r"\s{2,}", line) for line in lines)}
    assert shown == rows(config, name)


@pytest.mark.parametrize("name", SHOWN)
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
