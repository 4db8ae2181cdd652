"""Arguments of an engine by its own names, in a YAML file or as JSON (`option.extra_llm_api_options`, for example).

The names and types come from the source of the installed version, which is read without importing it: a new argument of
the engine needs no release of this package. An argument that has an option becomes that option: plans, limits and
messages see one value.
"""

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from djl_trtllm.backends.effects import Effects, Passed, Target
from djl_trtllm.config import Config
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.options.option import NotAValueError
from djl_trtllm.config.sources import Origin, Setting
from djl_trtllm.errors import ConfigError

_MOST_BYTES = 1 << 20
_MOST_VALUES = 10_000
_DEEPEST = 20
OF_THE_SERVER: Mapping[str, str] = MappingProxyType(
    {
        "model": "set option.model_id",
        "tokenizer": "set option.tokenizer",
        "tokenizer_revision": "set option.tokenizer_revision",
        "revision": "set option.revision",
        "reasoning_parser": "set option.reasoning_parser: the server finds reasoning",
        "trust_remote_code": (
            "set option.trust_remote_code: a file that comes with a model cannot allow the model's code"
        ),
        "enable_lora": "set option.enable_lora",
    }
)
"""Arguments that the server sets itself on every engine that has them, with what to do instead."""
# Names of arguments that bring code into the engine process, or change what it runs.
_CODE = re.compile(
    r"^(custom_|env_overrides$|executor_cls$|model_factory$|drafter$|resource_manager$|checkpoint_loader$)"
    r"|(_hook|_cls|_class|_class_overrides|_module|_modules|_module_dirs|_module_path|_processors?|_plugins?|_extension)$"
    r"|^inductor_passes$"
)
# Names whose value may be that of a function or a class, such as `backend: mine.compiler`.
_MAY_NAME_CODE = re.compile(r"(^|_)backend$")


@dataclass(frozen=True)
class ExtraArgument:
    """`target` gets `value`; `place` says which line of which file has it."""

    target: Target
    value: Any
    place: str


Signatures = Mapping[str, Mapping[str, str]]
"""The arguments of classes with their annotations, by class; LLM is under the name of its row in the table."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """What an engine takes, and the option that passes it on.

    `option` is the field of `Options` that has the text, `engine` the engine's name and version for messages. The
    arguments are those of `owner`: `signatures` has them under `root`, and beside it those of the classes that
    annotations name. `ours` has arguments that the server sets, with what to do instead; `options` those that have an
    option. `placed` are classes of which options set some fields.
    """

    option: str
    engine: str
    owner: str
    root: str
    signatures: Signatures
    ours: Mapping[str, str]
    options: Mapping[Target, str]
    placed: frozenset[str] = frozenset()


def options_of(effects: Effects, derived: Mapping[Target, str]) -> dict[Target, str]:
    """The options that stand for arguments: an option is passed as it is, or code derives the argument from it."""
    passed = {name: effect.targets for name, effect in effects.items() if isinstance(effect, Passed)}
    return dict(derived) | {target: name for name, targets in passed.items() for target in targets}


def read_arguments(
    config: Config,
    library: Library,
    notes: list[str],
    *,
    objects: Iterable[str] = (),
    settings: Iterable[Setting] = (),
) -> tuple[Config, tuple[ExtraArgument, ...]]:
    """The configuration with those arguments that have options, and the other arguments; adds each to `notes`.

    They are in the text of the library's option, in `objects`, options that are the value of the one argument of their
    name, and in settings `option.NAME=VALUE`. Raises `ConfigError` with every problem found, also for an argument that
    is given twice.
    """
    found: dict[Target, ExtraArgument] = {}
    problems: list[str] = []
    for name in (library.option, *objects, None):
        reader = _Reader(config, library, name or library.option)
        try:
            if name is None:
                for setting in settings:
                    reader.read_setting(setting)
            elif (text := getattr(config.options, name)) is not None:
                reader.read(text)
        except _TooMuchError as error:
            reader.problems.append(str(error))
        problems += reader.problems
        if reader.problems:
            continue
        config = reader.config
        notes += [config.format_setting(option) for option in reader.became]
        for each in reader.found:
            given = each.place if name is None else f"{reader.key}, {each.place}"
            notes.append(f"{each.target}={each.value!r} ({given})")
            if each.target in found:
                where = given if name is None else config.format_setting(name)
                problems.append(f"{where}: {OPTIONS[library.option].key} has {each.target.name} too; keep one")
            found[each.target] = each
    if problems:
        raise ConfigError(problems)
    return config, tuple(found.values())


class _TooMuchError(Exception):
    """A text with more values than any engine needs."""


class _Reader:
    """Reads the text of an option, or settings. An option for one argument has the argument's value as text."""

    def __init__(self, config: Config, library: Library, option: str) -> None:
        self.config = config
        self.library = library
        self.option = option
        self.signatures = library.signatures
        self.key = OPTIONS[option].key
        self.example = OPTIONS[option].example
        self.problems: list[str] = []
        self.found: list[ExtraArgument] = []
        self.became: list[str] = []
        self.values = 0
        self.file: Path | None = None
        self.written: Setting | None = None

    def read(self, text: str) -> None:
        node = self._parsed(text)
        library, name = self.library, self.option
        if isinstance(node, yaml.MappingNode) and name != library.option:
            known = self.signatures[library.root].get(name, "Any")
            self._argument(name, node, node, Target(library.owner, name), known)
        elif isinstance(node, yaml.MappingNode):
            self._object(node, library.root, library.owner, "")
        elif node is not None and not self.problems:
            self._problem("", node, f"expected a mapping of arguments, such as {self.example}")

    def read_setting(self, setting: Setting) -> None:
        """Read a setting: `4` is a number, unless the argument takes texts and no numbers."""
        self.written = setting
        name, text = setting.name_in_engine, setting.value.strip()
        known = self.signatures[self.library.root][name]
        kinds = kinds_of(known, self.signatures)
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError):
            node = None
        is_scalar = not isinstance(node, (yaml.MappingNode, yaml.SequenceNode))
        if node is None or (is_scalar and kinds is not None and not _is_one_of(scalar_of(node), kinds)):
            node = yaml.ScalarNode("tag:yaml.org,2002:str", text)
        self._argument(name, node, node, Target(self.library.owner, name), known)

    # -- the text ------------------------------------------------------------------------------------------------------

    def _parsed(self, text: str) -> yaml.Node | None:
        if not text.lstrip().startswith("{"):
            text = self._content(text)
        try:
            return yaml.compose(text, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            where = "" if mark is None else f", line {mark.line + 1}"
            what = getattr(error, "problem", None) or "it is nested too deeply"
            self.problems.append(f"{self._setting()}{where}: expected YAML or JSON: {what}")
            return None

    def _content(self, text: str) -> str:
        beside = None if self.config.model_dir is None else self.config.model_dir / text
        self.file = beside if beside is not None and beside.exists() else Path(text)
        try:
            with self.file.open("rb") as file:
                content = file.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES} bytes")
            return content.decode()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self.problems.append(
                f"{self._setting()}: {self.file} cannot be read: {reason}; expected a YAML file, in the model "
                f"directory or with its whole path, or JSON such as {self.example}"
            )
            return ""

    # -- arguments -----------------------------------------------------------------------------------------------------

    def _object(self, node: yaml.MappingNode, signature: str, owner: str, prefix: str) -> None:
        """Arguments of LLM, or of a configuration object of which the server sets other fields too."""
        known = self.signatures[signature]
        seen = set()
        for key, value in node.value:
            name = str(key.value)
            path = f"{prefix}{name}"
            if path in seen:
                self._problem(path, key, "it is there twice; keep one")
            elif owner == self.library.owner and name in self.library.ours:
                self._problem(path, key, f"the server sets this argument: {self.library.ours[name]}")
            elif name not in known:
                self._problem(path, key, f"{self.library.engine} has no such argument{self._near(path)}")
            else:
                self._argument(path, key, value, Target(owner, name), known[name])
            seen.add(path)

    def _argument(self, path: str, key: yaml.Node, node: yaml.Node, target: Target, annotation: str) -> None:
        if not self._permitted(target.name, path, key, node):
            return
        inner = next((name for name in re.findall(r"\w+", annotation) if name in self.library.placed), None)
        if inner is not None and inner in self.signatures and isinstance(node, yaml.MappingNode):
            self._object(node, inner, inner, f"{path}.")
            return
        known = len(self.problems)
        value = self._value(path, node, annotation)
        if len(self.problems) > known:
            return
        option = self.library.options.get(target)
        if option is None:
            self.found.append(ExtraArgument(target, value, self._place(key)))
        else:
            self._set(option, value, path, node)

    def _permitted(self, name: str, path: str, key: yaml.Node, node: yaml.Node) -> bool:
        """Return whether `option.trust_remote_code` allows an argument that brings code into the engine process."""
        names_code = _MAY_NAME_CODE.search(name) and "." in node.value
        if self.config.options.trust_remote_code or not (_CODE.search(name) or names_code):
            return True
        self._problem(path, key, "it brings code into the engine: set option.trust_remote_code=true if you trust it")
        return False

    def _value(self, path: str, node: yaml.Node, annotation: str, depth: int = 0) -> Any:
        """Plain data, checked against the annotation, and against that of a class's fields."""
        self.values += 1
        if self.values > _MOST_VALUES or depth > _DEEPEST:
            raise _TooMuchError(
                f"{self._setting()}: more than {_MOST_VALUES} values, or nested more than {_DEEPEST} deep"
            )
        kinds = kinds_of(annotation, self.signatures)
        classes = [self.signatures[name] for name in re.findall(r"\w+", annotation) if name in self.signatures]
        if isinstance(node, yaml.MappingNode):
            value: Any = {}
            for key, item in node.value:
                name, inside = str(key.value), f"{path}.{key.value}"
                if classes and kinds is not None and not any(name in known for known in classes):
                    near = difflib.get_close_matches(name, sorted({each for known in classes for each in known}), 3)
                    advice = f"; did you mean {' or '.join(near)}?" if near else ""
                    self._problem(inside, key, f"{self.library.engine} has no such argument{advice}")
                self._permitted(name, inside, key, item)
                annotations = [known[name] for known in classes if name in known]
                value[name] = self._value(inside, item, annotations[0] if len(annotations) == 1 else "Any", depth + 1)
        elif isinstance(node, yaml.SequenceNode):
            value = [self._value(f"{path}[{at}]", item, "Any", depth + 1) for at, item in enumerate(node.value)]
        else:
            value = scalar_of(node)
        if problem := not_of(kinds, value):
            self._problem(path, node, problem)
        return value

    def _set(self, option: str, value: Any, path: str, node: yaml.Node) -> None:
        """Set the option that stands for an argument. It is a problem if something else has set it to another value."""
        declared = OPTIONS[option]
        try:
            checked = declared.type.check(value, declared.option)
        except NotAValueError as error:
            if self.written is not None and isinstance(value, str):  # one that only the engine has
                self.found.append(ExtraArgument(Target(self.library.owner, path), value, self._place(node)))
            else:
                self._problem(path, node, str(error))
            return
        if self.config.is_set(option) and getattr(self.config.options, option) != checked:
            self._problem(
                path,
                node,
                f"{_described(value)} here, and {self.config.format_setting(option)} is the same argument: keep one",
            )
            return
        self.became.append(option)
        origin = Origin.override(f"{self.key}, {self._place(node)}") if self.written is None else self.written.origin
        self.config = self.config.replace(origin, **{option: checked})

    # -- messages ------------------------------------------------------------------------------------------------------

    def _near(self, path: str) -> str:
        paths = sorted(_paths(self.signatures, self.library.root))
        names = {each: each.rsplit(".", 1)[-1] for each in paths}
        close = difflib.get_close_matches(path.rsplit(".", 1)[-1], sorted(set(names.values())), 3, 0.7)
        near = [each for name in close for each in paths if names[each] == name]
        return f"; did you mean {' or '.join(near[:3])}?" if near else ""

    def _problem(self, path: str, node: yaml.Node, text: str) -> None:
        if self.written is not None:
            self.problems.append(f"{self.written}: {f'{path}: ' if '.' in path else ''}{text}")
            return
        self.problems.append(f"{self._setting()}, {self._place(node)}: {path}{': ' if path else ''}{text}")

    def _setting(self) -> str:
        return f"{self.key} ({self.config.origin(self.option)})"

    def _place(self, node: yaml.Node) -> str:
        if self.written is not None:
            return str(self.written)
        line = f"line {node.start_mark.line + 1}"
        return line if self.file is None else f"{self.file} {line}"


def scalar_of(node: yaml.Node) -> str | float | bool | None:
    """A value as JSON has it; dates, huge numbers and what Python's tags would make are their text."""
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError):
        return str(node.value)
    is_number = isinstance(value, (int, float)) and -(2**63) < value < 2**63
    return value if is_number or value is None or isinstance(value, str) else str(node.value)


def _described(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "a mapping"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."


# -- what the installed version takes ----------------------------------------------------------------------------------

_SCALARS = {
    **dict.fromkeys(("int", "PositiveInt", "NonNegativeInt", "StrictInt"), "a whole number"),
    **dict.fromkeys(("float", "PositiveFloat", "NonNegativeFloat"), "a number"),
    "bool": "true or false",
    "str": "text",
    "None": "null",
    **dict.fromkeys(("List", "list", "Tuple", "tuple", "Set", "set", "Sequence"), "a list"),
    **dict.fromkeys(("Dict", "dict", "Mapping"), "a mapping"),
}


def kinds_of(annotation: str, signatures: Signatures) -> list[str] | None:
    """`Optional[int]`: a whole number or null. None where a part is not known, so that anything may be written."""
    try:
        found = list(_parts(ast.parse(annotation, mode="eval").body, signatures))
    except SyntaxError:
        return None
    return None if None in found else [kind for kind in dict.fromkeys(found) if kind is not None]


def not_of(kinds: list[str] | None, value: Any) -> str:
    """What is wrong with a value where `kinds_of` an annotation are expected; "" if nothing is."""
    if kinds is None or _is_one_of(value, kinds):
        return ""
    near = difflib.get_close_matches(repr(value), kinds, 1)
    advice = f"; did you mean {near[0]}?" if near else ""
    return f"expected {' or '.join(kinds)}, not {_described(value)}{advice}"


def choices(annotation: str) -> tuple[str, ...] | None:
    """The strings of `Optional[Literal['auto', 'float16']]`; None for a type that takes others too."""
    found = [kind for kind in kinds_of(annotation, {}) or [""] if kind not in ("null", "None")]
    return tuple(kind.strip("'") for kind in found) if all(kind.startswith("'") for kind in found) else None


def _parts(node: ast.expr, signatures: Signatures) -> Iterator[str | None]:
    if isinstance(node, ast.BinOp):
        yield from _parts(node.left, signatures)
        yield from _parts(node.right, signatures)
    elif isinstance(node, ast.Subscript):
        name = ast.unparse(node.value).rsplit(".", 1)[-1]
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Literal":
            for part in inside:  # a text or a number, or another such type
                yield from [ast.unparse(part)] if isinstance(part, ast.Constant) else _parts(part, signatures)
        elif name in ("Optional", "Union", "Annotated"):
            for part in inside[:1] if name == "Annotated" else inside:
                yield from _parts(part, signatures)
            yield from ["null"] if name == "Optional" else []
        else:
            yield _SCALARS.get(name)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _parts(ast.parse(node.value, mode="eval").body, signatures)
    else:
        name = ast.unparse(node).rsplit(".", 1)[-1]
        yield _SCALARS.get(name) or ("a mapping" if name in signatures else None)


def _is_one_of(value: Any, kinds: list[str]) -> bool:
    if repr(value) in kinds:  # a value of a `Literal`
        return True
    if isinstance(value, str):
        return "text" in kinds
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "true or false") in kinds
    if isinstance(value, (int, float)):
        return (isinstance(value, int) and "a whole number" in kinds) or "a number" in kinds
    return ("a list" if isinstance(value, list) else "a mapping") in kinds


def _paths(signatures: Signatures, llm: str) -> Iterator[str]:
    for name, annotation in signatures[llm].items():
        yield name
        for inner in re.findall(r"\w+", annotation):
            yield from (f"{name}.{field}" for field in signatures.get(inner, ()))
