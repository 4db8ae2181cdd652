"""Sixty public files of each kind end as the list in docs/migrating.md says, and no setting of them is lost silently.

The data has what each file sets, typed anew and reduced to what decides: names of models and places are left out.
`${x}` is a placeholder that its author did not fill in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from djl_trtllm.config import Source, parse_properties, resolve
from djl_trtllm.config.compat import triton, truss
from djl_trtllm.errors import ConfigError

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


def entry(name: str, value: str) -> str:
    if name == "decoupled":
        return f"model_transaction_policy {{ decoupled: {value} }}"
    if name == "max_batch_size":
        return f"max_batch_size: {value}"
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


def sources(kind: str, where: str, text: str) -> tuple[str, list[Source]]:
    path = "/".join(where.split("#")[0].split("/")[-2:])
    if kind == "lmi":
        return path, [parse_properties(text, path)]
    if kind == "triton":
        return path, [triton.parse_config(text, path), triton.triton_presets()]
    return path, truss.parse_config(text, path)


def named(messages: Iterable[str], path: str, names: list[str]) -> list[str]:
    """The settings that messages are about, by their lines."""
    pattern = re.compile(rf"(?:{re.escape(path)}:|line )(\d+)")
    lines = {int(line) for message in messages for line in pattern.findall(message)}
    return list(dict.fromkeys(names[line - 1] or names[line] for line in sorted(lines)))


def shown(names: list[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more


def verdict(kind: str, where: str, settings: Mapping[str, Any]) -> tuple[str, list[str]]:
    """What becomes of a file, and the settings of which nothing becomes anything."""
    text, names = written(kind, settings)
    path, found = sources(kind, where, text)
    try:
        config = resolve(found)
    except ConfigError as error:
        return f"refused: {shown(named(error.problems, path, names))}", []
    origins = [str(origin) for origin in config.origins.values()]
    known = named([*origins, *config.warnings, *config.notes], path, names)
    reported = named(config.warnings, path, names)
    lost = [name for name in names if name and name not in (*known, *SILENT)]
    return "served" + (f"; reports {shown(reported)}" if reported else ""), lost


@pytest.mark.parametrize("kind", KINDS)
def test_a_public_file_ends_as_the_list_says_and_loses_no_setting(kind: str) -> None:
    files = yaml.safe_load((DATA / f"{kind}.yaml").read_text())
    assert len(files) >= 60
    for file in files:
        assert verdict(kind, file["where"], file["set"]) == (file["verdict"], []), file["where"]
        assert f"| {file['where']} | {file['verdict']} |" in PAGE
