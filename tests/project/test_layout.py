"""Where tests stand: beside their module by name, one file or several for each."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "djl_trtllm"
TESTS = ROOT / "tests"

# What is no mirror of the package: the project itself, whole servers, images, and what tests are made of.
OTHERS = {
    "benchmarks",
    "clients",
    "docker",
    "fakes",
    "faults",
    "integration",
    "project",
    "serving",
    "support",
    "tools",
    "trtllm",
}

# The modules of config/options that do something; the others are declarations.
MACHINERY_OF_OPTIONS = {"choices", "legacy", "option", "registry", "values"}

# Modules that declare and do nothing, or that only other modules' tests can reach.
DECLARATIONS: set[str] = set()


def modules() -> set[str]:
    """`x/y` for each module `djl_trtllm/x/y.py`, without the packages' own files."""
    files = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    return {str(path.with_suffix("")) for path in files if not is_declaration(path)}


def is_declaration(path: Path) -> bool:
    """Whether a module below the package declares a group of options, of which `tests/config/test_options.py` is."""
    return path.parent == Path("config/options") and path.stem not in MACHINERY_OF_OPTIONS


def packages() -> set[str]:
    """Packages, whose tests may be of what they have together: `tests/config/test_options.py`."""
    return {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")}


def files_of_tests() -> set[str]:
    """`x/y` for each test file `tests/x/test_y.py` that has to mirror a module."""
    files = (path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))
    names = (path.with_name(path.stem.removeprefix("test_")) for path in files if path.parts[0] not in OTHERS)
    return {str(name) for name in names}


def module_of(test: str) -> str | None:
    """The module that a test file is for: of `a/b` and `a/b_c`, `tests/a/test_b_c_d.py` is the second one's."""
    fitting = [name for name in modules() | packages() if test == name or test.startswith(f"{name}_")]
    return max(fitting, key=len, default=None)


def test_every_test_file_mirrors_a_module() -> None:
    assert sorted(test for test in files_of_tests() if module_of(test) is None) == []


def test_every_module_has_tests_of_its_own() -> None:
    assert sorted(modules() - {module_of(test) for test in files_of_tests()}) == sorted(DECLARATIONS)
