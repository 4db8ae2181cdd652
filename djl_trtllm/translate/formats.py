"""Reads what an engine is started with, a file or a command line with what stands around it, and writes it for another.

For example `docker run --gpus all vllm/vllm-openai --model X -tp 2` is vLLM's, with `model` and `tensor_parallel_size`,
and what docker takes before the image is reported as not translated. What is written has the origin, exactness and
reason of each line as comments, and at its end those of lost settings.
"""

import json
import math
import re
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from string import Template
from typing import Any

import yaml

from djl_trtllm.backends.extra_options import scalar_of
from djl_trtllm.config.compat import foreign_format, triton, truss
from djl_trtllm.config.options import suggest
from djl_trtllm.config.options.option import as_text
from djl_trtllm.config.sources import Origin, Source, masked, parse_properties, read_environment
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.translate.translation import (
    COMMAND_LINE,
    PATCH,
    STARTS,
    TITLES,
    WORKERS,
    Line,
    Translation,
    bare,
    base,
    dropped,
    engine_of_lmi,
    names_of,
    parsed,
    row_of,
    shown,
)

_YAML = (".yaml", ".yml")
_ENVIRONMENT = "a variable of the environment: the target reads others"
_AROUND = "it is not the engine's: it starts the process around it"
_OTHER_BATCH = "it is of a step around the engine: translate tensorrt_llm/config.pbtxt"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_ENDS = re.compile(r"[;|&]+|[&\d]?>{1,2}.*|<.*")
_LINE_ENDS = re.compile(
    r"""('[^']*'?|"(?:\\.|[^"\\])*"?|\\[^\r\n])|(?<!\S)\#[^\n]*|\\\r?\n|(\n|(?<!>)[;|&]+(?!>))""", re.DOTALL
)
"""Quoted text, which stays, also without its end: looking for that again at each later quote would take minutes; an
escape; a comment; a line that goes on; the end of a command, also without spaces around it."""
_FILES = ("config", "extra_llm_api_options", "extra_engine_args")
"""Flags that name a YAML file of the engine's arguments."""
_SILENT = (";", "python", "python3", "-m", "-u", "exec", "-e", "--env", "export")
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_IMAGE = re.compile(r"(^|/)vllm/vllm|vllm-openai")


def read(words: Sequence[str], engine: str | None = None) -> Translation:
    """What a file, or the words of a command line, set. Raises `DjlTrtllmError` for what no engine reads.

    `engine` is the one that a command line without a program, or a YAML file, is for.
    """
    path = Path(words[0])
    if len(words) > 1 or re.search(r"\s", words[0].strip()) or not (path.suffix or path.exists()):
        return read_command(words[0] if len(words) == 1 else shlex.join(words), engine)
    return _read_path(path, engine)


def _read_path(path: Path, engine: str | None) -> Translation:
    if path.is_dir():
        files = f"{path / 'serving.properties'}, config.pbtxt or config.yaml"
        raise DjlTrtllmError(f"{path} is a directory: name the file in it, such as {files}")
    text = foreign_format.read_text(path)
    if isinstance(text, Source):
        raise DjlTrtllmError(text.problems[0])
    found = read_text(text, str(path), engine)
    beside = triton.llm_api_file(path) if path.suffix == ".pbtxt" else None
    if beside is None:
        return found
    return replace(found, lines=(*found.lines, *_read_path(beside, "triton").lines))


def read_text(text: str, path: str, engine: str | None = None) -> Translation:
    """What the text of a file sets; `path` is shown, and says by its end which kind it is."""
    if "\0" in text:
        raise DjlTrtllmError(f"{path}: it has NUL characters, which no engine reads: expected text")
    suffix = Path(path).suffix
    try:
        if suffix == ".properties":
            return _of_sources("lmi", [parse_properties(text, path)])
        if suffix == ".pbtxt":
            around = triton.model_of(triton.parse(text), path) != triton.ENGINE_MODEL
            return _of_sources("triton", [triton.parse_config(text, path)], around=around)
        if suffix not in _YAML:
            return read_command(text, engine)
        if engine in (None, "truss") and truss.is_truss(text):
            return _read_truss(text, path)
        return _read_llm_api(text, path) if engine == "triton" else _read_yaml(text, path, engine)
    except foreign_format.FormatError as error:
        raise DjlTrtllmError(f"{path}:{error.line}: {error}") from None


def _of_sources(engine: str, sources: Sequence[Source], *, around: bool = False) -> Translation:
    """Settings that `config/` has read, with LMI's keys; with `around` of a step of Triton around the engine."""
    if problems := [problem for source in sources for problem in source.problems]:
        raise ConfigError(problems)
    # Of Truss's two names of the model the one that clients use counts, as in `config/`.
    settings = [setting for source in sources for setting in source.settings]
    settings.sort(key=lambda setting: engine == "truss" and setting.name != "model_name")
    found = []
    for setting in settings:
        compiled = setting.name == "gpt_model_path" or setting.name.endswith(".engine_repository")
        name = "compiled_engine" if compiled else setting.key
        problem = _OTHER_BATCH if around and "batch_size" in setting.assignment else ""
        private = row_of(name, "lmi").partition("vllm.")[2]
        if private and private not in names_of("vllm").names:
            near = suggest(setting.key)
            advice = f"did you mean {near}?" if near else "docs/options.md lists them"
            problem = f"LMI has no such option; {dropped('vllm', setting.name_in_engine) or advice}"
        value = parsed(setting.value)
        found.append(Line(setting.assignment, "lmi", value, setting.origin, None if problem else name, problem))
    ignored = [each for source in sources for each in source.ignored]
    found += [
        Line(e.assignment, "lmi", origin=e.origin, reason=e.reason, of_this_server=not e.unknown) for e in ignored
    ]
    remarks = (text for source in sources for text in (*source.warnings, *source.notes))
    notes = tuple(text for text in remarks if not any(each.reason in text for each in ignored))
    return Translation(engine, engine, tuple(found), notes)


def _read_truss(text: str, path: str) -> Translation:
    """A Truss's own settings, and the settings of TensorRT-LLM's YAML file that it passes on."""
    found = _of_sources("truss", truss.parse_config(text, path)[:1])
    own = [each for each in found.lines if not each.written.startswith(PATCH)]
    leaves = [(name, node) for name, node in _leaves(truss.compose(text)) if name.startswith(PATCH)]
    passed = _named_nodes(((name.removeprefix(PATCH), node) for name, node in leaves), path, "trtllm-serve")
    return replace(found, lines=(*own, *(replace(each, written=PATCH + each.written) for each in passed)))


def _read_llm_api(text: str, path: str) -> Translation:
    """The settings of a `model.yaml` of Triton's LLM API: options, and arguments of TensorRT-LLM beside them."""
    found = _of_sources("triton", [triton.parse_llm_api(text, path)])
    # The file's name says the first of these, and the second is all arguments together.
    own = [each for each in found.lines if each.name not in ("option.triton_model", "option.extra_llm_api_options")]
    names = (*triton.LLM_API_OPTIONS, "triton_config")
    leaves = [(name, node) for name, node in _leaves(truss.compose(text)) if name.partition(".")[0] not in names]
    return replace(found, lines=(*own, *_named_nodes(leaves, path, "trtllm-serve")))


# -- YAML files --------------------------------------------------------------------------------------------------------


def _read_yaml(text: str, path: str, engine: str | None) -> Translation:
    """A file of `--config`. An object of vLLM is one setting; of other engines each field is one."""
    root = truss.compose(text)
    nodes = list(_leaves(root))
    if engine in (None, "dynamo"):  # a file that Dynamo's worker takes is one of its engine
        engine = _engine_of([name for name, _ in nodes], path, ("vllm", "sglang", "trtllm-serve"))
    if engine == "vllm":
        nodes = [(key.value, node) for key, node in root.value]
    return Translation(engine, engine, tuple(_named_nodes(nodes, path, engine)))


def _leaves(node: yaml.Node, name: str = "") -> Iterator[tuple[str, yaml.Node]]:
    """The values by the paths of their keys; a list is one value."""
    if isinstance(node, yaml.MappingNode) and (node.value or not name):
        for key, inner in node.value:
            yield from _leaves(inner, f"{name}.{key.value}" if name else key.value)
    else:
        yield name, node


def _named_nodes(nodes: Iterable[tuple[str, yaml.Node]], path: str, engine: str) -> Iterator[Line]:
    for name, node in nodes:
        yield _named(name, _plain(node), Origin.file(path, node.start_mark.line + 1), engine)


def _plain(node: yaml.Node) -> Any:
    """A value as JSON has it. Inside an object a dot is one of the name."""
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(inner) for key, inner in node.value}
    return [_plain(member) for member in node.value] if isinstance(node, yaml.SequenceNode) else scalar_of(node)


def _engine_of(names: Sequence[str], where: str, engines: Iterable[str]) -> str:
    """The engine that has most of the names."""
    known = {engine: sum(names_of(engine).find(name) is not None for name in names) for engine in engines}
    best = [engine for engine, count in known.items() if count and count == max(known.values())]
    if len(best) != 1:
        raise DjlTrtllmError(f"{where}: it may be of {', '.join(best or known)}: say which by --from")
    return best[0]


# -- command lines -----------------------------------------------------------------------------------------------------


def read_command(text: str, engine: str | None = None) -> Translation:
    """What a command line sets, with the variables and the program that stand before the engine's own.

    Of several commands the first one of an engine is read, and the others are reported.
    """
    one = _LINE_ENDS.sub(lambda match: match[1] or f" {match[2] or ''} ".replace("\n", ";"), text)
    try:
        words = shlex.split(one)
    except ValueError as error:
        raise DjlTrtllmError(f"{shown(text)}: this is no command line: {error}") from None
    if all(word == ";" for word in words):
        raise DjlTrtllmError("there is nothing to translate: expected a command line of an engine, and found no word")
    if all(word == ";" or _ASSIGNMENT.fullmatch(word) for word in words):
        return _of_variables(_assigned(words))
    engine, start, after = _program(words, engine)
    before, variables = words[:start], _assigned(words[:start])
    own, used = _expanded(words[after:], variables)
    left = [name for name in variables if name.isupper() and name not in used]
    lines = [Line(shown(name, variables[name]), "", reason=_ENVIRONMENT) for name in left]
    around = (word for word in before if word not in _SILENT and word.partition("=")[0] not in (*left, *used))
    if rest := " ".join(around):
        lines.append(Line(shown(rest), "", reason=_AROUND))
    end = next((place for place, word in enumerate(own) if _ENDS.fullmatch(word)), len(own))
    # A flag wins over the file of --config, wherever that stands.
    lines += sorted(_flags(own[:end], engine), key=lambda given: given.origin == COMMAND_LINE)
    if rest := " ".join(own[end:]).strip("&; "):
        lines.append(Line(shown(rest), engine, reason="it is the shell's"))
    return Translation(engine, engine, tuple(lines))


def _assigned(words: Sequence[str]) -> dict[str, str]:
    """The variables that words `NAME=VALUE` set, of which the last counts."""
    return {match[1]: match[2] for word in words if (match := _ASSIGNMENT.fullmatch(word)) is not None}


def _of_variables(environ: Mapping[str, str]) -> Translation:
    """The variables of LMI's container; those that it does not know are reported."""
    found = _of_sources("lmi", read_environment(environ))
    known = {given.origin.where for given in found.lines}
    lost = (Line(shown(n, v), "lmi", reason=_ENVIRONMENT) for n, v in environ.items() if n not in known)
    return replace(found, lines=(*found.lines, *lost))


def _program(words: Sequence[str], engine: str | None) -> tuple[str, int, int]:
    """The engine, the place of its program and that of its first argument."""
    for place, word in enumerate(words):
        following = words[place + 1 : place + 2]
        program = word.rpartition("/")[2]
        for start in ((program, *following), (program,)):
            if start in STARTS:
                return STARTS[start], place, place + len(start)
        if _IMAGE.search(word) and following not in (["vllm"], ["python"], ["python3"]):
            return "vllm", place, place + 1
    written, programs = shown(" ".join(words)), ", ".join(" ".join(start) for start in STARTS)
    if engine is not None and words[0].startswith("-"):
        flags = [word.partition("=")[0] for word in words if not _is_value(word)]
        return _engine_of(flags, written, WORKERS) if engine == "dynamo" else engine, 0, 0
    advice = f"or its flags alone with --from, which is one of {', '.join(TITLES)}"
    raise DjlTrtllmError(f"{written}: expected a file, or a command line with one of {programs}, {advice}")


def _expanded(words: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], set[str]]:
    """The words with variables of the shell put in, and the names of these.

    A secret is not put in, because no name says of it what it is.
    """
    known = {name: value for name, value in variables.items() if value and masked(name, value) == value}
    used = known.keys() & {name.strip("{}") for name in _VARIABLE.findall(" ".join(words))}
    return [Template(word.replace("$$", "$$$$")).safe_substitute(known) for word in words], used


def _flags(given: Sequence[str], engine: str) -> Iterator[Line]:
    names, words = names_of(engine), deque(given)
    if words and _is_value(words[0]):
        yield _named("model", words.popleft(), COMMAND_LINE, engine)
    while words:
        word = words.popleft()
        if base(engine) == "vllm":
            word = re.sub(r"^-O(?=\w)", "-O=", word)  # it takes `-O3` for `-O 3`
        if _is_value(word):
            yield Line(shown(word), engine, reason="no flag takes it")
            continue
        flag, joined, text = word.partition("=")
        kind = names.names.get(names.find(flag) or names.find(_positive(flag)) or "", "").lower()
        switch = "bool" in kind and "str" not in kind
        values = [text] if joined else []
        while words and not joined and _is_value(words[0]) and (not values or "list[" in kind):
            if switch and words[0].lower() not in ("true", "false"):
                break
            values.append(words.popleft())
        if kind and not values and "bool" not in kind:
            yield Line(shown(word), engine, reason="it needs a value, and has none")
        else:
            yield from _flag(flag, values, engine)


def _flag(flag: str, values: list[str], engine: str) -> Iterator[Line]:
    """The settings of a flag, or of the file that it names. A flag without values is a switch."""
    value: Any = parsed(values[0]) if len(values) == 1 else values or True
    file, written = Path(str(value)), shown(flag, value if values else None)
    if bare(flag) == "override_engine_args" and isinstance(value, dict):
        # Dynamo merges it into the arguments, field by field.
        yield from (_named(f"--{_TYPED}{path}", inner, COMMAND_LINE, engine) for path, inner in _paths(value))
    elif bare(flag) not in _FILES:
        yield replace(_named(flag, value, COMMAND_LINE, engine), written=written)
    elif file.suffix in _YAML and file.is_file():
        yield from _read_path(file, base(engine)).lines
    else:
        yield Line(written, engine, reason="the file is not here: translate it too")


def _paths(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in an object by the paths of their names."""
    for name, value in fields.items():
        nested = isinstance(value, dict) and value
        yield from _paths(value, f"{prefix}{name}.") if nested else [(f"{prefix}{name}", value)]


def _is_value(word: str) -> bool:
    return re.match(r"-(?!\.?\d)", word) is None


def _positive(switch: str) -> str:
    """The switch that another one turns off: `--no-enable-x` and, in a file, `no-enable-x`."""
    return re.sub("^(--)?no[-_]", r"\1", switch)


def _named(written: str, value: Any, origin: Origin, engine: str) -> Line:
    names, text = names_of(engine), shown(written, value)
    if (name := names.find(written)) is not None:
        return Line(text, engine, value, origin, name)
    if value is True and (name := names.find(_positive(written))) is not None:
        return Line(text, engine, False, origin, name)
    near = names.similar(written)
    advice = f"; did you mean {near}?" if near else ""
    reason = dropped(engine, written) or f"{names.title} {names.version} has no such name{advice}"
    return Line(text, engine, None, origin, reason=reason)


# -- the text ----------------------------------------------------------------------------------------------------------

_ESCAPED = re.compile(r'(["\\`]|\$(?!\w+|\{\w+\}))')
"""What stands between double quotes after a backslash: all that the shell reads there, but variables."""
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})
_TYPED = "trtllm."
"""How names of Dynamo begin that are arguments of TensorRT-LLM: `--trtllm.NAME` has one word, and underscores."""


def rendered(translation: Translation) -> str:
    """The text of the target's file or command line, with a newline at its end."""
    source = TITLES.get(translation.source, translation.source)
    lines = [f"# Translated from {source} by djl-trtllm translate."]
    writer = _WRITERS.get(translation.target, _command)
    unset = {found[0] for line in translation.kept for found in _VARIABLE.finditer(as_text(line.value))}
    if unset and writer is not _command:
        lines.append(f"# A file has no variables: write the values of {', '.join(sorted(unset))}.")
    lines += [*writer(translation), *(f"# {line}" for line in translation.lost)]
    return "\n".join(lines) + "\n"


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
            yield re.sub(r": \$(\w+)$", r": ${\1}", f"max_batch_size: {' '.join(text.split())}")
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
    started = _joined(["trtllm-serve", model, *words, "--config", "FILE.yaml"])
    yield f"# Start it by: {' '.join(started.split())}"
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
        *objects, name = path.split(".")
        reduce(lambda inner, each: inner.setdefault(each, {}), objects, found)[name] = leaf
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
    head, field, path = name.partition(".")  # a field of an object keeps its name, and needs a value
    flag = name if name.startswith("--") else f"--{head.replace('_', '-')}{field}{path}"
    if switch in ("true", "false") and not field:
        return [flag] if switch == "true" else [off + flag.removeprefix("--")] if off else []
    members = value if isinstance(value, list) else [value]
    return [flag, *(json.dumps(each) if isinstance(each, (dict, list)) else as_text(each) for each in members)]


def _joined(words: list[str]) -> str:
    """The words as the shell reads them. Variables in them are put in by it; nothing else in them is."""
    return " ".join(
        '"' + _ESCAPED.sub(r"\\\1", word) + '"' if _VARIABLE.search(word) else shlex.quote(word) for word in words
    )


_WRITERS = {"lmi": _properties, "triton": _pbtxt, "vllm": _vllm, "trtllm-serve": _trtllm_serve, "truss": _truss}
