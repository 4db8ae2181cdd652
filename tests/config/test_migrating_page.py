"""`docs/migrating.md` shows what the program prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from djl_trtllm.config import Config, load
from djl_trtllm.config.explain import as_json

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "migrating.md").read_text()
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
    return text.replace(str(HERE / "old" / SHOWN[name] / "model"), name)


def rows(config: Config, name: str) -> dict[str, tuple[str, str]]:
    found = {}
    for entry in as_json(config)["options"].values():
        if entry["origin"]["kind"] != "default":
            value = str(entry["value"]).lower() if isinstance(entry["value"], bool) else str(entry["value"])
            unit = entry["unit"] if isinstance(entry["value"], (int, float)) and entry["unit"] else ""
            found[entry["key"]] = (f"{value} {unit}".strip(), as_shown(entry["origin"]["text"], name))
    return found


@pytest.mark.parametrize("name", SHOWN)
def test_the_values_are_the_resolved_ones(name: str) -> None:
    config = load(HERE / "old" / SHOWN[name] / "model", {})
    lines = [line for line in block_of(name) if not line.startswith(("note:", "warning:"))]
    shown = {key: (value, origin) for key, value, origin in (re.split(r"\s{2,}", line) for line in lines)}
    assert shown == rows(config, name)


@pytest.mark.parametrize("name", SHOWN)
def test_the_messages_are_the_programs(name: str) -> None:
    config = load(HERE / "old" / SHOWN[name] / "model", {})
    printed = [f"warning: {line}" for line in config.warnings] + [f"note: {line}" for line in config.notes]
    printed = [as_shown(line, name) for line in printed]
    for line in block_of(name):
        if line.startswith(("note:", "warning:")):
            begin, shortened, _ = line.partition("…")
            assert any(text == line or (shortened and text.startswith(begin)) for text in printed), line


@pytest.mark.parametrize("case", sorted(path.name for path in (HERE / "broken").iterdir() if path.is_dir()))
def test_the_broken_ones_are_shown_with_their_messages(case: str) -> None:
    assert (HERE / "broken" / case / "message.txt").read_text().strip() in PAGE


@pytest.mark.parametrize(
    "path", ["lmi_029_llama3_70b_fp8_neo/model/serving.properties", "truss_engine_repository/model/config.yaml"]
)
def test_the_old_files_are_shown_whole(path: str) -> None:
    assert (HERE / "old" / path).read_text() in PAGE
