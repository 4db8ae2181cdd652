"""The tables of `docs/tensorrt-llm.md` name the arguments that the options are declared to become."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from djl_trtllm.config import Backend
from djl_trtllm.config.registry import find
from djl_trtllm.config.target import named_targets

PAGE = (Path(__file__).parents[2] / "docs" / "tensorrt-llm.md").read_text(encoding="utf-8")
ROW = re.compile(r"\| `(option\.\w+)` \|(.+)\|")


def rows(heading: str) -> dict[str, tuple[str, str]]:
    """The first two cells behind the option, by option."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = {found[1]: [cell.strip() for cell in found[2].split("|")] for found in ROW.finditer(section)}
    return {key: (first, second) for key, (first, second, *_) in cells.items()}


BUILD = rows("Build options")
RUNTIME = rows("Runtime options")


def effect(key: str, backend: Backend) -> str:
    declared = find(key)
    assert declared is not None, f"{key} is no option"
    return declared.option.effect_on(backend)


def agrees(cell: str, declared: str) -> bool:
    """Whether a cell names one of the arguments of a declared effect, or none where there is no effect."""
    if cell == "none":
        return declared.startswith("no effect")
    return cell.strip("`") in {str(target) for target in named_targets(declared)}


@pytest.mark.parametrize("key", BUILD)
def test_build_options_become_what_the_page_says(key: str) -> None:
    assert agrees(BUILD[key][0], effect(key, Backend.TENSORRT)), effect(key, Backend.TENSORRT)


@pytest.mark.parametrize("key", RUNTIME)
def test_runtime_options_become_what_the_page_says(key: str) -> None:
    engine, pytorch = RUNTIME[key]
    assert agrees(engine, effect(key, Backend.TENSORRT)), effect(key, Backend.TENSORRT)
    wanted = engine if pytorch == "the same" else pytorch
    assert agrees(wanted, effect(key, Backend.PYTORCH)), effect(key, Backend.PYTORCH)


def test_every_option_the_page_names_is_one() -> None:
    named = set(re.findall(r"`(option\.\w+)", PAGE))
    assert {name for name in named if find(name) is None} == set()
