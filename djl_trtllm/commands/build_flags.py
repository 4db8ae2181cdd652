"""The command line of `djl-trtllm compile`, which takes the flags of trtllm-build that options have the meaning of.

trtllm-build writes `--gemm_plugin=float16`, `--gemm_plugin float16`, and `--strongly_typed` without a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from djl_trtllm.config.options.option import Scope
from djl_trtllm.config.options.registry import DeclaredOption, find, suggest
from djl_trtllm.errors import DjlTrtllmError

_CHECKPOINT, _OUT, _LOG_LEVEL = "checkpoint_dir", "output_dir", "log_level"
_TRUTHS = ("enable", "disable", "true", "false")


class CompileArguments(NamedTuple):
    """`settings` are KEY=VALUE pairs; `notes` name the flags without effect."""

    checkpoint: str | None
    out: str | None
    settings: tuple[str, ...]
    notes: tuple[str, ...]


def read_arguments(words: Sequence[str]) -> CompileArguments:
    """CHECKPOINT and OUT in their places or as flags, all other flags as options. Raises DjlTrtllmError."""
    places: list[str] = []
    named: dict[str, str] = {}
    settings, notes = [], []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            places.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        option = None if name in (_CHECKPOINT, _OUT, _LOG_LEVEL) else _option(word, name)
        if not equals:
            value = _next_value(rest, word, is_switch=option is not None and option.type.base is bool)
        if option is None:
            named[name] = value
            continue
        settings.append(f"{option.key}={value}")
        if option.option.legacy:
            notes.append(f"--{name}: {option.option.effect_everywhere}")
    if _LOG_LEVEL in named:
        notes.append(f"--{_LOG_LEVEL}: no effect: the compiler's whole log is written")
    checkpoint = named.get(_CHECKPOINT) or (places.pop(0) if places else None)
    out = named.get(_OUT) or (places.pop(0) if places else None)
    if places:
        raise DjlTrtllmError(f"{' '.join(places)}: expected one CHECKPOINT and one OUT, in their places or as flags")
    return CompileArguments(checkpoint, out, tuple(settings), tuple(notes))


def _option(word: str, name: str) -> DeclaredOption:
    option = find(f"option.{name}")
    if option is None or option.option.scope is Scope.OPERATOR:
        near = suggest(f"option.{name}")
        hint = "" if near is None else f", did you mean --{near.removeprefix('option.')}?"
        raise DjlTrtllmError(f"{word}: no option has this name{hint} (all options: docs/options.md)")
    return option


def _next_value(rest: list[str], word: str, *, is_switch: bool) -> str:
    """The value that follows a flag without `=`."""
    if is_switch:
        return rest.pop(0) if rest and rest[0].lower() in _TRUTHS else "true"
    if not rest or rest[0].startswith("--"):
        raise DjlTrtllmError(f"{word} needs a value: {word}=VALUE")
    return rest.pop(0)
