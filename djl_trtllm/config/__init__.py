"""Options: the settings of users become one typed `Config`, in which every value has its origin.

`load` reads the sources of a model directory and an environment; `resolve` decides, by the precedence table in
`resolve.precedence`, and raises one `ConfigError` with every problem.
"""

from djl_trtllm.config.compat.detect import names_configuration
from djl_trtllm.config.options import Options
from djl_trtllm.config.options.choices import Backend, DType, KvCacheDType, Quantization, Task
from djl_trtllm.config.resolve import load
from djl_trtllm.config.sources import Config, Origin

__all__ = [
    "Backend",
    "Config",
    "DType",
    "KvCacheDType",
    "Options",
    "Origin",
    "Quantization",
    "Task",
    "load",
    "names_configuration",
]
