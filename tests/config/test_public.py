"""Sixty public files and more of each kind end as the list in docs/migrating.md says, and no setting is lost silently.

The data has what each file sets, typed anew and reduced to what decides: names of models and places are left out.
`${x}` is a placeholder that its author did not fill in. Variables have names in upper case.
Files that name vLLM are planned too, on a machine of 8 GPUs with a small model in the place of theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from djl_trtllm.backends.planning import plan_fitted, with_effects
from djl_trtllm.config import Backend, Config, Quantization, Source, parse_properties, resolve
from djl_trtllm.config.compat import triton, truss
from djl_trtllm.config.sources import read_environment
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import inspect
from tests.engines.helpers import gpu_machine, write_checkpoint

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
    """A tiny checkpoint with a context as long as the models of the files have."""
    path = write_checkpoint(tmp_path / "model")
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 1 << 18}
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
    """What becomes of a file, and the settings of which nothing becomes anything."""
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
