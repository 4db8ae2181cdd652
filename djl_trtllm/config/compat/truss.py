"""A Truss `config.yaml` as settings.

Truss's own defaults (64 sequences, 0.1 of the memory, 10000 tokens of cache, ...) come with its file and only with it.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from djl_trtllm.config.compat.foreign_format import ForeignSetting, FormatError, Reading, presets, read_text
from djl_trtllm.config.sources import Source
from djl_trtllm.files import read_table

TRUSS_REPOSITORY = Path("packages", "inflight_batcher_llm")
"""The folder in which a Truss of the first generation holds its Triton model repository."""


_TABLE = read_table("truss.toml")
ENGINE_SECTIONS: tuple[str, ...] = tuple(_TABLE["engine_sections"])
MARKS: tuple[str, ...] = tuple(_TABLE["marks"])
OPTION_OF: Mapping[str, str] = {
    **{f"{section}.{name}": option for section in ENGINE_SECTIONS for name, option in _TABLE["engine"].items()},
    **{f"trt_llm.build.{name}": option for name, option in _TABLE["build"].items()},
    **{f"trt_llm.runtime.{name}": option for name, option in _TABLE["runtime"].items()},
    "model_name": "option.model_name",
}
NOT_SERVED: Mapping[str, str] = _TABLE["not_served"]
ROUTES: tuple[str, ...] = tuple(_TABLE["routes"])
QUANTIZATION: Mapping[str, Mapping[str, str]] = _TABLE["quantization"]
IGNORED: Mapping[str, str] = {name: row["reason"] for row in _TABLE["ignored"] for name in row["names"]}
TO_ACT_ON: frozenset[str] = frozenset(row["reason"] for row in _TABLE["ignored"] if row.get("act", False))
ENGINE_PRESETS: Mapping[str, str] = _TABLE["presets"]["engine"]
BUILD_PRESETS: Mapping[str, str] = _TABLE["presets"]["build"]
STACK_PRESETS: Mapping[str, str] = _TABLE["presets"]["stack"]


_DEEPEST = 50
_MOST_VALUES = 20_000
_MOST_CHARACTERS = 1 << 22
"""The most characters of all values of a file, each counted with the names around it."""


def entries(text: str) -> list[ForeignSetting]:
    """Every value with the path of its keys as name (`trt_llm.build.max_seq_len`).

    A list is one entry for each member, under the list's own name; null and empty collections have the value "".
    Raises `FormatError`.
    """
    root = compose(text)
    return list(_walk(root, "", 0)) if root.value else []


def compose(text: str) -> yaml.MappingNode:
    """The tree of a file, with bounds on its values and its depth, and without repeated keys. Raises `FormatError`."""
    if text.count(",") + text.count("\n") > _MOST_VALUES:  # reading them takes seconds
        raise FormatError(1, f"more than {_MOST_VALUES} values")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise FormatError(line, f"this is not YAML: {error.problem or error.context}{_hint(text, line)}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = "its values are nested too deep" if isinstance(error, RecursionError) else str(error)
        raise FormatError(1, f"this is not YAML: {' '.join(reason.split())}") from None
    if root is None:
        return yaml.MappingNode("tag:yaml.org,2002:map", [])
    if not isinstance(root, yaml.MappingNode):
        raise FormatError(root.start_mark.line + 1, "expected `key: value` lines")
    characters = 0
    for count, entry in enumerate(_walk(root, "", 0)):
        characters += len(entry.name) + len(entry.value)
        # Aliases multiply values; a few lines can have billions of them.
        if count >= _MOST_VALUES:
            raise FormatError(1, f"more than {_MOST_VALUES} values")
        if characters > _MOST_CHARACTERS:
            raise FormatError(1, f"more than {_MOST_CHARACTERS} characters in its values and their names")
    return root


def _walk(node: yaml.Node, name: str, depth: int) -> Iterator[ForeignSetting]:
    line = node.start_mark.line + 1
    if depth > _DEEPEST:
        raise FormatError(line, f"more than {_DEEPEST} nested levels")
    if isinstance(node, yaml.MappingNode) and node.value:
        lines: dict[str, int] = {}
        for key, value in node.value:
            key_line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise FormatError(key_line, "a key must be a scalar")
            if key.value in lines:
                raise FormatError(key_line, f"{key.value} is here and on line {lines[key.value]}; keep one")
            lines[key.value] = key_line
            yield from _walk(value, f"{name}.{key.value}" if name else key.value, depth + 1)
    elif isinstance(node, yaml.SequenceNode) and node.value:
        for member in node.value:
            yield from _walk(member, name, depth + 1)
    elif isinstance(node, yaml.ScalarNode):
        null = node.tag == "tag:yaml.org,2002:null"
        yield ForeignSetting(name, "" if null else node.value, line)
    else:
        yield ForeignSetting(name, "", line)


def _hint(text: str, line: int) -> str:
    """Return the advice for the most frequent mistake on a line that YAML cannot read."""
    lines = text.splitlines()
    content = lines[line - 1] if line <= len(lines) else ""
    if "\t" in content[: len(content) - len(content.lstrip())]:
        return "; indent with spaces, not with tabs"
    if content.lstrip().startswith(("%", "@", "`")):
        return "; put quotes around the value"
    return "; check the indentation and the colons of this line and the one before"


CONFIG_FILE = "config.yaml"

_ACCELERATOR = re.compile(r"[A-Za-z0-9_-]+(:(?P<count>[1-9][0-9]?))?")
_MARK = re.compile(rf"^({'|'.join(MARKS)})\s*:", re.MULTILINE)
_TOKEN = "secrets.hf_access_token"  # noqa: S105  # a name
_OTHER_SECRET = f"nothing reads this secret: only {_TOKEN} is used, for downloads from the Hugging Face hub; remove it"
_PLACEHOLDER = "this is a placeholder and no token, so none is used; set HF_TOKEN in the server's environment"
_METADATA = "model_metadata"
_MISTYPED = 0.85
"""The likeness from which on a key counts as a misspelt other key: `tensor_paralelism`, but not `engine_repo`."""
_PARALLEL = ("option.tensor_parallel_degree", "option.pipeline_parallel_degree")
_FETCHED = ("HF", "S3")


def is_truss(text: str) -> bool:
    """Return whether the text of a `config.yaml` is one of Truss; other programs have files of this name too."""
    return _MARK.search(text) is not None


def read_config(path: Path, *, has_repository: bool = False) -> list[Source]:
    """Read a `config.yaml`, with Truss's defaults.

    With `has_repository` its Triton model repository is read as well, and there are no defaults.
    """
    text = read_text(path)
    return [text] if isinstance(text, Source) else parse_config(text, str(path), has_repository=has_repository)


def parse_config(text: str, path: str, *, has_repository: bool = False) -> list[Source]:
    """Read the text of a `config.yaml`; messages show `path`."""
    try:
        found = entries(text)
    except FormatError as error:
        return [error.source(path)]
    reading = Reading(path)
    if not is_truss(text):
        reading.problems.append(
            f"{path} is no config.yaml of Truss: expected one of the keys {', '.join(MARKS[:3])} at the beginning of "
            "a line"
        )
        return [reading.source()]
    # The name that clients use overrides the name of the Truss.
    for entry in sorted(found, key=lambda entry: entry.name == "model_name"):
        _take(reading, entry)
    _refuse_draft_and_target(reading, found)
    _longest(reading, found)
    _compare_gpus(reading, found)
    preset = _presets(found, has_repository)
    return [reading.source(), *([presets("Truss", preset)] if preset else [])]


def _take(reading: Reading, entry: ForeignSetting) -> None:
    name, value = entry.name, entry.value
    if name.partition(".")[0] == "secrets":
        _secret(reading, entry)
    elif name in _READERS:
        _READERS[name](reading, entry)
    elif name in OPTION_OF:
        reading.set(OPTION_OF[name], entry)
    elif _is_nearly_read(name):
        reading.unknown_setting(entry, (*OPTION_OF, *_READERS), "Truss")
    elif (reason := _reason(name)) is not None:
        reading.ignore(_summary(entry), reason, act=reason in TO_ACT_ON)
    elif value or not any(known.startswith(f"{name}.") for known in OPTION_OF):
        reading.unknown_setting(entry, (*OPTION_OF, *IGNORED), "Truss")


def _secret(reading: Reading, entry: ForeignSetting) -> None:
    """Set the token of the hub. The value null stands for a secret in Truss's store; a placeholder has blanks."""
    if not entry.value:
        return
    if entry.name != _TOKEN:
        reading.ignore(replace(entry, value=""), _OTHER_SECRET, act=True)
    elif entry.value == "None" or re.search(r"\s", entry.value):
        reading.ignore(replace(entry, value=""), _PLACEHOLDER, act=True)
    else:
        reading.set("option.hf_access_token", entry)


def _base_model(reading: Reading, entry: ForeignSetting) -> None:
    problem = NOT_SERVED.get(entry.value.partition("_")[0])
    if problem is None:
        reading.ignore(entry, IGNORED[entry.name])
    else:
        reading.refuse(entry, f"{problem}; serve a decoder")


def _route(reading: Reading, entry: ForeignSetting) -> None:
    if entry.value in ("", *ROUTES):
        reading.ignore(entry, IGNORED[entry.name])
    else:
        reading.refuse(entry, f"this route is not served; expected one of {', '.join(ROUTES)}")


def _tag(reading: Reading, entry: ForeignSetting) -> None:
    if entry.value == "openai-compatible":
        reading.ignore(entry, "a request with messages gets the model's chat template in any case")


def _is_nearly_read(name: str) -> bool:
    """Whether a key of `model_metadata`, where people write what they like, is probably a key that sets something."""
    section, _, key = name.partition(".")
    if section != _METADATA or not key:
        return False
    read = {known.partition(".")[2] for known in (*OPTION_OF, *_READERS) if known.startswith(f"{_METADATA}.")}
    return bool(difflib.get_close_matches(key, read, 1, _MISTYPED))


def _reason(name: str) -> str | None:
    """The reason for `name`, or for the nearest section around it that has one."""
    while name:
        if name in IGNORED:
            return IGNORED[name]
        name = name.rpartition(".")[0]
    return None


def _summary(entry: ForeignSetting) -> ForeignSetting:
    """The entry without a value that is long or may be a secret: packages, examples, variables."""
    first, _, rest = entry.name.partition(".")
    if first in ("trt_llm", "runtime", "resources"):
        return entry
    if rest and first in ("environment_variables", "model_metadata"):
        first = f"{first}.{rest.partition('.')[0]}"
    return ForeignSetting(first, "", entry.line)


def _stack(reading: Reading, entry: ForeignSetting) -> None:
    if entry.value == "v2":
        reading.set("option.backend", entry, "pytorch")
    elif entry.value not in ("v1", ""):
        reading.refuse(entry, "expected v1 or v2")


def _quantization(reading: Reading, entry: ForeignSetting) -> None:
    found = QUANTIZATION.get(entry.value.lower())
    if found is None:
        reading.refuse(entry, f"expected one of {', '.join(QUANTIZATION)}")
        return
    if entry.value.lower() == "fp4_mlp_only":
        reading.warn(entry, "a checkpoint is quantised here as a whole: attention becomes NVFP4, too")
    for key, value in found.items():
        reading.set(key, entry, value)


def _source(reading: Reading, entry: ForeignSetting) -> None:
    if entry.value not in _FETCHED:
        reading.warn(
            entry, "nothing is fetched from there; download the checkpoint and set option.model_id to its directory"
        )


_READERS: Mapping[str, Callable[[Reading, ForeignSetting], None]] = {
    "trt_llm.inference_stack": _stack,
    "trt_llm.build.quantization_type": _quantization,
    "trt_llm.build.base_model": _base_model,
    "trt_llm.build.checkpoint_repository.source": _source,
    "trt_llm.runtime.webserver_default_route": _route,
    "model_metadata.tags": _tag,
}


def _refuse_draft_and_target(reading: Reading, found: Iterable[ForeignSetting]) -> None:
    """Refuse a file of 2024 with the two models of a speculation beside each other: Truss now requires `build`."""
    entry = next((entry for entry in found if entry.name.startswith(("trt_llm.draft.", "trt_llm.target."))), None)
    if entry is not None:
        reading.refuse(
            entry,
            "Truss refuses trt_llm.draft and trt_llm.target since 2025; move trt_llm.target.build to trt_llm.build, "
            "and num_draft_tokens and checkpoint_repository of the draft to trt_llm.build.speculator",
        )


def _longest(reading: Reading, found: Iterable[ForeignSetting]) -> None:
    """Set the longest prompt and output: Truss bounds both together, so each may have the whole length."""
    given = {setting.key for setting in reading.settings}
    for entry in found:
        if entry.name in ("trt_llm.build.max_seq_len", "trt_llm.runtime.max_seq_len"):
            for key in ("option.max_input_len", "option.max_output_len"):
                if key not in given:
                    reading.set(key, entry)


def _compare_gpus(reading: Reading, found: Iterable[ForeignSetting]) -> None:
    """Warn of a number of GPUs that is not the number of ranks, which Truss refuses."""
    accelerator = next((entry for entry in found if entry.name == "resources.accelerator"), None)
    match = _ACCELERATOR.fullmatch(accelerator.value) if accelerator is not None else None
    if accelerator is None or match is None:
        return
    ranks = 1
    for key in _PARALLEL:
        text = next((setting.value for setting in reading.settings if setting.key == key), "1")
        ranks *= int(text) if re.fullmatch(r"[0-9]{1,4}", text) else 0
    count = int(match["count"] or 1)
    if ranks and ranks != count:
        reading.warn(accelerator, f"it names {count} GPUs, and tensor and pipeline parallelism need {ranks}")


def _presets(found: Iterable[ForeignSetting], has_repository: bool) -> dict[str, str]:
    names = {entry.name for entry in found}
    if any(name.startswith(("trt_llm.build.", "trt_llm.runtime.", "trt_llm.inference_stack")) for name in names):
        second = any(entry.name == "trt_llm.inference_stack" and entry.value == "v2" for entry in found)
        return dict(STACK_PRESETS if second else BUILD_PRESETS)
    if has_repository:
        return {}
    engine = any(f"{section}.engine_repository" in names for section in ENGINE_SECTIONS)
    return dict(ENGINE_PRESETS) if engine or "model_metadata.tensor_parallelism" in names else {}
