"""Turns settings of one engine into those of another, and writes them as the target reads them.

Each setting becomes a line with its origin, exactness and reason. The text has these as comments, and at its end those
of lost settings.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from djl_trtllm.config.options.option import NotAValueError, as_text
from djl_trtllm.config.sources import masked
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.translate.names import (
    TITLES,
    WORKERS,
    Name,
    base,
    cell,
    name_in,
    name_in_lmi_of_vllm,
    names_of,
    row_of,
    rule,
)
from djl_trtllm.translate.reading import Input, Line, put

_ECHOES = ("max_input_len", "max_output_len")
"""Options that `config/` sets by Truss's max_seq_len, because this server bounds prompts and outputs too."""


@dataclass(frozen=True)
class Translation:
    """The lines for `target`, in the order of the source, and remarks of reading it."""

    source: str
    target: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    @property
    def lost(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.name is None)

    @property
    def kept(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.name is not None)


def engine_named(name: str) -> str:
    """The engine of this name. Raises `DjlTrtllmError`."""
    if name not in (*TITLES, *WORKERS):
        known = ", ".join((*TITLES, *WORKERS))
        raise DjlTrtllmError(f"{name} is no engine that is known here: expected one of {known}")
    return name


def engine_of_lmi(source: str) -> str:
    """The engine that LMI is to run in place of another one: `vllm` or `trtllm`."""
    return "vllm" if base(source) in ("vllm", "sglang") else "trtllm"


def translate(given: Input, target: str) -> Translation:
    """The settings of one engine as those of `target`; of Dynamo's workers the one that runs the source's engine."""
    target = _worker(given) if target == "dynamo" else engine_named(target)
    lines = [line for each in given.settings for line in _lines(each, given.engine, target)]
    return Translation(given.engine, target, tuple(_once(_wholes(lines, target))), given.notes)


def _worker(given: Input) -> str:
    """Dynamo's worker for the engine that the source runs on."""
    for worker, engine in WORKERS.items():
        if given.engine in (worker, engine):
            return worker
    known = [each for each in given.settings if each.name]
    chosen = " ".join(str(each.value) for each in known if rule(row_of(str(each.name), "lmi"), "chooses"))
    return "dynamo.vllm" if "vllm" in chosen or "lmi-dist" in chosen else "dynamo.trtllm"


def _lines(given: Line, source: str, target: str) -> Iterator[Line]:
    if given.name is None:
        elsewhere = given.of_this_server and target != "lmi"
        yield given.lost(f"{names_of(target).title} has no counterpart" if elsewhere else given.reason)
        return
    row = row_of(given.name, given.engine)
    given = replace(given, row=row)
    if source == "truss" and row in _ECHOES and ".max_seq_len=" in given.written and target != "lmi":
        return
    passes = target == "lmi" and engine_of_lmi(source) == "vllm"
    there = name_in_lmi_of_vllm(row) if passes else name_in(row, target)
    own = name_in(row, given.engine)
    if isinstance(given.value, dict) and there.lost:
        fields = list(_fields(given, target))
        yield from fields if any(each.name for each in fields) else [given.lost(there.lost)]
        return
    if given.value is None and own.values is None:
        there = Name(lost="it sets nothing, and needs no line")
    try:
        if there.lost:
            raise ValueError(there.lost)
        value = _value(own, there, given, source, target)
        if refusal := names_of(target).refusal(there.name, value):
            raise ValueError(refusal)
    except ValueError as error:
        # What Triton does was compiled into its engine.
        idle = target != "triton" and as_text(given.value).lower() == rule(row, "idle")
        yield given.lost(f"{as_text(given.value)} is what the target does anyway" if idle else str(error))
        return
    # What is near in both engines in the same way is the same between them. Triton's and Truss's have LMI's names here.
    near_here = cell(row, source).get("near", "") if given.engine == "lmi" else own.near
    first, second = near_here.split("; "), there.near.split("; ")
    near = [part for part in dict.fromkeys((*first, *second)) if (part in first) != (part in second) and part]
    if row == "model_name" and isinstance(value, list) and value and base(target) != "vllm":
        near += ["it has one name, which is the first"] if len(value) > 1 else []
        value = value[0]
    if str(value).startswith((".", "/", "~")) and (remote := cell(row, target).get("remote")):
        near.append(remote)
    reason = "" if source == target else "; ".join(near)
    yield replace(given, engine=target, name=there.name, value=value, reason=reason)


def _value(own: Name, there: Name, given: Line, source: str, target: str) -> Any:
    """The value as the target writes it. Raises ValueError for one that the target does not have, or may not have."""
    engines, value = {base(source), base(target)}, given.value
    try:
        ours = own.read(given.row, value)
    except NotAValueError as error:
        # What only one engine knows stays as it is where it runs the target too: LMI hands its words to vLLM.
        if (len(engines) == 1 and own.values == there.values) or (there.values is None and engines <= {"lmi", "vllm"}):
            return value
        if there.values is None:
            raise ValueError(f"no other engine is known to have this value: {error}") from None
        return there.write(value)
    if target != "lmi" and as_text(ours) in (refused := rule(given.row, "refused") or {}):
        raise ValueError(refused[as_text(ours)])
    # Words that both take from the option are written as they stand: each may have spellings of its own.
    stands = isinstance(ours, str) and own.values is None and there.values is None
    return there.write(value if stands else ours)


def _fields(given: Line, target: str) -> Iterator[Line]:
    """The fields of an object that the target does not have as a whole, each on its own."""
    engine = "vllm" if given.engine == "lmi" else given.engine
    pending: list[tuple[str, Any]] = [(name_in(given.row, engine).name or str(given.name), given.value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict) and value:
            pending += [(f"{path}.{name}", inner) for name, inner in reversed(value.items())]
            continue
        written = f"{given.written.partition('=')[0]} {path}={masked(path, as_text(value))}"
        each = Line(written, engine, None if value == {} else value, given.origin, path)
        yield from _lines(each, engine, target)


def _wholes(lines: list[Line], target: str) -> list[Line]:
    """The lines. A line is lost too if it tunes a setting that is lost, or that the target needs and does not have."""
    kept = {line.row for line in lines if line.name is not None}
    lost = {line.row for line in lines} - kept

    def checked(line: Line) -> Line:
        whole = rule(line.row, "part_of")
        if whole is None or whole in kept or (whole not in lost and target in rule(whole, "found_by")):
            return line
        return line.lost(f"{whole} is lost" if whole in lost else f"the target needs {whole}, which is not set")

    return [checked(line) for line in lines]


def _once(lines: list[Line]) -> Iterator[Line]:
    """One line for each name: the exact one, or else the last one, because the last of repeated flags wins.

    A field of an object that another line sets as a whole is lost.
    """
    best: dict[str | None, Line] = {}
    for line in lines:
        earlier = best.setdefault(line.name, line)
        if line.row == earlier.row or line.exactness in (earlier.exactness, "same"):
            best[line.name] = line
    for line in lines:
        path = [] if line.name is None else line.name.split(".")
        objects = (".".join(path[:end]) for end in range(1, len(path)))
        winner = next((best[name] for name in objects if name in best), best[line.name])
        if line.name is None or line is winner:
            yield line
        elif (winner.written, winner.value) != (line.written, line.value):
            yield line.lost(f"{winner.written} sets {winner.name}")


# -- the text ----------------------------------------------------------------------------------------------------------

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
    lines += [*writer(translation), *(f"# {line}" for line in translation.lost)]
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _properties(translation: Translation) -> Iterator[str]:
    if translation.source != "lmi":
        yield "# The engine that LMI is to run."
        yield f"option.rolling_batch={engine_of_lmi(translation.source)}"
    for line in translation.kept:
        plain = not isinstance(line.value, dict)
        if isinstance(line.value, list):
            plain = not any(isinstance(each, (dict, list)) or "," in as_text(each) for each in line.value)
        yield f"# {line}"
        yield f"{line.name}={as_text(line.value) if plain else json.dumps(line.value)}".translate(_ESCAPES)


def _pbtxt(translation: Translation) -> Iterator[str]:
    yield "# Put these into tensorrt_llm/config.pbtxt of tensorrtllm_backend, which also has the inputs and outputs."
    yield 'name: "tensorrt_llm"\nbackend: "tensorrtllm"'
    for line in translation.kept:
        text = as_text(line.value)
        yield f"# {line}"
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
    yield from (f"#   {line}" for line in flags)
    yield from _yaml(_nested({str(line.name): line for line in translation.kept if line not in flags}))


def _truss(translation: Translation) -> Iterator[str]:
    yield "# Truss also needs resources.accelerator, the GPUs: H100:2, for example."
    leaves: dict[str, Any] = {"trt_llm.inference_stack": "v2"}
    if any(".checkpoint_repository." in str(line.name) for line in translation.kept):
        leaves["trt_llm.build.checkpoint_repository.source"] = "HF"
    yield from _yaml(_nested(leaves | {str(line.name): line for line in translation.kept}))


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Objects of the leaves, which are by the paths of their keys; none is a leaf and an object."""
    found: dict[str, Any] = {}
    for path, leaf in leaves.items():
        put(found, path, leaf)
    return found


def _yaml(fields: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Lines of a YAML file, of lines and texts in objects."""
    for name, leaf in fields.items():
        if isinstance(leaf, dict):
            yield f"{indent}{name}:"
            yield from _yaml(leaf, f"{indent}  ")
        elif isinstance(leaf, str):
            yield f"{indent}{name}: {leaf}"
        else:
            value = yaml.safe_dump([leaf.value], default_flow_style=True, width=math.inf, sort_keys=False)[1:-2]
            yield f"{indent}{name}: {value}  # {leaf}"


def _command(translation: Translation) -> Iterator[str]:
    kept = translation.kept
    yield from (f"# {line}" for line in kept)
    program = f"python -m {names_of(translation.target).module}"
    named = any(line.row == "model_id" for line in kept)
    # Dynamo takes the arguments of TensorRT-LLM that have more than a word as one object, and then all of them.
    arguments = {str(line.name): line.value for line in kept if str(line.name).startswith(_TYPED)}
    whole = any(isinstance(value, (list, dict, type(None))) for value in arguments.values())
    flags = [line for line in kept if not (whole and line.name in arguments)]
    words = [_words(line, "--no-" if translation.target == "dynamo.vllm" else "") for line in flags]
    words += [["--override-engine-args", json.dumps(_nested(arguments)["trtllm"])]] if whole else []
    yield " \\\n  ".join([program if named else f"{program} --model MODEL", *map(_joined, filter(None, words))])


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
