"""Plug-ins of other installed packages: entry points such as `echo = "package.module:Name"` in the group of a kind."""

from functools import cache
from importlib.metadata import entry_points

BACKENDS = "djl_trtllm.backends"
"""The group of backends: classes derived from `backends.base.EngineBackend`, named as values of `option.backend`."""

API_DIALECTS = "djl_trtllm.dialects"
"""The group of APIs: objects of classes derived from `api.base.Dialect`."""


@cache
def plugins(group: str) -> dict[str, str]:
    """Return the objects of a group by name, in alphabetical order, as `module:name`."""
    return {point.name: point.value for point in sorted(entry_points(group=group), key=lambda point: point.name)}
