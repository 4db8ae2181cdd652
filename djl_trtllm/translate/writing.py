"""Writes a translation as the target reads it: a properties file, YAML, config.pbtxt, or a command line.

Comments say of each line where it is from and how exact it is; those of lost settings are at the end.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from djl_trtllm.config.options.option import as_text
from djl_trtllm.translate.names import MODULES, TITLES
from djl_trtllm.translate.translation import Line, Translation, engine_of_lmi

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_ESCAPED = re.compile(r'(["\\`]|\$(?!\w+|\{\w+\}))')
"""What stands between double quotes after a backslash: all that the shell reads there, but variables."""
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})
_TYPED = "trtllm."
"""How names of Dynamo begin that are arguments of TensorRT-LLM: `--trtllm.NAME` has one word, and underscores."""


def rendered(translation: Translation) -> str:
    """The text of the target's file or command line, with a newline at its end."""
    source = TITLES.get(translation.source, translation.source)
    lines = [f"# Translated from {source} by djl-trtllm translate."]
    writer = _FILES.get(translation.target, _command)
    unset = {found[0] for line in translation.kept for found in _VARIABLE.finditer(as_text(line.value))}
    if unset and writer is not _command:
        lines.append(f"# A file has no variables: write the values of {', '.join(sorted(unset))}.")
    lines += [*writer(translation), *(f"# {summary(line)}" for line in translation.lost)]
    return "\n".join(lines) + "\n"


def summary(line: Line) -> str:
    """One line about a line: `near: --max-model-len=8192 (command line): the reason`."""
    text = f"{line.exactness.value}: {line.written} ({line.origin})"
    return _one_line(f"{text}: {line.reason}" if line.reason else text)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _properties(translation: Translation) -> Iterator[str]:
    if translation.source != "lmi":
        yield "# The engine that LMI is to run."
        yield f"option.rolling_batch={engine_of_lmi(translation.source)}"
    for line in translation.kept:
        plain = not isinstance(line.value, dict)
        if isinstance(line.value, list):
            plain = all(
                isinstance(item, (int, float)) or (isinstance(item, str) and "," not in item) for item in line.value
            )
        yield f"# {summary(line)}"
        yield f"{line.name}={as_text(line.value) if plain else json.dumps(line.value)}".translate(_ESCAPES)


def _pbtxt(translation: Translation) -> Iterator[str]:
    yield "# Put these into tensorrt_llm/config.pbtxt of tensorrtllm_backend, which also has the inputs and outputs."
    yield 'name: "tensorrt_llm"\nbackend: "tensorrtllm"'
    for line in translation.kept:
        text = as_text(line.value)
        yield f"# {summary(line)}"
        if line.name == "max_batch_size":
            # A number that is not known yet is `${N}` there.
            number = re.sub(r"^\$(\w+)$", r"${\1}", _one_line(text))
            yield f"max_batch_size: {number}"
        elif line.name == "decoupled":
            yield f"model_transaction_policy {{ decoupled: {text} }}"
        else:
            yield f"parameters {{ key: {json.dumps(line.name)} value: {{ string_value: {json.dumps(text)} }} }}"


def _vllm(translation: Translation) -> Iterator[str]:
    # Without a name vLLM serves a model of its own choice.
    model = "" if any(line.name == "model" for line in translation.kept) else "MODEL "
    yield f"# Start it by: vllm serve {model}--config FILE.yaml"
    fields = _nested({str(line.name): line for line in translation.kept})
    yield from _yaml({name.replace("_", "-"): leaf for name, leaf in fields.items()})


def _trtllm_serve(translation: Translation) -> Iterator[str]:
    flags = [line for line in translation.kept if str(line.name).startswith("--") or line.name == "model"]
    words = [word for line in flags if line.name != "model" for word in _words(line, "")]
    model = next((as_text(line.value) for line in flags if line.name == "model"), "MODEL")
    yield "# Start it by: " + _one_line(_joined(["trtllm-serve", model, *words, "--config", "FILE.yaml"]))
    yield from (f"#   {summary(line)}" for line in flags)
    yield from _yaml(_nested({str(line.name): line for line in translation.kept if line not in flags}))


def _truss(translation: Translation) -> Iterator[str]:
    yield "# Truss also needs resources.accelerator, the GPUs: H100:2, for example."
    leaves: dict[str, Line | str] = {"trt_llm.inference_stack": "v2"}
    if any(".checkpoint_repository." in str(line.name) for line in translation.kept):
        leaves["trt_llm.build.checkpoint_repository.source"] = "HF"
    yield from _yaml(_nested(leaves | {str(line.name): line for line in translation.kept}))


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Objects of the leaves, which are by the paths of their keys; none is a leaf and an object."""
    found: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *objects, name = path.split(".")
        fields = found
        for each in objects:
            fields = fields.setdefault(each, {})
        fields[name] = leaf
    return found


def _yaml(fields: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Lines of a YAML file, of lines and texts in objects."""
    for name, leaf in fields.items():
        if isinstance(leaf, dict):
            yield f"{indent}{name}:"
            yield from _yaml(leaf, f"{indent}  ")
        else:
            yield f"{indent}{name}: " + (leaf if isinstance(leaf, str) else f"{_scalar(leaf.value)}  # {summary(leaf)}")


def _scalar(value: Any) -> str:
    return str(yaml.safe_dump([value], default_flow_style=True, width=math.inf, sort_keys=False)[1:-2])


def _command(translation: Translation) -> Iterator[str]:
    kept = translation.kept
    yield from (f"# {summary(line)}" for line in kept)
    program = f"python -m {MODULES[translation.target]}"
    named = any(line.row == "model_id" for line in kept)
    # Dynamo takes the arguments of TensorRT-LLM that have more than a word as one object, and then all of them.
    arguments = {str(line.name): line.value for line in kept if str(line.name).startswith(_TYPED)}
    whole = any(isinstance(value, (list, dict, type(None))) for value in arguments.values())
    flags = [line for line in kept if not (whole and line.name in arguments)]
    words = [_words(line, "--no-" if translation.target == "dynamo.vllm" else "") for line in flags]
    words += [["--override-engine-args", json.dumps(_nested(arguments)["trtllm"])]] if whole else []
    lines = map(_joined, words)
    yield " \\\n  ".join([program if named else f"{program} --model MODEL", *filter(None, lines)])


def _words(line: Line, off: str) -> list[str]:
    """The words of one flag; a switch that is off begins with `off`, and is left out if `off` is empty."""
    name, value, switch = str(line.name), line.value, as_text(line.value)
    if name.startswith(_TYPED):
        return [f"--{name}", switch]
    flag = name if name.startswith("--") else f"--{name.replace('_', '-')}"
    if switch in ("true", "false"):
        return [flag] if switch == "true" else [off + flag.removeprefix("--")] if off else []
    members = value if isinstance(value, list) else [value]
    return [flag, *(json.dumps(each) if isinstance(each, (dict, list)) else as_text(each) for each in members)]


def _joined(words: list[str]) -> str:
    """The words as the shell reads them. Variables in them are put in by it; nothing else in them is."""
    return " ".join(
        '"' + _ESCAPED.sub(r"\\\1", word) + '"' if _VARIABLE.search(word) else shlex.quote(word) for word in words
    )


_FILES = {
    "lmi": _properties,
    "triton": _pbtxt,
    "vllm": _vllm,
    "trtllm-serve": _trtllm_serve,
    "truss": _truss,
}
