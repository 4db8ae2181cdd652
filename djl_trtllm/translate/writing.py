"""Writes a translation as the target reads it: a properties file, YAML, config.pbtxt, or a command line.

Comments say of each line where it is from and how exact it is; those of lost settings are at the end.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from djl_trtllm.config.options.option import as_text
from djl_trtllm.translate.names import TITLES, WORKERS
from djl_trtllm.translate.translation import Line, Translation, engine_of_lmi

_PLAIN = re.compile(r"[A-Za-z0-9_./$][\w./@+$-]*(:[\w./@+$-]+)*")
_NAMED, _BRACED = re.compile(r"^\$(\w+)$"), r"${\1}"
"""A variable of the shell, and a placeholder as config.pbtxt has it, where a number is not known yet."""
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})
_NO_TEXTS = ("yes", "no", "on", "off", "null", "y", "n")
_PROGRAMS = {
    "sglang": "python -m sglang.launch_server",
    **{worker: f"python -m {worker}" for worker in WORKERS},
}


def rendered(translation: Translation) -> str:
    """The text of the target's file or command line, with a newline at its end."""
    writer = _WRITERS.get(translation.target, _command)
    source = TITLES.get(translation.source, translation.source)
    head = f"# Translated from {source} by djl-trtllm translate."
    tail = [f"# {summary(line)}" for line in translation.lost]
    return "\n".join([head, *writer(translation), *tail]) + "\n"


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
        value = json.dumps(line.value) if isinstance(line.value, (dict, list)) and not _plain_list(line.value) else None
        yield f"# {summary(line)}"
        yield f"{line.name}={value or as_text(line.value)}".translate(_ESCAPES)


def _plain_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, (int, float)) or _is_word(item) for item in value)


def _is_word(item: Any) -> bool:
    return isinstance(item, str) and "," not in item


def _pbtxt(translation: Translation) -> Iterator[str]:
    yield "# Put these into tensorrt_llm/config.pbtxt of tensorrtllm_backend, which also has the inputs and outputs."
    yield 'name: "tensorrt_llm"\nbackend: "tensorrtllm"'
    for line in translation.kept:
        text = json.dumps(as_text(line.value))
        yield f"# {summary(line)}"
        if line.name == "max_batch_size":
            yield f"max_batch_size: {_NAMED.sub(_BRACED, _one_line(as_text(line.value)))}"
        elif line.name == "decoupled":
            yield f"model_transaction_policy {{ decoupled: {as_text(line.value)} }}"
        else:
            yield f"parameters {{ key: {json.dumps(line.name)} value: {{ string_value: {text} }} }}"


def _vllm(translation: Translation) -> Iterator[str]:
    yield "# Start it by: vllm serve --config FILE.yaml"
    dashed = {str(line.name).partition("."): line for line in translation.kept}
    yield from _yaml({head.replace("_", "-") + dot + rest: line for (head, dot, rest), line in dashed.items()})


def _trtllm_serve(translation: Translation) -> Iterator[str]:
    flags = [line for line in translation.kept if str(line.name).startswith("--") or line.name == "model"]
    words = [word for line in flags if line.name != "model" for word in _words(str(line.name), line.value, "")]
    model = next((as_text(line.value) for line in flags if line.name == "model"), "MODEL")
    yield "# Start it by: " + _one_line(shlex.join(["trtllm-serve", model, *words, "--config", "FILE.yaml"]))
    for line in flags:
        yield f"#   {summary(line)}"
    yield from _yaml({str(line.name): line for line in translation.kept if line not in flags})


def _truss(translation: Translation) -> Iterator[str]:
    yield "# Truss also needs resources.accelerator, the GPUs: H100:2, for example."
    names: dict[str, Line | str] = {str(line.name): line for line in translation.kept}
    fixed: dict[str, Line | str] = {"trt_llm.inference_stack": "v2"}
    if any(".checkpoint_repository." in name for name in names):
        fixed["trt_llm.build.checkpoint_repository.source"] = "HF"
    yield from _yaml(fixed | names)


def _yaml(leaves: Mapping[str, Line | str], indent: str = "") -> Iterator[str]:
    """Lines of a YAML file, of leaves by the paths of their keys."""
    heads: dict[str, dict[str, Line | str]] = {}
    for path, leaf in leaves.items():
        head, _, rest = path.partition(".")
        heads.setdefault(head, {})[rest] = leaf
    for head, inside in heads.items():
        if "" in inside:
            leaf = inside.pop("")
            yield f"{indent}{head}: " + (leaf if isinstance(leaf, str) else f"{_scalar(leaf.value)}  # {summary(leaf)}")
        if inside:
            yield f"{indent}{head}:"
            yield from _yaml(inside, f"{indent}  ")


def _scalar(value: Any) -> str:
    """A value of YAML; text that YAML reads as something else than its number stays as it is."""
    if value is None:
        return "null"
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    text = as_text(value)
    return text if _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXTS else json.dumps(text)


def _command(translation: Translation) -> Iterator[str]:
    yield from (f"# {summary(line)}" for line in translation.kept)
    off = "--no-" if translation.target == "dynamo.vllm" else ""
    lines = [shlex.join(_words(_flag(str(line.name)), line.value, off)) for line in translation.kept]
    yield " \\\n  ".join([_PROGRAMS[translation.target], *filter(None, lines)])


def _flag(name: str) -> str:
    return f"--{name}" if name.startswith(_TYPED) else f"--{name.replace('_', '-')}"


_TYPED = "trtllm."
"""How flags of Dynamo begin that are arguments of TensorRT-LLM: each has a value, and underscores."""


def _words(flag: str, value: Any, off: str) -> list[str]:
    """The words of one flag; a switch that is off has `off` in front, and is left out where that is empty."""
    switch = as_text(value)
    if switch in ("true", "false") and not flag.startswith(f"--{_TYPED}"):
        return [flag] if switch == "true" else [f"{off}{flag.removeprefix('--')}"] if off else []
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    return [flag, *map(as_text, value)] if isinstance(value, list) else [flag, as_text(value)]


_WRITERS = {
    "lmi": _properties,
    "triton": _pbtxt,
    "vllm": _vllm,
    "trtllm-serve": _trtllm_serve,
    "truss": _truss,
}
