"""Checks of the speculation that the options ask for, before a backend loads anything."""

from collections.abc import Collection

from djl_trtllm.config import Config
from djl_trtllm.config.speculation import Method, Speculation, speculation_of
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import Layout
from djl_trtllm.model.tokenizer import vocabulary_difference
from djl_trtllm.progress import format_bytes

_HEADERS = 1.01
"""Room for the headers of another format of the same weights."""


def planned_speculation(
    config: Config,
    layout: Layout,
    engine: str,
    methods: Collection[Method],
    *,
    own_methods: bool = False,
    own_fields: bool = False,
) -> Speculation | None:
    """Return the speculation for an engine that has these methods; None where nobody asks for one.

    `own_methods`, `own_fields`: the engine checks methods and fields that are not known here. Raises ConfigError for a
    method that the engine lacks, and for a draft model that is larger than the model or has another vocabulary.
    """
    asked = speculation_of(config)
    if asked is None:
        return None
    known = asked.method in methods if isinstance(asked.method, Method) else own_methods
    if not known and not (asked.method is None and Method.DRAFT in methods):
        has = f"it has {', '.join(methods)}; set one of them, or leave it out" if methods else "leave it out"
        raise ConfigError(f"{asked.setting}: {engine} has no speculation with {asked.method or Method.DRAFT}: {has}")
    if asked.extra and not own_fields:
        raise ConfigError(f"{asked.setting}: {engine} has no {', '.join(asked.extra)}; leave it out")
    if layout.draft is not None:
        _check_draft(asked, layout, layout.draft)
    return asked


def _check_draft(asked: Speculation, layout: Layout, draft: Layout) -> None:
    sizes = [
        sum(path.stat().st_size for path in each.weight_files if path.suffix != ".xml") for each in (layout, draft)
    ]
    if all(sizes) and sizes[1] > _HEADERS * sizes[0]:
        raise ConfigError(
            f"{asked.setting}: the draft model {draft.path} has {format_bytes(sizes[1])} of weights, more than the "
            f"{format_bytes(sizes[0])} of {layout.path}: take a smaller one of the same family"
        )
    # With these methods another model proposes the tokens, which has to have the same vocabulary.
    if asked.method in (Method.DRAFT, None) and (difference := vocabulary_difference(layout, draft)):
        raise ConfigError(
            f"{asked.setting}: the draft model {draft.path} has another vocabulary than {layout.path}: "
            f"{difference}; take one of the same family"
        )
