"""What is in an image: what should not be, and the largest files."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

UNWANTED = {
    "*/tests/*": "tests",
    "*/.git/*": "a repository",
    "*/.cache/*": "a cache",
    "*/.m2/*": "a cache",
    "*.whl": "a package's archive",
    "/source*": "sources of the build",
    "/build/*": "sources of the build",
    "/installed/*": "a copy of the package",
    "/tmp/*": "a temporary file",  # noqa: S108 (not opened)
    "/root/.*": "a file of the builder's",
    "/var/lib/apt/lists/*": "apt's lists",
    "*/bin/gcc*": "a compiler",
    "*/bin/cc": "a compiler",
    "*/bin/javac": "a compiler",
    "*/bin/mvn": "a compiler",
    "*/cc1*": "a compiler",
}
"""Pattern of a path -> what it is. Nothing of it runs when a model is served."""


def unwanted(added: Iterable[str]) -> dict[str, str]:
    """The unwanted files among those that an image adds to its base, with what they are."""
    found = {}
    for path in added:
        kinds = [kind for pattern, kind in UNWANTED.items() if fnmatchcase(path, pattern)]
        if kinds:
            found[path] = kinds[0]
    return found


def added(files: dict[str, int], base: dict[str, int]) -> dict[str, int]:
    """The files of an image that its base has not, or has in another size."""
    return {path: size for path, size in files.items() if base.get(path) != size}


def largest(files: dict[str, int], count: int = 10) -> list[tuple[str, int]]:
    """The largest files, with their sizes."""
    return sorted(files.items(), key=lambda file: -file[1])[:count]
