"""Every option, declared once.

A field's annotation is its type and its `Option`; its value is the default. Messages, the resolved table,
`docs/options.md` and `serving.properties.example` are all made from these declarations.
"""

from __future__ import annotations

from djl_trtllm.config.options.djl import DjlOptions
from djl_trtllm.config.options.engine import EngineOptions
from djl_trtllm.config.options.limits import LimitOptions
from djl_trtllm.config.options.model import ModelOptions
from djl_trtllm.config.options.server import ServerOptions
from djl_trtllm.config.options.serving import ServingOptions


# Pydantic collects the fields of the last base first, so that documents list the groups in the opposite order.
class Options(DjlOptions, ServerOptions, ServingOptions, EngineOptions, LimitOptions, ModelOptions):
    """The values of all options, typed and frozen. Made by `resolve`; where values came from is in `Config`."""


GROUPS: tuple[tuple[str, type], ...] = (
    ("Model", ModelOptions),
    ("Lengths, batching and memory", LimitOptions),
    ("Engine", EngineOptions),
    ("Serving one model", ServingOptions),
    ("The server process", ServerOptions),
    ("DJL Serving's own keys", DjlOptions),
)
"""The groups of options and their titles, in the order in which documents show them."""

__all__ = ["GROUPS", "Options"]
