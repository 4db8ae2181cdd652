"""Settings as users wrote them, each with its origin, grouped by kind of source."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import javaproperties

from djl_trtllm.config.masking import masked, shortened
from djl_trtllm.config.options.registry import find
from djl_trtllm.config.sources.origin import Origin, OriginKind

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
    SERVER_FILE = "config.properties of the server"
    PRESET = "what Triton or Truss presets, where its file is the source"

    @property
    def has_own_names(self) -> bool:
        """Whether users write options by name there, so that two names of one option contradict each other.

        Among the variables of the other layers, the first one is used.
        """
        return self in (Layer.ARGUMENTS, Layer.FILE, Layer.OPTION, Layer.SERVER_FILE)


@dataclass(frozen=True)
class Setting:
    """One key and its value, as text.

    `wrote` is the name the user wrote (a key or a variable) and `wrote_value` the value where it differs from
    `value`, for example megabytes that became bytes. With `alone` it sets nothing but its own option: LMI's
    `max_num_tokens` raises other limits, that of other servers does not.
    """

    key: str
    value: str
    origin: Origin
    wrote: str
    wrote_value: str | None = None
    alone: bool = False

    @property
    def shown(self) -> str:
        """`NAME=VALUE` as the user wrote it, with secrets masked and long values shortened."""
        text = masked(self.wrote, masked(self.key, self.value if self.wrote_value is None else self.wrote_value))
        return f"{self.wrote}={shortened(text, _LONGEST)}"

    @property
    def formatted(self) -> str:
        """`NAME=VALUE (origin)`, for messages."""
        return f"{self.shown} ({self.place})"

    @property
    def place(self) -> str:
        """The origin, without the name of a variable, which `shown` has already."""
        return "environment" if self.origin.kind is OriginKind.ENVIRONMENT else str(self.origin)


@dataclass(frozen=True)
class Source:
    """The settings of one layer in the order in which they were written, and the errors of reading them.

    `unknown` are names that the layer's format does not have: warnings, or problems with `option.strict`.
    `notes` need no action.
    """

    layer: Layer
    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_arguments(pairs: Iterable[str]) -> Source:
    """Options from a command line, each as KEY=VALUE; `option.` before a key may be left out."""
    settings: list[Setting] = []
    problems: list[str] = []
    for pair in pairs:
        wrote, separator, value = pair.partition("=")
        if not separator or not wrote.strip():
            problems.append(f"{masked('', pair)!r} (command line): expected KEY=VALUE, such as max_input_len=2048")
            continue
        wrote = wrote.strip()
        key = wrote if find(wrote) or wrote.startswith("option.") else f"option.{wrote}"
        settings.append(Setting(key, value, Origin.override("command line"), wrote))
    return Source(Layer.ARGUMENTS, tuple(settings), problems=tuple(problems))


def read_properties(path: Path, layer: Layer = Layer.FILE) -> Source:
    """Read a properties file; a file that is missing is an empty source, one that cannot be read is a problem."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Source(layer)
    except OSError as error:
        return Source(layer, problems=(f"{path} cannot be read: {error.strerror or error}",))
    # Java reads Latin-1. A file with other characters is nearly always UTF-8, and was garbled there.
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return parse_properties(text, str(path), layer)


def parse_properties(text: str, path: str, layer: Layer = Layer.FILE) -> Source:
    """Parse text in the syntax of java.util.Properties; of a key that occurs more than once the last value is used."""
    settings: dict[str, Setting] = {}
    warnings: list[str] = []
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
        problem = (
            f"{path}:{line}: {error.escape} is not a \\u escape: expected \\u and four hexadecimal digits; "
            "write a backslash as \\\\"
        )
        return Source(layer, tuple(settings.values()), tuple(warnings), (problem,))
    return Source(layer, tuple(settings.values()), tuple(warnings))


def _lines(source: str) -> int:
    """Line ends in `source`: one of CR LF, CR and LF each."""
    return source.count("\n") + source.count("\r") - source.count("\r\n")
