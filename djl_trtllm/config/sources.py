"""Settings as users wrote them, each with its origin, and the configuration that they make.

The places to read are property files, the environment and arguments. The rules for the environment are DJL Serving's:
its model server's for `OPTION_*`, `SERVING_*` and `SAGEMAKER_*`, its container's start script for the variables it
translates.
"""

from __future__ import annotations

import codecs
import enum
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import javaproperties

from djl_trtllm.config.options import OPTIONS, Options, find, suggest
from djl_trtllm.config.options.option import NotAValueError, as_text
from djl_trtllm.errors import ConfigError
from djl_trtllm.files import MOST_SETTINGS_BYTES, read_file, read_table

# -- secrets, and what is too long, are kept out of tables, logs and messages ------------------------------------------

MASK = "********"

# Not `max_tokens_per_step`: those tokens are units of text.
_TOKEN = "(?<!per[_-])(?<!adapter[_-])token"  # noqa: S105  # a pattern
_SECRET_KEY = re.compile(
    rf"(^|[._-])({_TOKEN}|secret|password|passwd|pass|credentials?|authorization|(api|access|private|secret)[._-]?key)$",
    re.IGNORECASE,
)
_PAIR = re.compile(
    rf"(?<![\w.-])([\w.-]*(?:{_TOKEN}|secret|passw(?:or)?d|credentials?|signature|(?:api|access|private|secret)[_-]?key))"
    r"(\s*=\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&]+)",
    re.IGNORECASE,
)
_VALUE_OF_PAIR = re.compile(r"=[^,]*")
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s]+(?=@)")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")


def shortened(text: str, longest: int) -> str:
    """`text` on one line, with escapes for what cannot be printed, and at most `longest` characters of it."""
    text = text[: longest + 1]  # it may be a megabyte
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= longest else text[: longest - 3] + "..."


def is_secret_key(key: str) -> bool:
    """Return whether a key's name says that its value is a secret (`HF_TOKEN` is, `max_num_tokens` is not)."""
    return _SECRET_KEY.search(key) is not None


def masked(key: str, value: str) -> str:
    """`value` as it may be shown.

    This masks secrets by the key's name, `NAME=VALUE` pairs inside the value whose name says so, credentials in URLs,
    hub tokens, and every value of `option.env`, because a variable's name does not show what it holds.
    """
    if is_secret_key(key):
        return MASK
    if key.lower() in ("option.env", "option_env"):
        return _VALUE_OF_PAIR.sub(f"={MASK}", value) if "=" in value else MASK
    value = _PAIR.sub(rf"\1\2{MASK}", value)
    return _HUB_TOKEN.sub(MASK, _URL_PASSWORD.sub(MASK, value))


# -- where values come from --------------------------------------------------------------------------------------------

_PRESETS = "the presets of "


class OriginKind(str, enum.Enum):
    """The kinds of places that values come from; OVERRIDE is a program or a command line."""

    FILE = "file"
    ENVIRONMENT = "environment"
    DEFAULT = "default"
    DERIVED = "derived"
    OVERRIDE = "override"


@dataclass(frozen=True)
class Origin:
    """The place that one value came from; `str(origin)` is what messages and tables show.

    `where` is a path (FILE), a variable's name (ENVIRONMENT), the text of a rule (DERIVED) or the caller's text
    (OVERRIDE). `line` begins at 1 and is None outside files.
    """

    kind: OriginKind
    where: str = ""
    line: int | None = None

    @classmethod
    def file(cls, path: str, line: int) -> Origin:
        return cls(OriginKind.FILE, path, line)

    @classmethod
    def environment(cls, variable: str) -> Origin:
        return cls(OriginKind.ENVIRONMENT, variable)

    @classmethod
    def default(cls) -> Origin:
        return cls(OriginKind.DEFAULT)

    @classmethod
    def derived(cls, rule: str) -> Origin:
        """An origin of a value that is computed from others; `rule` says from which and how."""
        return cls(OriginKind.DERIVED, rule)

    @classmethod
    def preset(cls, server: str) -> Origin:
        """An origin of a default of another server, for its own files."""
        return cls.derived(f"{_PRESETS}{server}")

    @classmethod
    def override(cls, by: str) -> Origin:
        """An origin of a value that a caller gives, for example `Origin.override("command line --port")`."""
        return cls(OriginKind.OVERRIDE, by)

    @property
    def is_user(self) -> bool:
        """Return whether a person set the value, as opposed to a default or a rule."""
        return self.kind in (OriginKind.FILE, OriginKind.ENVIRONMENT, OriginKind.OVERRIDE)

    @property
    def is_preset(self) -> bool:
        return self.kind is OriginKind.DERIVED and self.where.startswith(_PRESETS)

    def __str__(self) -> str:
        if self.kind is OriginKind.FILE:
            return f"{self.where}:{self.line}"
        if self.kind is OriginKind.ENVIRONMENT:
            return f"environment variable {self.where}"
        if self.kind is OriginKind.DERIVED:
            return f"derived from {self.where}"
        if self.kind is OriginKind.OVERRIDE:
            return self.where
        return "default"


_LONGEST = 80


class Layer(enum.Enum):
    """The kinds of sources. `resolve.precedence` has their order."""

    ARGUMENTS = "the command line"
    SAGEMAKER = "SageMaker variables (SAGEMAKER_*)"
    NAMED_MODEL = "HF_MODEL_ID and HF_REVISION"
    FILE = "serving.properties of the model directory"
    OPTION = "OPTION_* variables"
    SERVING = "SERVING_* variables"
    PLAIN = "plain variables (TENSOR_PARALLEL_DEGREE, PREDICT_TIMEOUT, ...)"
    FOREIGN = "config.pbtxt (Triton) or config.yaml (Truss) of the model directory"
    TRANSLATED = "variables of other servers (SM_NUM_GPUS, MAX_BATCH_SIZE, ...)"
    PRESET = "what Triton or Truss presets, where its file is the source"

    @property
    def has_own_names(self) -> bool:
        """Return whether users write options by name there, so that two names of one option contradict each other.

        Among the variables of the other layers, the first one is used.
        """
        return self in (Layer.ARGUMENTS, Layer.FILE, Layer.OPTION)


@dataclass(frozen=True)
class Setting:
    """One key and its value, as text.

    `name` is what the user wrote (a key or a variable) and `given` the value where it differs from `value`, for example
    megabytes that became bytes. With `alone` it sets only its own option: LMI's `max_num_tokens` raises other limits,
    another server's does not.
    """

    key: str
    value: str
    origin: Origin
    name: str
    given: str | None = None
    alone: bool = False

    @property
    def assignment(self) -> str:
        """`NAME=VALUE` as the user wrote it, with secrets masked and long values shortened."""
        text = masked(self.name, masked(self.key, self.value if self.given is None else self.given))
        return f"{self.name}={shortened(text, _LONGEST)}"

    def __str__(self) -> str:
        """`NAME=VALUE (origin)`, for messages."""
        return f"{self.assignment} ({self.place})"

    @property
    def name_in_engine(self) -> str:
        """The key without `option.`: where it is no option, the engine may have an argument of this name."""
        return self.key.removeprefix("option.")

    @property
    def place(self) -> str:
        """The origin, without the name of a variable, which `name` has already."""
        return "environment" if self.origin.kind is OriginKind.ENVIRONMENT else str(self.origin)


@dataclass(frozen=True)
class Ignored:
    """One entry of another server's file that sets nothing here: as it may be shown, its place, and the reason.

    With `unknown` it sets nothing on that server either.
    """

    assignment: str
    origin: Origin
    reason: str
    unknown: bool = False


@dataclass(frozen=True)
class Source:
    """The settings of one layer in the order in which they were written, and the errors of reading them.

    `unknown` are names that the layer's format does not have: warnings, or problems with `option.strict`.
    `notes` need no action. `ignored` are entries that set nothing, which are in `warnings`, `unknown` and `notes` too.
    """

    layer: Layer
    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ignored: tuple[Ignored, ...] = ()


@dataclass(frozen=True)
class Config:
    """Typed options with their origins. Made by `resolve` or `load`.

    `warnings` are lines for the log; `notes` need no action. `model_dir` is the model's directory, if there is one.
    `overridden` has the settings that others override, by field name. `engine_settings` name no option, and are for the
    engine, where it has such arguments.
    """

    options: Options
    origins: Mapping[str, Origin] = field(default_factory=dict)
    user_set: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()
    model_dir: Path | None = None
    overridden: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    engine_settings: tuple[Setting, ...] = ()

    def origin(self, field_name: str) -> Origin:
        """Return where the value of a field came from. Raises KeyError for a name that `Options` does not have."""
        return self.origins.get(OPTIONS[field_name].name, Origin.default())

    def is_set(self, field_name: str) -> bool:
        """Return whether the user set the field, even if a rule then changed its value.

        Raises KeyError for a name that `Options` does not have.
        """
        return OPTIONS[field_name].name in self.user_set

    def format_setting(self, field_name: str) -> str:
        """`KEY=VALUE (origin)` of the option of this field, with secrets masked."""
        return format_value(field_name, getattr(self.options, field_name), self.origin(field_name))

    @property
    def engine_cache_dir(self) -> Path:
        """Folder of the engine cache: as set, or `~/.cache/djl-trtllm`. It may not exist yet."""
        if self.options.engine_cache_dir is not None:
            return _expanded(self.options.engine_cache_dir)
        return _expanded(Path("~/.cache/djl-trtllm"))

    def replace(self, origin: Origin, **values: Any) -> Config:
        """This configuration with other values for some fields, all with the given origin.

        No rule between options runs again: replacing `max_num_tokens` raises no other limit. Raises `ConfigError` for
        values of the wrong type or out of range and for names that are no fields.
        """
        problems: list[str] = []
        checked: dict[str, Any] = {}
        for name, value in values.items():
            declared = OPTIONS.get(name)
            if declared is None:
                problems.append(f"{name}={value} ({origin}): there is no such option")
                continue
            try:
                checked[name] = declared.type.check(value, declared.option)
            except NotAValueError as error:
                problems.append(f"{declared.key}={as_text(value)} ({origin}): {error}")
        if problems:
            raise ConfigError(problems)
        return replace(
            self,
            options=self.options.updated(checked),
            origins={**self.origins, **dict.fromkeys(values, origin)},
            user_set=self.user_set | set(values) if origin.is_user else self.user_set,
        )


def format_value(field_name: str, value: Any, origin: Origin) -> str:
    """`KEY=VALUE (origin)` of any value of this field, with secrets masked."""
    key = OPTIONS[field_name].key
    return f"{key}={masked(key, as_text(value)) or 'none'} ({masked('', str(origin))})"


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        # Containers run as arbitrary users, who have no home directory.
        return Path(tempfile.gettempdir()) / "djl-trtllm"


# -- reading -----------------------------------------------------------------------------------------------------------


def read_arguments(pairs: Iterable[str]) -> Source:
    """Options from a command line, each as KEY=VALUE; `option.` before a key may be left out."""
    settings: list[Setting] = []
    problems: list[str] = []
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name.strip():
            problems.append(f"{masked('', pair)!r} (command line): expected KEY=VALUE, such as max_input_len=2048")
            continue
        name = name.strip()
        key = name if find(name) or name.startswith("option.") else f"option.{name}"
        settings.append(Setting(key, value, Origin.override("command line"), name))
    return Source(Layer.ARGUMENTS, tuple(settings), problems=tuple(problems))


_MOST_CONTINUED = 200


def read_properties(path: Path) -> Source:
    """Read a properties file; a file that is missing is an empty source, one that cannot be read is a problem."""
    try:
        data = read_file(path, MOST_SETTINGS_BYTES)
    except FileNotFoundError:
        return Source(Layer.FILE)
    except OSError as error:
        return Source(Layer.FILE, problems=(f"{path} cannot be read: {error.strerror or error}",))
    # A NUL elsewhere is refused by the option whose value has it, and harmless in a comment.
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:2]:
        problem = f"{path} begins as text in UTF-16 does: no option of it can be read; save it as UTF-8"
        return Source(Layer.FILE, problems=(problem,))
    # Java reads Latin-1. A file with other characters is nearly always UTF-8, and was garbled there.
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return parse_properties(text, str(path))


def parse_properties(text: str, path: str) -> Source:
    """Parse text in the syntax of java.util.Properties; of a key that occurs more than once the last value is used."""
    # The parser reads a logical line again for each line that continues it.
    if sum(line.endswith("\\") for line in text.splitlines()) > _MOST_CONTINUED:
        return Source(
            Layer.FILE, problems=(f"{path}: more than {_MOST_CONTINUED} lines end in a backslash; join them",)
        )
    settings: dict[str, Setting] = {}
    warnings, problems = list[str](), list[str]()
    line = 1
    try:
        for element in javaproperties.parse(text):
            if isinstance(element, javaproperties.KeyValue):
                setting = Setting(element.key, element.value, Origin.file(path, line), element.key)
                earlier = settings.pop(element.key, None)
                if earlier is not None:
                    warnings.append(
                        f"{earlier.origin} and line {line}: {element.key} is set twice; the last one is used"
                    )
                settings[element.key] = setting
            line += _lines(element.source)
    except javaproperties.InvalidUEscapeError as error:
        problems.append(
            f"{path}:{line}: {error.escape} is not a \\u escape: expected \\u and four hexadecimal digits; "
            "write a backslash as \\\\"
        )
    return Source(Layer.FILE, tuple(settings.values()), tuple(warnings), tuple(problems))


def _lines(source: str) -> int:
    """Line ends in `source`: one of CR LF, CR and LF each."""
    return source.count("\n") + source.count("\r") - source.count("\r\n")


def _anything(name: str) -> str | None:
    return None


def as_arguments(options: Mapping[str, Any], problem: Callable[[str], str | None] = _anything) -> list[str]:
    """KEY=VALUE pairs for `load`, of options by name, with or without `option.`; None means not given.

    `problem` says what else is wrong with a name. Raises ConfigError for names that are no options.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if problems := [text for name in given if (text := problem(name) or _unknown(name)) is not None]:
        raise ConfigError(problems)
    return [f"{name}={as_text(value)}" for name, value in given.items()]


def _unknown(name: str) -> str | None:
    if find(name) or find(f"option.{name}"):
        return None
    near = suggest(f"option.{name}") or suggest(name)
    advice = f"did you mean {near.removeprefix('option.')}?" if near else "docs/options.md has the options there are"
    return f"{name} is not an option; {advice}"


OPTION_PREFIX = "OPTION_"
SERVING_PREFIX = "SERVING_"
ARGUMENT_PREFIX = "ARGS_"
_PLAIN_UPPER = re.compile(r"[A-Z_0-9]+")
_MEBIBYTE = 1024 * 1024

OPTION_SPECIALS: Mapping[str, str] = {"entrypoint": "option.entryPoint", "engine": "engine"}
"""`OPTION_ENTRYPOINT` and `OPTION_ENGINE`, lower-cased, and the keys they mean."""

SERVING_SPECIALS: Mapping[str, str] = {"min_workers": "minWorkers", "max_workers": "maxWorkers"}
"""`SERVING_*` variables whose key is not their name in lower case."""

PROTECTING = ("api_key", "api_keys_file", "certificate_file", "private_key_file", "client_ca_file")
"""Options that must not be empty: `SERVING_API_KEY=$KEY` without a KEY would leave the server open."""

_TABLE = read_table("variables.toml")


def _pairs(name: str) -> tuple[tuple[str, str], ...]:
    return tuple((variable, key) for variable, key in _TABLE[name])


SAGEMAKER, NAMED_MODEL, PLAIN, TRANSLATED = map(_pairs, ("sagemaker", "named_model", "plain", "translated"))
IGNORED_VARIABLES: Mapping[str, str] = _TABLE["ignored"]


def read_environment(environ: Mapping[str, str]) -> tuple[Source, ...]:
    """One source per kind of variable. Empty variables, except those that protect, and other variables are ignored."""
    problems = tuple(
        f"{name} is empty, and the server would be open without it: give it a value, or remove it from the environment"
        for name, value in sorted(environ.items())
        if not value.strip() and name.startswith(SERVING_PREFIX) and serving_key(name) in PROTECTING
    )
    present = {name: value for name, value in environ.items() if value.strip()}
    # Without HF_MODEL_ID, HF_REVISION is a revision of a model that is named elsewhere.
    named = tuple(_named(present, NAMED_MODEL)) if "HF_MODEL_ID" in present else ()
    revision = () if named else tuple(_named(present, NAMED_MODEL[1:]))
    notes = tuple(f"{name} has no effect: {why}" for name, why in IGNORED_VARIABLES.items() if name in present)
    return (
        _sagemaker(present),
        Source(Layer.NAMED_MODEL, named),
        Source(Layer.OPTION, tuple(_options(present))),
        Source(Layer.SERVING, tuple(_serving(present)), problems=problems),
        Source(Layer.PLAIN, (*revision, *_named(present, PLAIN)), notes=notes),
        _translated(present),
    )


def option_key(variable: str) -> str:
    """The key that an `OPTION_*` variable sets: in lower case unless the name has lower-case letters already."""
    rest = variable[len(OPTION_PREFIX) :]
    name = rest.lower() if _PLAIN_UPPER.fullmatch(rest) else rest
    return OPTION_SPECIALS.get(name, f"option.{name}")


def serving_key(variable: str) -> str:
    name = variable[len(SERVING_PREFIX) :].lower()
    return SERVING_SPECIALS.get(name, name)


def variables_of(key: str) -> tuple[str, ...]:
    """The variables that set `key`, the one to prefer first."""
    names = []
    special = {target: name for name, target in (*OPTION_SPECIALS.items(), *SERVING_SPECIALS.items())}
    if key.startswith("option.") or key in OPTION_SPECIALS.values():
        names.append(OPTION_PREFIX + special.get(key, key.removeprefix("option.")).upper())
    else:
        names.append(SERVING_PREFIX + special.get(key, key).upper())
    names += [name for name, target in (*SAGEMAKER, *NAMED_MODEL, *PLAIN, *TRANSLATED) if target == key]
    return tuple(dict.fromkeys(names))


def _setting(name: str, key: str, value: str, given: str | None = None) -> Setting:
    return Setting(key, value, Origin.environment(name), name, given)


def _named(environ: Mapping[str, str], table: tuple[tuple[str, str], ...]) -> Iterator[Setting]:
    return (_setting(name, key, environ[name]) for name, key in table if name in environ)


def _options(environ: Mapping[str, str]) -> Iterator[Setting]:
    for name, value in sorted(environ.items()):
        if name.startswith(OPTION_PREFIX):
            yield _setting(name, option_key(name), value)
        elif name.startswith(ARGUMENT_PREFIX):
            key = name[len(ARGUMENT_PREFIX) :].lower()
            if find(key := SERVING_SPECIALS.get(key, key)) is not None:
                yield _setting(name, key, value)


def _serving(environ: Mapping[str, str]) -> Iterator[Setting]:
    for name, value in sorted(environ.items()):
        if name.startswith(SERVING_PREFIX):
            yield _setting(name, serving_key(name), value)


def _sagemaker(environ: Mapping[str, str]) -> Source:
    settings: list[Setting] = []
    problems: list[str] = []
    for setting in _named(environ, SAGEMAKER):
        if setting.name != "SAGEMAKER_MAX_PAYLOAD_IN_MB":
            settings.append(setting)
        elif re.fullmatch(r"\s*[1-9][0-9]{0,8}\s*", setting.value):
            size = str(int(setting.value) * _MEBIBYTE)
            settings.append(_setting(setting.name, setting.key, size, given=setting.value))
        else:
            problems.append(f"{setting.assignment}: expected a whole number (megabytes), at least 1")
    return Source(Layer.SAGEMAKER, tuple(settings), problems=tuple(problems))


def _translated(environ: Mapping[str, str]) -> Source:
    settings: list[Setting] = []
    warnings: list[str] = []
    features = environ.get("SERVING_FEATURES", "trtllm").lower()
    for setting in _named(environ, TRANSLATED):
        if setting.name == "SM_NUM_GPUS" and setting.value.strip() == "0":
            warnings.append("SM_NUM_GPUS=0 means that there is no GPU, and does not set option.tensor_parallel_degree")
        elif setting.name == "CUDA_MEMORY_FRACTION" and "trtllm" not in features:
            warnings.append(
                f"{setting.assignment} has no effect: with SERVING_FEATURES={features} it configures another library; "
                "set OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION"
            )
        elif setting.name == "ENABLE_CUDA_GRAPHS":
            eager = "false" if setting.value.strip().lower() == "true" else "true"
            settings.append(_setting(setting.name, setting.key, eager, given=setting.value))
        else:
            settings.append(setting)
    return Source(Layer.TRANSLATED, tuple(settings), tuple(warnings))
