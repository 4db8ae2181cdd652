"""Remove what no image runs from packages that were just installed: cut.py LOCKED, the file that names them.

It belongs into the instruction that installs them: a file of a lower layer stays in the image.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

PATTERNS = (
    # For developers.
    "*/tests/*",
    "*/include/*",
    "openvino/cmake/*",
    # Drivers of other devices: the engine runs on the CPU.
    "openvino/libs/libopenvino_intel_gpu_plugin.so",
    "openvino/libs/libopenvino_intel_npu_plugin.so",
    "openvino/libs/cache.json",
    # Bytecode of models in torch. Their tokenizers and configurations keep theirs, because a server imports those.
    "transformers/models/*/__pycache__/mod*.pyc",
)


def cut(package: str) -> int:
    """How many bytes went."""
    size = 0
    for file in importlib.metadata.files(package) or []:
        path = Path(str(file.locate()))
        if any(fnmatch(str(file), pattern) for pattern in PATTERNS) and path.is_file():
            size += path.stat().st_size
            path.unlink()
    return size


def main() -> None:
    sizes = {}
    # A package may have a line for each Python.
    for package in set(re.findall(r"^([a-z0-9][a-z0-9-]*)", Path(sys.argv[1]).read_text(), re.MULTILINE)):
        try:
            sizes[package] = cut(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another Python or machine
    for package, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size:
            print(f"cut {size / 1e6:.1f} MB of {package}")


if __name__ == "__main__":
    main()
