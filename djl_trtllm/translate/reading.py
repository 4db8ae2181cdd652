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
from typing import Any

import yaml

from djl_trtllm.backends.extra_options import scalar_of
from djl_trtllm.config.compat import triton, truss
from djl_trtllm.config.compat.foreign_format import FormatError
from djl_trtllm.config.options import suggest
from djl_trtllm.config.sources import Origin, Setting, Source, masked, parse_properties, read_environment, shortened
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.files import MOST_SETTINGS_BYTES, read_file
from djl_trtllm.translate.names import (
    PATCH,
    STARTS,
    TITLES,
    WORKERS,
    EngineNames,
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
_LEVEL = re.compile(r"-O(?:=?(\w+))?")
"""vLLM takes `-O3` for `--optimization-level=3`."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_NUMBER = re.compile(r"-\.?\d.*")
_FILES = ("config", "extra_llm_api_options", "extra_engine_args")
"""Flags that name a YAML file of the engine's arguments."""
_SILENT = (";", "python", "python3", "-m", "-u", "exec", "-e", "--env", "export")
_IMAGE = re.compile(r"(^|/)vllm/vllm|vllm-openai")


@dataclass(frozen=True)
class Given:
    """One setting. `text` is what was written, as it may be shown; `name` is the name of it in `engine`.

    Without a name, `problem` says why it has no counterpart anywhere, or why it sets nothing on this server.
    """

    text: str
    engine: str
    value: Any = None
    origin: Origin = _LINE
    name: str | None = None
    problem: str = ""
    of_this_server: bool = False


@dataclass(frozen=True)
class Input:
    """What was read, of one engine. The settings of Triton and Truss have LMI's names, as those of LMI.

    `notes` are remarks of reading that are about no single setting.
    """

    engine: str
    settings: tuple[Given, ...]
    notes: tuple[str, ...] = ()


def read(words: Sequence[str], engine: str | None = None) -> Input:
    """What a file, or the words of a command line, set. Raises `DjlTrtllmError` for what no engine reads.

    `engine` is the one that a command line without a program, or a YAML file, is for.
    """
    if len(words) > 1:
        return read_command(shlex.join(words), engine)
    path = Path(words[0])
    is_file = not re.search(r"\s", words[0].strip()) and (path.suffix or path.exists())
    return _read_path(path, engine) if is_file else read_command(words[0], engine)


def _read_path(path: Path, engine: str | None) -> Input:
    if path.is_dir():
        raise DjlTrtllmError(
            f"{path} is a directory: name the file in it, such as {path / 'serving.properties'}, config.pbtxt or "
            "config.yaml"
        )
    try:
        text = read_file(path, MOST_SETTINGS_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise DjlTrtllmError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return read_text(text, str(path), engine)


def read_text(text: str, path: str, engine: str | None = None) -> Input:
    """What the text of a file sets; `path` is shown, and says by its end which kind it is."""
    if "\0" in text:
        raise DjlTrtllmError(f"{path}: it has NUL characters, which no engine reads: expected text")
    suffix = Path(path).suffix
    if suffix == ".properties":
        return _of_sources("lmi", [parse_properties(text, path)])
    if suffix == ".pbtxt":
        found = _of_sources("triton", [triton.parse_config(text, path)])
        if triton.model_of(triton.parse(text), path) == triton.ENGINE_MODEL:
            return found
        return replace(found, settings=tuple(map(_of_another_batch, found.settings)))
    if suffix not in _YAML:
        return read_command(text, engine)
    if engine in (None, "truss") and truss.is_truss(text):
        return _read_truss(text, path)
    return _read_yaml(text, path, engine)


def _of_another_batch(given: Given) -> Given:
    return replace(given, name=None, problem=_OTHER_BATCH) if "batch_size" in given.text else given


def _of_sources(engine: str, sources: Sequence[Source]) -> Input:
    """Settings that `config/` has read: they have LMI's keys, whatever the file is."""
    if problems := [problem for source in sources for problem in source.problems]:
        raise ConfigError(problems)
    settings: list[Given] = []
    notes: list[str] = []
    for source in sources:
        # Of Truss's two names of the model the one that clients use counts, as in `config/`.
        ordered = sorted(source.settings, key=lambda setting: engine == "truss" and setting.name != "model_name")
        settings += map(_of_setting, ordered)
        settings += [
            Given(each.assignment, "lmi", origin=each.origin, problem=each.reason, of_this_server=not each.unknown)
            for each in source.ignored
        ]
        reasons = {each.reason for each in source.ignored}
        notes += [text for text in (*source.warnings, *source.notes) if not any(reason in text for reason in reasons)]
    return Input(engine, tuple(settings), tuple(notes))


def _of_setting(setting: Setting) -> Given:
    row = row_of(setting.key, "lmi")
    given = Given(setting.assignment, "lmi", parsed(setting.value), setting.origin, setting.key)
    if setting.name == "gpt_model_path" or setting.name.endswith(".engine_repository"):
        return replace(given, name="compiled_engine")
    if not row.startswith("vllm.") or row.removeprefix("vllm.") in names_of("vllm").names:
        return given
    near = suggest(setting.key)
    advice = dropped("vllm", setting.name_in_engine) or (
        f"did you mean {near}?" if near else "docs/options.md lists them"
    )
    return replace(given, name=None, problem=f"LMI has no such option; {advice}")


def _read_truss(text: str, path: str) -> Input:
    """A Truss's own settings, and the settings of TensorRT-LLM's YAML file that it passes on."""
    found = _of_sources("truss", truss.parse_config(text, path)[:1])
    own = [each for each in found.settings if not each.text.startswith(PATCH)]
    leaves = _leaves(truss.compose(text))
    passed = [(name.removeprefix(PATCH), node) for name, node in leaves if name.startswith(PATCH)]
    given = (replace(each, text=PATCH + each.text) for each in _of_leaves(passed, path, "trtllm-serve"))
    return replace(found, settings=(*own, *given))


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


def _of_leaves(leaves: Iterable[tuple[str, yaml.Node]], path: str, engine: str) -> Iterator[Given]:
    for name, node in leaves:
        yield _named(name, _value(node), _place(path, node), engine)


def _of_objects(root: yaml.MappingNode, path: str) -> Iterator[Given]:
    """The settings of vLLM's file, where `speculative_config.method` is a field of an object."""
    found: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for key, node in root.value:
        *objects, name = key.value.split(".")
        origin = origins.setdefault((*objects, name)[0], _place(path, node))
        fields: Any = found
        for each in objects:
            fields = fields.setdefault(each, {}) if isinstance(fields, dict) else None
        if not isinstance(fields, dict) or name in fields:
            raise DjlTrtllmError(f"{_place(path, node)}: {key.value}: it has a value already ({origin}); keep one")
        fields[name] = _plain(node) if objects else _value(node)
    return (_named(name, value, origins[name], "vllm") for name, value in found.items())


def _place(path: str, node: yaml.Node) -> Origin:
    return Origin.file(path, node.start_mark.line + 1)


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
        raise DjlTrtllmError(f"{_shown(text, None)}: this is no command line: {error}") from None
    commands = [word for word in words if word != ";"]
    if not commands:
        raise DjlTrtllmError("there is nothing to translate: expected a command line of an engine, and found no word")
    if len(assigned := _assigned(words)) == len({*commands}):
        return _of_variables(dict(assigned.values()))
    engine, start, after = _program(words, engine)
    before, own = _expanded(words[:start], words[after:])
    end = next((place for place, word in enumerate(own) if _ENDS.fullmatch(word)), len(own))
    # A flag wins over the file of --config, wherever that stands.
    flags = sorted(_flags(own[:end], engine), key=lambda given: given.origin == _LINE)
    settings = [*_around(before), *flags]
    if rest := " ".join(own[end:]).strip("&; "):
        settings.append(Given(_shown(rest, None), engine, problem="it is the shell's"))
    return Input(engine, tuple(settings))


def _assigned(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The words that are `NAME=VALUE`, with name and value."""
    return {word: (match[1], match[2]) for word in words if (match := _ASSIGNMENT.fullmatch(word)) is not None}


def _around(words: Sequence[str]) -> Iterator[Given]:
    """What stands before the engine: variables each, the rest together."""
    variables = {word: pair for word, pair in _assigned(words).items() if pair[0].isupper()}
    yield from (Given(_shown(*pair), "", problem=_ENVIRONMENT) for pair in variables.values())
    if rest := " ".join(word for word in words if word not in (*variables, *_SILENT)):
        yield Given(_shown(rest, None), "", problem=_AROUND)


def _of_variables(environ: Mapping[str, str]) -> Input:
    """The variables of LMI's container; those that it does not know are reported."""
    found = _of_sources("lmi", read_environment(environ))
    known = {given.origin.where for given in found.settings}
    lost = (Given(_shown(n, v), "lmi", problem=_ENVIRONMENT) for n, v in environ.items() if n not in known)
    return replace(found, settings=(*found.settings, *lost))


def _shown(written: str, value: Any) -> str:
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
    shown, programs = _shown(" ".join(words), None), ", ".join(" ".join(start) for start in STARTS)
    if engine is not None and words[0].startswith("-"):
        flags = [word.partition("=")[0] for word in words if not _is_value(word)]
        return _engine_of(flags, shown, WORKERS) if engine == "dynamo" else engine, 0, 0
    advice = f"or its flags alone with --from, which is one of {', '.join(TITLES)}"
    raise DjlTrtllmError(f"{shown}: expected a file, or a command line with one of {programs}, {advice}")


def _expanded(before: Sequence[str], own: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the program and those after it, with variables of the shell that are set before put in.

    A secret is not put in, because no name says of it what it is.
    """
    pairs = _assigned(before)
    found = {name: (word, value) for word, (name, value) in pairs.items() if value and masked(name, value) == value}
    used: set[str] = set()

    def value(match: re.Match[str]) -> str:
        word, text = found.get(match[1] or match[2], ("", match[0]))
        used.add(word)
        return text

    expanded = [_VARIABLE.sub(value, word) for word in own]
    return [word for word in before if word not in used], expanded


def _flags(words: Sequence[str], engine: str) -> Iterator[Given]:
    names, place = names_of(engine), 0
    while place < len(words):
        word = words[place]
        place += 1
        if base(engine) == "vllm" and (level := _LEVEL.fullmatch(word)):
            word = "--optimization-level" + (f"={level[1]}" if level[1] else "")
        if _is_value(word):
            lost = Given(_shown(word, None), engine, problem="no flag takes it")
            yield _named("model", word, _LINE, engine) if place == 1 else lost
            continue
        flag, joined, text = word.partition("=")
        negated = flag.startswith("--no-") and names.find(flag) is None
        spelling = f"--{flag.removeprefix('--no-')}" if negated else flag
        values = [text] if joined else []
        for following in itertools.takewhile(_is_value, () if joined else words[place:]):
            if not _takes(names.find(spelling), names, values, following):
                break
            values.append(following)
            place += 1
        value: Any = parsed(values[0]) if len(values) == 1 else values or not negated
        file = Path(str(value))
        if bare(flag) == "override_engine_args" and isinstance(value, dict):
            for path, node in _leaves(_compose(values[0], flag)):
                yield _named(f"--trtllm.{path}", _value(node), _LINE, engine)
        elif bare(flag) not in _FILES:
            yield replace(_named(spelling, value, _LINE, engine), text=_shown(flag, value or None))
        elif file.suffix in _YAML and file.is_file():
            yield from _read_path(file, base(engine)).settings
        else:
            yield Given(_shown(flag, value), engine, problem="the file is not here: translate it too")


def _is_value(word: str) -> bool:
    return not word.startswith("-") or _NUMBER.fullmatch(word) is not None


def _takes(name: str | None, names: EngineNames, values: Sequence[str], word: str) -> bool:
    """Whether a flag takes a further word as value."""
    kind = names.names.get(name or "", "")
    if "bool" in kind and "str" not in kind:
        return not values and word.lower() in ("true", "false")
    return not values or "list[" in kind.lower()


def _named(written: str, value: Any, origin: Origin, engine: str) -> Given:
    names, text = names_of(engine), _shown(written, value)
    if (name := names.find(written)) is not None:
        return Given(text, engine, value, origin, name)
    near = names.similar(written)
    advice = f"; did you mean {near}?" if near else ""
    problem = dropped(engine, written) or f"{names.title} {names.version} has no such name{advice}"
    return Given(text, engine, None, origin, problem=problem)
