"""The installed TensorRT-LLM, found without importing it: an import takes seconds and starts MPI."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import replace
from pathlib import Path

from djl_trtllm.engines.hardware import Hardware

_TENSORRT_PACKAGES = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")
_VERSION_LINE = re.compile(r"""^__version__\s*=\s*["']([^"']+)["']""", re.MULTILINE)


def with_installation(hardware: Hardware) -> Hardware:
    """The machine with what is installed on it now."""
    package = _package()
    return replace(
        hardware,
        tensorrt_llm=None if package is None else _version(package),
        tensorrt=_installed(_TENSORRT_PACKAGES),
        engine_backend=None if package is None else any(package.glob("_tensorrt_engine*")),
    )


def _package() -> Path | None:
    spec = importlib.util.find_spec("tensorrt_llm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _version(package: Path) -> str:
    installed = _installed(("tensorrt-llm",))
    if installed is not None:
        return installed
    try:
        line = _VERSION_LINE.search((package / "version.py").read_text(encoding="utf-8"))
    except OSError:
        line = None
    return "of unknown version" if line is None else line[1]


def _installed(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
