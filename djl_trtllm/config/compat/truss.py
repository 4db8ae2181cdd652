"""A Truss `config.yaml` as settings.

Truss's own defaults (64 sequences, 0.1 of the memory, 10000 tokens of cache, ...) come with its file and only with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from djl_trtllm.config.compat.foreign_format import ForeignSetting, FormatError, Reading, presets
from djl_trtllm.config.compat.truss_names import (
    BUILD_PRESETS,
    ENGINE_PRESETS,
    ENGINE_SECTIONS,
    IGNORED,
    MARKS,
    OPTION_OF,
    QUANTIZATION,
    STACK_PRESETS,
    TO_ACT_ON,
)
from djl_trtllm.config.compat.yaml_tree import entries
from djl_trtllm.config.sources.properties import Layer, Source

CONFIG_FILE = "config.yaml"

_ACCELERATOR = re.compile(r"[A-Za-z0-9_-]+(:(?P<count>[1-9][0-9]?))?")
_MARK = re.compile(rf"^({'|'.join(MARKS)})\s*:", re.MULTILINE)
_TOKEN = "secrets.hf_access_token"  # noqa: S105  # a name
_OTHER_SECRET = f"nothing reads this secret: only {_TOKEN} is used, for downloads from the Hugging Face hub; remove it"
_PARALLEL = ("option.tensor_parallel_degree", "option.pipeline_parallel_degree")
_FETCHED = ("HF", "S3")


def is_truss(text: str) -> bool:
    """Whether the text of a `config.yaml` is one of Truss; other programs have files of this name too."""
    return _MARK.search(text) is not None


def read_config(path: Path, *, has_repository: bool = False) -> list[Source]:
    """Read a `config.yaml`, with Truss's defaults.

    With `has_repository` its Triton model repository is read as well, and there are no defaults.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        return [Source(Layer.FOREIGN, problems=(f"{path} cannot be read: {error.strerror or error}",))]
    except UnicodeDecodeError:
        return [Source(Layer.FOREIGN, problems=(f"{path} is not UTF-8 text; save it as UTF-8",))]
    return parse_config(text, str(path), has_repository=has_repository)


def parse_config(text: str, path: str, *, has_repository: bool = False) -> list[Source]:
    """The same from text; `path` is shown."""
    try:
        found = entries(text)
    except FormatError as error:
        return [Source(Layer.FOREIGN, problems=(f"{path}:{error.line}: {error}",))]
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
    _longest(reading, found)
    _compare_gpus(reading, found)
    preset = _presets(found, has_repository)
    return [reading.source(), *([presets("Truss", preset)] if preset else [])]


def _take(reading: Reading, entry: ForeignSetting) -> None:
    name, value = entry.name, entry.value
    if name.partition(".")[0] == "secrets":
        # null says that the secret is in Truss's store.
        if value and name == _TOKEN:
            reading.set("option.hf_access_token", entry)
        elif value:
            reading.ignore(ForeignSetting(name, "", entry.line), _OTHER_SECRET, act=True)
    elif name == "trt_llm.inference_stack":
        _stack(reading, entry)
    elif name == "trt_llm.build.quantization_type":
        _quantization(reading, entry)
    elif name == "trt_llm.build.checkpoint_repository.source":
        _source(reading, entry)
    elif name == "model_metadata.tags":
        if value == "openai-compatible":
            reading.ignore(entry, "a request with messages gets the model's chat template in any case")
    elif name in OPTION_OF:
        reading.set(OPTION_OF[name], entry)
    elif (reason := _reason(name)) is not None:
        reading.ignore(_summary(entry), reason, act=reason in TO_ACT_ON)
    elif value or not any(known.startswith(f"{name}.") for known in OPTION_OF):
        reading.unknown_setting(entry, (*OPTION_OF, *IGNORED), "Truss")


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
    for key, value in found.items():
        reading.set(key, entry, value)


def _source(reading: Reading, entry: ForeignSetting) -> None:
    if entry.value not in _FETCHED:
        reading.warn(
            entry, "nothing is fetched from there; download the checkpoint and set option.model_id to its directory"
        )


def _longest(reading: Reading, found: Iterable[ForeignSetting]) -> None:
    """Truss bounds prompt and output together, so each may have the whole length."""
    given = {setting.key for setting in reading.settings}
    for entry in found:
        if entry.name in ("trt_llm.build.max_seq_len", "trt_llm.runtime.max_seq_len"):
            for key in ("option.max_input_len", "option.max_output_len"):
                if key not in given:
                    reading.set(key, entry)


def _compare_gpus(reading: Reading, found: Iterable[ForeignSetting]) -> None:
    """Truss wants as many GPUs as the engine has ranks, and refuses other numbers."""
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
