"""A hundred public files and command lines become what was read by hand, and none loses a setting silently.

`public.yaml` has those of vLLM and trtllm-serve; those of LMI, Triton and Truss are drawn from `tests/config/public`.
`becomes.yaml` has what each of the hundred becomes: UPDATE_GOLDEN=1 writes it, and its difference is to be read.
"""

from __future__ import annotations

import os
import random
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from djl_trtllm.config.compat import triton
from djl_trtllm.config.sources import parse_properties
from djl_trtllm.translate.formats import read_command, read_text, rendered
from djl_trtllm.translate.translation import TITLES, Translation, names_of, translate
from tests.config.test_documents import DATA, in_environment, written
from tests.support.tables import by_rows

HERE = Path(__file__).parent
EACH = 20
SEED = 35
FILES = {"lmi": "serving.properties", "triton": "config.pbtxt", "truss": "config.yaml"}
TARGETS = tuple(TITLES)


@cache
def public() -> dict[str, tuple[str, str]]:
    """Where each is from, with the name of its file ("" for a command line) and its text."""
    own = yaml.safe_load((HERE / "public.yaml").read_text())
    found = {each["where"]: (each.get("file", ""), each["text"]) for each in own}
    for kind, name in FILES.items():
        files = yaml.safe_load((DATA / f"{kind}.yaml").read_text())
        served = [file for file in files if not file["verdict"].startswith("refused")]
        for file in random.Random(SEED).sample(served, EACH):
            variables = kind == "lmi" and in_environment(file["set"])
            text = (
                shlex.join(f"{k}={v}" for k, v in file["set"].items()) if variables else written(kind, file["set"])[0]
            )
            # The folder of a config.pbtxt is the name of its model.
            place = Path(file["where"]).parent.name if kind == "triton" else ""
            found[file["where"]] = ("" if variables else str(Path(place, name)), text)
    return found


def given(where: str) -> Translation:
    file, text = public()[where]
    return read_text(text, file) if file else read_command(text)


def compact(translation: Translation) -> list[str]:
    """A line for each setting: how exact it is, what it was and what it became; reasons are in `rows.toml`."""
    return [
        f"{line.exactness} {line.written}" + ("" if line.name is None else f" -> {line.name}={line.value}")
        for line in translation.lines
    ]


def becomes() -> dict[str, dict[str, list[str]]]:
    """Each one in the engine that is next to its own in the list, so that every pair of neighbours occurs."""
    found: dict[str, dict[str, list[str]]] = {}
    for place, where in enumerate(public()):
        read = given(where)
        others = [target for target in TARGETS if target != read.source]
        target = others[place % len(others)]
        found[where] = {target: compact(translate(read, target))}
    return found


def test_a_hundred_public_files_and_command_lines_become_what_was_read_by_hand() -> None:
    path = HERE / "becomes.yaml"
    found = becomes()
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(yaml.safe_dump(found, sort_keys=False, width=10_000, allow_unicode=True))
    assert len(found) == 100
    assert found == yaml.safe_load(path.read_text())


@by_rows("target", TARGETS)
def test_no_setting_is_lost_silently_and_every_name_is_one_of_the_target(target: str) -> None:
    for where in public():
        read = given(where)
        translation = translate(read, target)
        # An object whose fields have names of their own is a line for each field.
        whole = {each.written for each in read.lines if not isinstance(each.value, dict)}
        objects = {each.written.partition("=")[0] for each in read.lines if isinstance(each.value, dict)}
        assert whole <= {line.written for line in translation.lines}, where
        assert all(any(line.written.startswith(name) for line in translation.lines) for name in objects), where
        names = names_of(translation.target)
        for line in translation.kept:
            known = names.has(str(line.name))
            passed = str(line.name).startswith(("option.", "trt_llm.runtime.patch_kwargs.", "gpt_model_path"))
            assert known or passed, (where, line.name)


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    return {path: leaf for name, inner in value.items() for path, leaf in leaves(inner, f"{prefix}{name}.").items()}


def parsed(target: str, text: str) -> dict[str, Any]:
    """The names and values in the target's text, by the parser of its format."""
    if target == "lmi":
        return {setting.key: setting.value for setting in parse_properties(text, "x").settings}
    if target == "triton":
        return {str(place): field.value for place, field in enumerate(triton.parse(text))}
    if target in ("vllm", "trtllm-serve", "truss"):
        return leaves(yaml.safe_load(text) or {})
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    return {word: word for word in words if word.startswith("--")}


@by_rows("target", TARGETS)
def test_the_text_is_of_the_targets_format_with_a_comment_for_each_lost_setting(target: str) -> None:
    for where in public():
        translation = translate(given(where), target)
        text = rendered(translation)
        fixed = {"lmi": 1, "triton": 2, "truss": 2}.get(target, 0)
        if not translation.target.startswith("dynamo") and target not in ("sglang", "trtllm-serve"):
            assert len(parsed(target, text)) >= len(translation.kept) - fixed, where
        else:
            parsed(target, text)
        lost = [line for line in text.splitlines() if line.startswith("# lost: ")]
        assert len(lost) == sum(line.exactness == "lost" for line in translation.lines), where


@pytest.mark.parametrize("target", ["vllm", "trtllm-serve"])
def test_the_text_read_again_is_the_same_settings(target: str) -> None:
    for where in public():
        translation = translate(given(where), target)
        again = translate(read_text(rendered(translation), "x.yaml", target), target)
        files = {line.name: line.value for line in translation.kept if not str(line.name).startswith("--")}
        files.pop("model", None) if target == "trtllm-serve" else None
        found = {name: value for line in again.kept for name, value in leaves(line.value, f"{line.name}.").items()}
        wanted = {path: value for name, value in files.items() for path, value in leaves(value, f"{name}.").items()}
        assert {name: str(value) for name, value in found.items()} == {n: str(v) for n, v in wanted.items()}, where
