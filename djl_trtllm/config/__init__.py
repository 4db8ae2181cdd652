"""Options: what users wrote becomes one typed `Config` in which every value knows where it came from.

`load` reads the sources of a model directory and an environment; `resolve` decides, by the precedence table in
`resolve.precedence`, and raises one `ConfigError` with every problem.
"""

from djl_trtllm.config.compat.detect import names_configuration, read_source
from djl_trtllm.config.options import Options
from djl_trtllm.config.options.choices import (
    Backend,
    DType,
    KvCacheDType,
    Quantization,
    Task,
)
from djl_trtllm.config.resolve import load, resolve
from djl_trtllm.config.sources import (
    Config,
    Layer,
    Origin,
    OriginKind,
    Setting,
    Source,
    parse_properties,
    read_arguments,
    read_environment,
    read_properties,
)

__all__ = [
    "Backend",
    "Config",
    "DType",
    "KvCacheDType",
    "Layer",
    "Options",
    "Origin",
    "OriginKind",
    "Quantization",
    "Setting",
    "Source",
    "Task",
    "load",
    "names_configuration",
    "parse_properties",
    "read_arguments",
    "read_environment",
    "read_properties",
    "read_source",
    "resolve",
]
