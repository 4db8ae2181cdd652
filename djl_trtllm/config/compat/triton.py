"""A Triton model repository for TensorRT-LLM, or one `config.pbtxt` of it, as settings.

Values are texts in Triton; the options parse them. A `${placeholder}` that is not filled in is ignored, as in Triton,
unless Triton refuses it.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml
from google.protobuf import text_encoding

from djl_trtllm.config.compat.foreign_format import ForeignSetting, FormatError, Reading, presets, read_text
from djl_trtllm.config.compat.truss import compose
from djl_trtllm.config.options import find
from djl_trtllm.config.options.choices import TritonModel
from djl_trtllm.config.options.option import NotAValueError
from djl_trtllm.config.sources import Layer, Source
from djl_trtllm.files import read_table

ENGINE_MODEL = "tensorrt_llm"
MODELS = (ENGINE_MODEL, "tensorrt_llm_bls", "ensemble", "preprocessing", "postprocessing")
"""The models of a repository, in the order of precedence."""

_TABLE = read_table("triton.toml")
TO_FILL: Mapping[str, frozenset[str]] = {model: frozenset(names) for model, names in _TABLE["to_fill"].items()}
EXAMPLES: Mapping[str, str] = _TABLE["examples"]
STRUCTURE: frozenset[str] = frozenset(_TABLE["structure"])
TRITON_ONLY: frozenset[str] = frozenset(_TABLE["triton_only"])
OPTION_OF: Mapping[str, str] = {name: f"option.{name}" for name in _TABLE["same_name"]} | _TABLE["other_name"]
IGNORED: Mapping[str, str] = _TABLE["ignored"]


# The parser of protocol buffers' text format: `google.protobuf.text_format` reads messages of known types and does not
# keep the lines of values. Here every value has its line, any field may occur, and a `${placeholder}` that is not
# filled in is a value; to the library it is a syntax error that hides all others.


_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f\v]+|\#[^\n]*)
  | (?P<newline>\n)
  | (?P<text>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
  | (?P<word>\$\{[^{}\n]*\}|[+-]?[A-Za-z_0-9.][A-Za-z_0-9.+-]*)
  | (?P<mark>[{}<>\[\]:,;])
    """,
    re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_LAST_NAME = re.compile(r"([A-Za-z_][A-Za-z_0-9]{0,60})[ \t]*$")
_CLOSING = {"{": "}", "<": ">", "[": "]"}
_DEEPEST = 50


@dataclass(frozen=True)
class Field:
    """One field: its name, its value (text, or the fields of a message) and the line on which the value begins."""

    name: str
    value: "Value"
    line: int


Value: TypeAlias = "str | tuple[Field, ...]"


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def parse(text: str) -> tuple[Field, ...]:
    """The fields of a message; a list `[a, b]` becomes one field for each member. Raises `FormatError`."""
    return _Parser(text).message(None, 0)


def _tokens(text: str) -> Iterator[_Token]:
    """The tokens of a text, and at last one without text."""
    line, position = 1, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise FormatError(line, _unexpected(text, position))
        position = match.end()
        if match.lastgroup == "newline":
            line += 1
        elif match.lastgroup != "space":
            yield _Token(str(match.lastgroup), match.group(), line)
    yield _Token("end", "", line)


def _unexpected(text: str, position: int) -> str:
    character = text[position]
    if character in "\"'":
        return f"the {character} has no second one on this line; texts begin and end with a quote"
    if text.startswith("${", position):
        return "the ${ has no } on this line; write the value itself in its place"
    if character == "=":
        name = _LAST_NAME.search(text, 0, position)
        return f"there is = where a : belongs; write {name.group(1) if name else 'name'}: value"
    if character == "/":
        return "a path needs quotes, and a comment begins with #"
    return f"{character!r} has no meaning here; texts need quotes, and a comment begins with #"


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = deque(_tokens(text))

    def message(self, opening: _Token | None, depth: int) -> tuple[Field, ...]:
        """The fields up to the mark that closes `opening`, or up to the end of the text."""
        if opening is not None and depth > _DEEPEST:
            raise FormatError(opening.line, f"more than {_DEEPEST} nested messages")
        closing = "" if opening is None else _CLOSING[opening.text]
        fields: list[Field] = []
        while self._tokens[0].text != closing:
            if opening is not None and self._tokens[0].kind == "end":
                raise _not_closed(opening)
            if self._tokens[0].text in (",", ";") and fields:
                self._tokens.popleft()
            else:
                fields += self._field(depth)
        if opening is not None:
            self._tokens.popleft()
        return tuple(fields)

    def _field(self, depth: int) -> Iterator[Field]:
        name = self._tokens.popleft()
        if name.kind == "text":
            raise FormatError(name.line, f"{name.text} has quotes, and names have none; write {name.text[1:-1]}:")
        if not _NAME.fullmatch(name.text):
            raise FormatError(name.line, f"there is {name.text} where the name of a field belongs")
        if self._tokens[0].text == ":":
            self._tokens.popleft()
        elif self._tokens[0].text not in ("{", "<", "["):
            raise FormatError(name.line, f"{name.text} has no : behind it; write {name.text}: value")
        for value, line in self._values(name, depth):
            yield Field(name.text, value, line)

    def _values(self, name: _Token, depth: int) -> Iterator[tuple[Value, int]]:
        if self._tokens[0].text in ("", "}", ">", "]", ":", ",", ";"):
            raise FormatError(name.line, f"{name.text} has no value; write {name.text}: value")
        if self._tokens[0].text != "[":
            yield self._value(depth)
            return
        opening = self._tokens.popleft()
        while (token := self._tokens[0]).text != "]":
            if token.kind == "end":
                raise _not_closed(opening)
            yield self._value(depth)
            if self._tokens[0].text == ",":
                self._tokens.popleft()
            elif self._tokens[0].text not in ("]", ""):
                raise FormatError(self._tokens[0].line, f"there is no comma between the members of {name.text}")
        self._tokens.popleft()

    def _value(self, depth: int) -> tuple[Value, int]:
        token = self._tokens.popleft()
        if token.text in ("{", "<"):
            return self.message(token, depth + 1), token.line
        if token.kind == "mark":
            raise FormatError(token.line, f"there is {token.text} where a value belongs")
        if token.kind == "word":
            return token.text, token.line
        parts = [_unescaped(token)]
        while self._tokens[0].kind == "text":
            parts.append(_unescaped(self._tokens.popleft()))
        return "".join(parts), token.line


def _not_closed(opening: _Token) -> FormatError:
    return FormatError(opening.line, f"the {opening.text} is not closed; a {_CLOSING[opening.text]} is missing")


def _unescaped(token: _Token) -> str:
    try:
        return bytes(text_encoding.CUnescape(token.text[1:-1])).decode()
    except ValueError:
        raise FormatError(token.line, f"{token.text} has a \\ that begins no escape; write it twice") from None


CONFIG_FILE = "config.pbtxt"
LLM_API_FILE = "model.yaml"
LLM_API_OPTIONS = {"model": "option.model_id", "backend": "option.backend"}
"""The names in a `model.yaml` that are options here; all others but `triton_config` are arguments of TensorRT-LLM."""
_PRESETS = {
    "option.batch_scheduler_policy": "guaranteed_no_evict",
    "triton_http_port": "8000",
    "triton_grpc_port": "8001",
    "triton_metrics_port": "8002",
}
_SCHEDULER = "it configures Triton's own scheduler, which is not used here"
_READ_INSIDE = {
    "dynamic_batching": {
        name: name for name in ("preferred_batch_size", "max_queue_delay_microseconds", "max_queue_size")
    },
    "instance_group": {"count": "instance_group.count", "gpus": "instance_group.gpus"},
    "model_transaction_policy": {"decoupled": "decoupled"},
}
_ONE_VERSION = "one version of a model is served, the highest of them"
_STRUCTURE_INSIDE = ("name", "kind")
_TRITON = "Triton's TensorRT-LLM backend"
_OLD_VALUES = {
    ("batch_scheduler_policy", "guaranteed_completion"): "guaranteed_no_evict",
    **{
        (name, text): value
        for name in ("decoupled", "add_special_tokens", "skip_special_tokens")
        for text, value in (("t", "true"), ("y", "true"), ("f", "false"), ("n", "false"))
    },
}
_AS_HERE = (("instance_group.count", "1"),)
_ENGINE_FILES = ("*.engine", "openvino_model.xml")
# The versions of a model are numbered folders; wherever the repository was mounted, this is its own engine.
_OWN_ENGINE = re.compile(r"(?:.*/)?tensorrt_llm/(\d+)/?")
_VERSION = re.compile(r"0|[1-9]\d{0,17}")


def repository_files(directory: Path) -> tuple[Path, ...]:
    """The `config.pbtxt` files of the repository `directory` in the order of precedence; () if it is none.

    One model's own directory is a repository of that model.
    """
    files = tuple(path for model in MODELS if (path := directory / model / CONFIG_FILE).exists())
    own = directory / CONFIG_FILE
    return files or ((own,) if own.exists() else ())


def read_repository(files: tuple[Path, ...]) -> list[Source]:
    """One source for each file of a repository, and what Triton presets beside them."""
    sources = list(_without_repeats(source for path in files for source in _read_model(path)))
    if sources and all(path.parent.name != ENGINE_MODEL for path in files) and len(files) > 1:
        folder = files[0].parent.parent
        problem = f"{folder} has no {ENGINE_MODEL}/{CONFIG_FILE}: copy it beside {files[0].parent.name}/{CONFIG_FILE}"
        sources.append(Source(Layer.FOREIGN, problems=(problem,)))
    # A repository with nothing but the engine is the one that DJL Serving's compiler wrote.
    of_triton = len(files) > 1 or any(llm_api_file(path) for path in files)
    return [*sources, triton_presets()] if of_triton else sources


def _without_repeats(sources: Iterable[Source]) -> Iterator[Source]:
    """The sources without repeats: a setting that another model of the repository already has is left out."""
    seen: set[tuple[str, str]] = set()
    for source in sources:
        settings = tuple(setting for setting in source.settings if (setting.key, setting.value) not in seen)
        seen |= {(setting.key, setting.value) for setting in settings}
        yield replace(source, settings=settings)


def triton_presets() -> Source:
    """The defaults of Triton's backend that differ from this server's."""
    return presets("Triton", _PRESETS)


def read_config(path: Path) -> Source:
    text = read_text(path)
    if isinstance(text, Source):
        return text
    source = parse_config(text, str(path), own_engine=_own_engine(path))
    if source.problems or version_folder(path) is not None or not (folders := _version_folders(path)):
        return source
    there = ", ".join(sorted(folder.name for folder in folders))
    return replace(source, problems=(f"{path}: version_policy names no version that is there: name one of {there}",))


def _read_model(config: Path) -> Iterator[Source]:
    """The settings of a model of a repository: its `config.pbtxt`, and the LLM API's `model.yaml` if it has one."""
    yield read_config(config)
    if (path := llm_api_file(config)) is not None:
        text = read_text(path)
        yield text if isinstance(text, Source) else parse_llm_api(text, str(path))


def version_folder(config: Path) -> Path | None:
    """The folder beside a `config.pbtxt` with the version that Triton answers with; None where there is none.

    Of `1`, `2` and `10` it is `10`, the highest number; with `version_policy: { specific: { versions: [1, 2] }}` it is
    `2`.
    Source: `VersionsToLoad` and `GetModel` in `model_lifecycle.cc` of triton-inference-server/core (73aad7c).
    """
    text = read_text(config)
    try:
        fields = () if isinstance(text, Source) else parse(text)
    except FormatError:  # which `parse_config` reports
        fields = ()
    policy = (leaf for field in fields if field.name == "version_policy" for leaf in _leaves(field))
    named = {leaf.value for leaf in policy if leaf.name == "versions"}
    folders = [path for path in _version_folders(config) if not named or path.name in named]
    return max(folders, key=lambda path: int(path.name), default=None)


def _version_folders(config: Path) -> list[Path]:
    return [path for path in config.parent.glob("[0-9]*") if _VERSION.fullmatch(path.name) and path.is_dir()]


def _wants_several(policy: Field) -> bool:
    """Whether a `version_policy` serves more than one version, if they are there."""
    leaves = list(_leaves(policy))
    everything = not isinstance(policy.value, str) and any(part.name == "all" for part in policy.value)
    number = next((leaf.value for leaf in leaves if leaf.name == "num_versions"), "1")
    return everything or len(leaves) > 1 or number not in ("0", "1")


def llm_api_file(config: Path) -> Path | None:
    """The LLM API's `model.yaml` in the version's folder beside a `config.pbtxt`; None where there is none."""
    folder = version_folder(config)
    return folder / LLM_API_FILE if folder is not None and (folder / LLM_API_FILE).exists() else None


def parse_llm_api(text: str, path: str) -> Source:
    """The settings in the text of a `model.yaml`, which has arguments of TensorRT-LLM's `LLM` and `triton_config`.

    The model, its backend and `triton_config` are options here; all other arguments become
    `option.extra_llm_api_options`. Source: `triton_backend/all_models/llmapi` of TensorRT-LLM (0a71057).
    """
    try:
        arguments, lines = _arguments(text)
    except FormatError as error:
        return error.source(path)
    reading = Reading(path)

    def entry_of(name: str, value: Any, within: str = "") -> ForeignSetting:
        shown = value if isinstance(value, str) else "" if value is None else json.dumps(value)
        return ForeignSetting(name, shown, lines.get(within or name, 1))  # the name may come from an alias (<<)

    reading.set("option.triton_model", ForeignSetting(LLM_API_FILE, TritonModel.LLMAPI, 1))
    of_triton = arguments.pop("triton_config", None) or {}
    if not isinstance(of_triton, dict):
        reading.refuse(entry_of("triton_config", of_triton), "expected names and values: {decoupled: true}")
        of_triton = {}
    for name, value in of_triton.items():
        if (name, value) != ("max_batch_size", 0):  # its only value: requests have no batch dimension
            key, entry = OPTION_OF.get(name), entry_of(name, value, "triton_config")
            if key is None:
                reading.unknown_setting(entry, tuple(OPTION_OF), _TRITON)
            else:
                reading.set(key, entry)
    if not arguments.get("model"):
        reading.problems.append(f"{path}: model is missing: expected a directory or an id on the hub")
    for name, option in LLM_API_OPTIONS.items():
        if (value := arguments.pop(name, None)) is not None:
            reading.set(option, entry_of(name, value))
    if processors := arguments.pop("logits_post_processors", None):
        reading.refuse(
            entry_of("logits_post_processors", processors),
            "code of one's own does not run in the engine here; remove it, and use guides or bad words",
        )
    if arguments:
        first = next(iter(arguments))
        reading.set("option.extra_llm_api_options", ForeignSetting(first, json.dumps(arguments), lines.get(first, 1)))
    return reading.source()


def _arguments(text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The values of a YAML file by name, as JSON has them, and the lines of the names. Raises `FormatError`."""
    root = compose(text)
    try:
        arguments = json.loads(json.dumps(yaml.safe_load(text) or {}, default=str))
    except (yaml.YAMLError, ValueError, TypeError) as error:  # a tag that is not known, a name that is a date
        raise FormatError(1, f"this is not YAML of plain values: {' '.join(str(error).split())}") from None
    if not isinstance(arguments, dict):  # a tag makes something else of it
        raise FormatError(1, "expected `key: value` lines")
    return arguments, {key.value: key.start_mark.line + 1 for key, _ in root.value}


def _own_engine(config: Path) -> Path | None:
    """The version's folder beside a `config.pbtxt` if it holds an engine."""
    folder = version_folder(config)
    return folder if folder is not None and _holds_engine(folder) else None


def _holds_engine(path: Path) -> bool:
    try:
        return any(next(path.glob(name), None) for name in _ENGINE_FILES)
    except OSError:
        return False  # a name that no file system takes


def parse_config(text: str, path: str, *, own_engine: Path | None = None) -> Source:
    """The settings in the text of one `config.pbtxt`; `path` is shown, and its folder's name is the model's.

    `own_engine` is the folder beside it with an engine, if there is one.
    """
    reading = Reading(path)
    try:
        fields = parse(text)
    except FormatError as error:
        return error.source(path)
    _Model(reading, model_of(fields, path), own_engine).read(fields)
    return reading.source()


def model_of(fields: tuple[Field, ...], path: str) -> str:
    """The model of a repository that a file is for: by its folder, else by its name or platform."""
    folder = Path(path).parent.name
    texts = {field.name: field.value for field in fields if isinstance(field.value, str)}
    for candidate in (folder, texts.get("name", "")):
        if candidate in MODELS:
            return candidate
    return "ensemble" if texts.get("platform") == "ensemble" else ENGINE_MODEL


class _Model:
    """Reads the configuration of one model of a repository."""

    def __init__(self, reading: Reading, model: str, own_engine: Path | None) -> None:
        self._reading = reading
        self._own_engine = own_engine
        self._to_fill = TO_FILL[model]
        self._unfilled: list[ForeignSetting] = []

    def read(self, fields: tuple[Field, ...]) -> None:
        """Read all entries in order; of two equal names the last one is used."""
        entries: dict[str, ForeignSetting] = {}
        preferred: list[ForeignSetting] = []
        for entry in self._entries(fields):
            if entry.name == "preferred_batch_size":
                preferred.append(entry)
                continue
            if entry.name in entries and entry.name in _READ_INSIDE["instance_group"].values():
                entry = replace(entry, value=f"{entries[entry.name].value},{entry.value}")
            elif entry.name in entries:
                self._reading.warn(entry, f"it is set on line {entries[entry.name].line} too; the last one is used")
            entries[entry.name] = entry
        for entry in entries.values():
            self._take(entry)
        batch = entries["max_batch_size"].value if "max_batch_size" in entries else None
        for entry in preferred:
            # The template repeats max_batch_size here.
            if "${" not in entry.value and entry.value != batch:
                self._reading.ignore(entry, IGNORED[entry.name])
        if self._unfilled:
            names = ", ".join(f"{entry.name} (line {entry.line})" for entry in self._unfilled)
            self._reading.warnings.append(
                f"{self._reading.path}: not filled in, so that defaults apply, as in Triton: {names}"
            )

    def _entries(self, fields: tuple[Field, ...]) -> Iterator[ForeignSetting]:
        for field in fields:
            if field.name == "version_policy" and _wants_several(field):
                self._reading.ignore(ForeignSetting(field.name, "", field.line), _ONE_VERSION)
            if field.name in STRUCTURE:
                continue
            if field.name == "parameters":
                yield from self._parameter(field)
            elif field.name in _READ_INSIDE:
                for leaf in _leaves(field):
                    name = _READ_INSIDE[field.name].get(leaf.name)
                    if name is not None:
                        yield ForeignSetting(name, leaf.value, leaf.line)
                    elif leaf.name not in _STRUCTURE_INSIDE:
                        self._reading.ignore(leaf, _SCHEDULER)
            elif field.name in TRITON_ONLY:
                self._reading.ignore(ForeignSetting(field.name, "", field.line), _SCHEDULER)
            elif field.name == "max_batch_size" and isinstance(field.value, str):
                yield ForeignSetting(field.name, field.value, field.line)
            else:
                self._reading.unknown_setting(
                    ForeignSetting(field.name, "", field.line), (*TRITON_ONLY, *STRUCTURE, "max_batch_size"), _TRITON
                )

    def _parameter(self, field: Field) -> Iterator[ForeignSetting]:
        """`parameters { key: "k" value { string_value: "v" } }`; the line is that of the value."""
        inner = field.value if isinstance(field.value, tuple) else ()
        key = next((part.value for part in inner if part.name == "key" and isinstance(part.value, str)), None)
        if key is None:
            entry = ForeignSetting("parameters", "", field.line)
            self._reading.refuse(entry, 'expected { key: "NAME" value: { string_value: "VALUE" } }')
            return
        message = next((part for part in inner if part.name == "value"), None)
        parts = message.value if message is not None and isinstance(message.value, tuple) else ()
        for part in parts:
            if part.name == "string_value" and isinstance(part.value, str):
                yield ForeignSetting(key, part.value, part.line)
                return
        line = field.line if message is None else message.line
        given = message.value if message is not None and isinstance(message.value, str) else "..."
        self._reading.refuse(ForeignSetting(key, "", line), f'expected value: {{ string_value: "{given}" }}')

    def _take(self, entry: ForeignSetting) -> None:
        name, reading = entry.name, self._reading
        if "${" in entry.value:
            if name in self._to_fill:
                reading.refuse(entry, f"this is not filled in; write the value itself, for example {EXAMPLES[name]}")
            else:
                self._unfilled.append(entry)
        elif entry.value == "0" and name == "max_batch_size":
            reading.warn(entry, "0 means that requests are not batches; set option.max_rolling_batch_size")
        elif entry.value == "0" and name == "max_queue_size":
            reading.ignore(entry, "0 is a queue without a bound in Triton; here job_queue_size bounds it")
        elif name == "gpt_model_path":
            self._take_engine(entry)
        elif name in OPTION_OF:
            self._set(OPTION_OF[name], entry, _OLD_VALUES.get((name, entry.value.lower()), entry.value))
        elif name in IGNORED:
            if (name, entry.value) not in _AS_HERE:
                reading.ignore(entry, IGNORED[name])
        else:
            known = (*OPTION_OF, *IGNORED, *TRITON_ONLY, *STRUCTURE, "gpt_model_path")
            reading.unknown_setting(entry, known, _TRITON)

    def _set(self, key: str, entry: ForeignSetting, value: str) -> None:
        """Set a parameter. As in Triton, a word that it does not have is a warning, and the default."""
        declared = find(key)
        if (
            declared is not None
            and entry.name not in EXAMPLES
            and (declared.type.choices or declared.type.base is bool)
        ):
            try:
                declared.type.parse(value, declared.option)
            except NotAValueError as error:
                reason = f"Triton warns of this and uses its default, and so does this server: {error}"
                self._reading.ignore(entry, reason, act=True)
                return
        self._reading.set(key, entry, value)

    def _take_engine(self, entry: ForeignSetting) -> None:
        """Take the path of an engine as the model, unless the repository has an engine at its own place.

        Templates have a path of their author's machine, or any path: it does not replace an engine that is there. The
        engine of another version of the model does, as in Triton, where the path alone decides.
        """
        own = _OWN_ENGINE.fullmatch(entry.value)
        if own is not None and _holds_engine(beside := Path(self._reading.path).parent / own[1]):
            if beside != self._own_engine:
                self._reading.set("option.model_id", entry, str(beside))
            return
        if own is not None and self._own_engine is None:
            return
        if self._own_engine is None or _holds_engine(Path(entry.value)):
            self._reading.set("option.model_id", entry)
        else:
            self._reading.ignore(entry, f"there is no engine; the one in {self._own_engine} is served")


def _leaves(field: Field) -> Iterator[ForeignSetting]:
    """The scalar fields inside a message, at any depth."""
    if isinstance(field.value, str):
        yield ForeignSetting(field.name, field.value, field.line)
        return
    for inner in field.value:
        yield from _leaves(inner)
