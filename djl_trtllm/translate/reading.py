"""Reads what one engine is started with: a file, or a command line with what stands around it.

For example `docker run --gpus all vllm/vllm-openai --model X -tp 2` is vLLM's, with `model` and `tensor_parallel_size`,
and what docker takes before the image is reported as not translated.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

import yaml

from djl_trtllm.backends.extra_options import scalar_of
from djl_trtllm.config.compat import triton, truss
from djl_trtllm.config.compat.foreign_format import FormatError
from djl_trtllm.config.options import suggest
from djl_trtllm.config.sources import Origin, Source, masked, parse_properties, read_environment, shortened
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.files import MOST_SETTINGS_BYTES, read_file
from djl_trtllm.translate.names import (
    PATCH,
    STARTS,
    TITLES,
    WORKERS,
    bare,
    base,
    dropped,
    names_of,
    parsed,
    row_of,
)

_LONGEST = 100
_YAML = (".yaml", ".yml")
_LINE = Origin.override("command line")
_ENVIRONMENT = "a variable of the environment: the target reads others"
_AROUND = "it is not the engine's: it starts the process around it"
_OTHER_BATCH = "it is of a step around the engine: translate tensorrt_llm/config.pbtxt"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_ENDS = re.compile(r"&{1,2}|\|{1,2}|;|\d?>{1,2}.*|<.*")
_LINE_ENDS = re.compile(r"""('[^']*'?|"(?:\\.|[^"\\])*"?|\\[^\n])|(?<!\S)\#[^\n]*|\\\n|\n""", re.DOTALL)
"""Quoted text, which stays, also without its end: looking for that again at each later quote would take minutes; an
escape; a comment; a line that goes on; the end of a command."""
_FILES = ("config", "extra_llm_api_options", "extra_engine_args")
"""Flags that name a YAML file of the engine's arguments."""
_SILENT = (";", "python", "python3", "-m", "-u", "exec", "-e", "--env", "export")
_IMAGE = re.compile(r"(^|/)vllm/vllm|vllm-openai")


@dataclass(frozen=True)
class Line:
    """One setting in the terms of an engine, as it was `written`: a name and a value; a lost one has neither.

    `reason` says why it is near or lost, and `row` is the row of `rows.toml` that it was translated by. What is
    `of_this_server` sets nothing here: its reason is of no other engine.
    """

    written: str
    engine: str
    value: Any = None
    origin: Origin = _LINE
    name: str | None = None
    reason: str = ""
    row: str = ""
    of_this_server: bool = False

    @property
    def exactness(self) -> str:
        """`same` where the engine does the same with the line, `near`, or `lost` where it has no line."""
        return "lost" if self.name is None else "near" if self.reason else "same"

    def lost(self, reason: str) -> Line:
        return replace(self, name=None, value=None, reason=reason)

    def as_json(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("exactness", "reason", "name", "value", "row")}
        return {"written": self.written, "origin": str(self.origin), **named}

    def __str__(self) -> str:
        """One line about it: `near: --max-model-len=8192 (command line): the reason`."""
        text = f"{self.exactness}: {self.written} ({self.origin})"
        return " ".join((f"{text}: {self.reason}" if self.reason else text).split())


@dataclass(frozen=True)
class Input:
    """What was read, of one engine. The settings of Triton and Truss have LMI's names, as those of LMI.

    `notes` are remarks of reading that are about no single setting.
    """

    engine: str
    settings: tuple[Line, ...]
    notes: tuple[str, ...] = ()


def read(words: Sequence[str], engine: str | None = None) -> Input:
    """What a file, or the words of a command line, set. Raises `DjlTrtllmError` for what no engine reads.

    `engine` is the one that a command line without a program, or a YAML file, is for.
    """
    path = Path(words[0])
    if len(words) > 1 or re.search(r"\s", words[0].strip()) or not (path.suffix or path.exists()):
        return read_command(words[0] if len(words) == 1 else shlex.join(words), engine)
    return _read_path(path, engine)


def _read_path(path: Path, engine: str | None) -> Input:
    if path.is_dir():
        files = f"{path / 'serving.properties'}, config.pbtxt or config.yaml"
        raise DjlTrtllmError(f"{path} is a directory: name the file in it, such as {files}")
    try:
        text = read_file(path, MOST_SETTINGS_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise DjlTrtllmError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = read_text(text, str(path), engine)
    beside = triton.llm_api_file(path) if path.suffix == ".pbtxt" else None
    if beside is None:
        return found
    return replace(found, settings=(*found.settings, *_read_path(beside, "triton").settings))


def read_text(text: str, path: str, engine: str | None = None) -> Input:
    """What the text of a file sets; `path` is shown, and says by its end which kind it is."""
    if "\0" in text:
        raise DjlTrtllmError(f"{path}: it has NUL characters, which no engine reads: expected text")
    suffix = Path(path).suffix
    if suffix == ".properties":
        return _of_sources("lmi", [parse_properties(text, path)])
    if suffix == ".pbtxt":
        around = triton.model_of(triton.parse(text), path) != triton.ENGINE_MODEL
        return _of_sources("triton", [triton.parse_config(text, path)], around=around)
    if suffix not in _YAML:
        return read_command(text, engine)
    if engine in (None, "truss") and truss.is_truss(text):
        return _read_truss(text, path)
    if engine == "triton":
        return _read_llm_api(text, path)
    return _read_yaml(text, path, engine)


def _of_sources(engine: str, sources: Sequence[Source], *, around: bool = False) -> Input:
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
    notes = (text for source in sources for text in (*source.warnings, *source.notes))
    return Input(engine, tuple(found), tuple(n for n in notes if not any(each.reason in n for each in ignored)))


def _read_truss(text: str, path: str) -> Input:
    """A Truss's own settings, and the settings of TensorRT-LLM's YAML file that it passes on."""
    found = _of_sources("truss", truss.parse_config(text, path)[:1])
    own = [each for each in found.settings if not each.written.startswith(PATCH)]
    leaves = [(name, node) for name, node in _leaves(truss.compose(text)) if name.startswith(PATCH)]
    passed = _of_leaves(((name.removeprefix(PATCH), node) for name, node in leaves), path, "trtllm-serve")
    return replace(found, settings=(*own, *(replace(each, written=PATCH + each.written) for each in passed)))


def _read_llm_api(text: str, path: str) -> Input:
    """The settings of a `model.yaml` of Triton's LLM API: options, and arguments of TensorRT-LLM beside them."""
    found = _of_sources("triton", [triton.parse_llm_api(text, path)])
    # The file's name says the first of these, and the second is all arguments together.
    own = [each for each in found.settings if each.name not in ("option.triton_model", "option.extra_llm_api_options")]
    names = (*triton.LLM_API_OPTIONS, "triton_config")
    leaves = [(name, node) for name, node in _leaves(_compose(text, path)) if name.partition(".")[0] not in names]
    return replace(found, settings=(*own, *_of_leaves(leaves, path, "trtllm-serve")))


# -- YAML files --------------------------------------------------------------------------------------------------------


def _read_yaml(text: str, path: str, engine: str | None) -> Input:
    """A file of `--config`. An object of vLLM is one setting; of other engines each field is one."""
    root = _compose(text, path)
    leaves = list(_leaves(root))
    if engine in (None, "dynamo"):  # a file that Dynamo's worker takes is one of its engine
        engine = _engine_of([name for name, _ in leaves], path, ("vllm", "sglang", "trtllm-serve"))
    given = _of_objects(root, path) if engine == "vllm" else _of_leaves(leaves, path, engine)
    return Input(engine, tuple(given))


def _compose(text: str, path: str) -> yaml.MappingNode:
    try:
        return truss.compose(text)
    except FormatError as error:
        raise DjlTrtllmError(f"{path}:{error.line}: {error}") from None


def _leaves(node: yaml.Node, name: str = "") -> Iterator[tuple[str, yaml.Node]]:
    """The values by the paths of their keys; a list is one value."""
    if isinstance(node, yaml.MappingNode) and (node.value or not name):
        for key, inner in node.value:
            yield from _leaves(inner, f"{name}.{key.value}" if name else key.value)
    else:
        yield name, node


def _of_leaves(leaves: Iterable[tuple[str, yaml.Node]], path: str, engine: str) -> Iterator[Line]:
    for name, node in leaves:
        yield _named(name, _value(node), Origin.file(path, node.start_mark.line + 1), engine)


def _of_objects(root: yaml.MappingNode, path: str) -> Iterator[Line]:
    """The settings of vLLM's file, where `speculative_config.method` is a field of an object.

    Inside an object a dot is one of the name: `inductor_compile_config: {triton.cudagraphs: true}`.
    """
    found: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for key, node in root.value:
        name, origin = key.value, Origin.file(path, node.start_mark.line + 1)
        first = origins.setdefault(name.partition(".")[0], origin)
        if not put(found, name, _plain(node) if "." in name else _value(node)):
            raise DjlTrtllmError(f"{origin}: {name}: it has a value already ({first}); keep one")
    return (_named(name, value, origins[name], "vllm") for name, value in found.items())


def put(fields: dict[str, Any], path: str, value: Any) -> bool:
    """Set what a path such as `speculative_config.method` leads to; false where something else is set already."""
    *objects, name = path.split(".")
    inner: Any = fields
    for each in objects:
        inner = inner.setdefault(each, {}) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or name in inner:
        return False
    inner[name] = value
    return True


def _value(node: yaml.Node) -> Any:
    """The value of a setting: text, which its option reads, None, a list or an object."""
    plain = _plain(node)
    return node.value or None if isinstance(node, yaml.ScalarNode) and plain is not None else plain


def _plain(node: yaml.Node) -> Any:
    """A value as JSON has it."""
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


def read_command(text: str, engine: str | None = None) -> Input:
    """What a command line sets, with the variables and the program that stand before the engine's own.

    Of several commands the first one of an engine is read, and the others are reported.
    """
    one = _LINE_ENDS.sub(lambda match: match[1] or (" ; " if match[0] == "\n" else " "), text)
    try:
        words = shlex.split(one)
    except ValueError as error:
        raise DjlTrtllmError(f"{_shown(text)}: this is no command line: {error}") from None
    commands = {word for word in words if word != ";"}
    if not commands:
        raise DjlTrtllmError("there is nothing to translate: expected a command line of an engine, and found no word")
    if len(assigned := _assigned(words)) == len(commands):
        return _of_variables(dict(assigned.values()))
    engine, start, after = _program(words, engine)
    before, own = _expanded(words[:start], words[after:])
    end = next((place for place, word in enumerate(own) if _ENDS.fullmatch(word)), len(own))
    # A flag wins over the file of --config, wherever that stands.
    settings = [*_around(before), *sorted(_flags(own[:end], engine), key=lambda given: given.origin == _LINE)]
    if rest := " ".join(own[end:]).strip("&; "):
        settings.append(Line(_shown(rest), engine, reason="it is the shell's"))
    return Input(engine, tuple(settings))


def _assigned(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The words that are `NAME=VALUE`, with name and value."""
    return {word: (match[1], match[2]) for word in words if (match := _ASSIGNMENT.fullmatch(word)) is not None}


def _around(words: Sequence[str]) -> Iterator[Line]:
    """What stands before the engine: variables each, the rest together."""
    variables = {word: pair for word, pair in _assigned(words).items() if pair[0].isupper()}
    yield from (Line(_shown(*pair), "", reason=_ENVIRONMENT) for pair in variables.values())
    silent = {*variables, *_SILENT}
    if rest := " ".join(word for word in words if word not in silent):
        yield Line(_shown(rest), "", reason=_AROUND)


def _of_variables(environ: Mapping[str, str]) -> Input:
    """The variables of LMI's container; those that it does not know are reported."""
    found = _of_sources("lmi", read_environment(environ))
    known = {given.origin.where for given in found.settings}
    lost = (Line(_shown(n, v), "lmi", reason=_ENVIRONMENT) for n, v in environ.items() if n not in known)
    return replace(found, settings=(*found.settings, *lost))


def _shown(written: str, value: Any = None) -> str:
    """`NAME=VALUE` with secrets masked, and shortened."""
    if value is None or value is True or value == []:
        return shortened(masked("", written), _LONGEST)
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{written}={shortened(masked(written, text), _LONGEST)}"


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
    shown, programs = _shown(" ".join(words)), ", ".join(" ".join(start) for start in STARTS)
    if engine is not None and words[0].startswith("-"):
        flags = [word.partition("=")[0] for word in words if not _is_value(word)]
        return _engine_of(flags, shown, WORKERS) if engine == "dynamo" else engine, 0, 0
    advice = f"or its flags alone with --from, which is one of {', '.join(TITLES)}"
    raise DjlTrtllmError(f"{shown}: expected a file, or a command line with one of {programs}, {advice}")


def _expanded(before: Sequence[str], own: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the program and those after it, with variables of the shell that are set before put in.

    A secret is not put in, because no name says of it what it is.
    """
    known = {name: value for name, value in _assigned(before).values() if value and masked(name, value) == value}
    used = known.keys() & {name.strip("{}") for name in re.findall(r"\$(\w+|\{\w+\})", " ".join(own))}
    expanded = [Template(word.replace("$$", "$$$$")).safe_substitute(known) for word in own]
    return [word for word in before if word.partition("=")[0] not in used], expanded


def _flags(words: Sequence[str], engine: str) -> Iterator[Line]:
    names, place = names_of(engine), 0
    while place < len(words):
        word = words[place]
        place += 1
        if base(engine) == "vllm":
            word = re.sub(r"^-O(?=\w)", "-O=", word)  # it takes `-O3` for `-O 3`
        if _is_value(word):
            lost = Line(_shown(word), engine, reason="no flag takes it")
            yield _named("model", word, _LINE, engine) if place == 1 else lost
            continue
        flag, joined, text = word.partition("=")
        negated = flag.startswith("--no-") and names.find(flag) is None
        spelling = f"--{flag.removeprefix('--no-')}" if negated else flag
        kind = names.names.get(names.find(spelling) or "", "").lower()
        values = [text] if joined else []
        for following in itertools.takewhile(_is_value, () if joined else words[place:]):
            if "bool" in kind and "str" not in kind:
                taken = not values and following.lower() in ("true", "false")
            else:
                taken = not values or "list[" in kind
            if not taken:
                break
            values.append(following)
            place += 1
        yield from _flag(flag, spelling, values, not negated, engine)


def _flag(flag: str, spelling: str, values: list[str], alone: bool, engine: str) -> Iterator[Line]:
    """The settings of a flag, or of the file that it names. A flag without values is a switch, of the value `alone`."""
    value: Any = parsed(values[0]) if len(values) == 1 else values or alone
    file = Path(str(value))
    if bare(flag) == "override_engine_args" and isinstance(value, dict):
        leaves = ((f"--trtllm.{path}", node) for path, node in _leaves(_compose(values[0], flag)))
        yield from (_named(name, _value(node), _LINE, engine) for name, node in leaves)
    elif bare(flag) not in _FILES:
        yield replace(_named(spelling, value, _LINE, engine), written=_shown(flag, value or None))
    elif file.suffix in _YAML and file.is_file():
        yield from _read_path(file, base(engine)).settings
    else:
        yield Line(_shown(flag, value), engine, reason="the file is not here: translate it too")


def _is_value(word: str) -> bool:
    return re.match(r"-(?!\.?\d)", word) is None


def _named(written: str, value: Any, origin: Origin, engine: str) -> Line:
    names, text = names_of(engine), _shown(written, value)
    if (name := names.find(written)) is not None:
        return Line(text, engine, value, origin, name)
    near = names.similar(written)
    advice = f"; did you mean {near}?" if near else ""
    reason = dropped(engine, written) or f"{names.title} {names.version} has no such name{advice}"
    return Line(text, engine, None, origin, reason=reason)
