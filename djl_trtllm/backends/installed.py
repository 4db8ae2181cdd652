"""Facts about an engine's installed package, read without importing it: an import takes seconds, and may use a GPU."""

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

_WORD = re.compile(r"""'[^']*'|"[^"]*"|\w+""")
"""A text or a name in an annotation. A text has no names: a `Literal` may have the text `no-Device`."""
_NO_TYPES: Mapping[str, str] = MappingProxyType({})


def folder_of(package: str) -> Path | None:
    """The directory of an installed package; None where there is none."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def version_of(*distributions: str) -> tuple[str, str] | None:
    """The first of these distributions that is installed, with its version; None if none is installed."""
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def statements(path: Path) -> list[ast.stmt]:
    """The statements of a Python file, which is not run; none if it cannot be read."""
    try:
        return ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, UnicodeDecodeError):
        return []


def classes_of(*paths: Path, types: Mapping[str, str] = _NO_TYPES) -> dict[str, dict[str, str]]:
    """The classes that Python files declare, with the types of their fields and of those that they inherit.

    Where one of the files has `Device = Literal["cpu", "cuda"]`, a field of `Device | None` is of
    `Literal['cpu', 'cuda'] | None`. So are further `types`, by their names.
    """
    nodes = [node for path in paths for node in statements(path)]
    literals = {**literals_of(nodes), **types}
    declared = {node.name: declared_fields(node) for node in nodes if isinstance(node, ast.ClassDef)}
    return {
        name: {field: written_out(text, literals) for field, text in inherited_fields(name, declared).items()}
        for name in declared
    }


def literals_of(nodes: Iterable[ast.stmt]) -> dict[str, str]:
    """The types `Literal[...]` that statements assign, by their names."""
    found = {}
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Subscript):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(node.value.value) == "Literal":
                found[ast.unparse(target)] = ast.unparse(node.value)
    return found


def written_out(annotation: str, literals: Mapping[str, str]) -> str:
    """The annotation with the types of `literals` in the place of their names, also of the names inside those types."""
    return _WORD.sub(
        lambda word: written_out(literals[word[0]], literals) if word[0] in literals else word[0], annotation
    )


def declared_fields(node: ast.ClassDef) -> tuple[list[str], dict[str, str]]:
    """The names of a class's bases, and its own fields."""
    fields = {
        item.target.id: ast.unparse(item.annotation)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    usual = {name: text for name, text in fields.items() if not name.startswith("_") and "ClassVar" not in text}
    return [ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases], usual


def inherited_fields(name: str, classes: Mapping[str, tuple[list[str], dict[str, str]]]) -> dict[str, str]:
    """The fields of a class and of its bases, from what `declared_fields` found of each."""
    bases, own = classes.get(name, ([], {}))
    return {key: text for base in bases if base != name for key, text in inherited_fields(base, classes).items()} | own


def tables_of(path: Path) -> Mapping[str, frozenset[str]]:
    """The dictionaries that a Python file assigns, by name, each as the set of its string keys."""
    found = {}
    for node in statements(path):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Dict):
            keys = (key.value for key in node.value.keys if isinstance(key, ast.Constant))
            found[target.id] = frozenset(key for key in keys if isinstance(key, str))
    return found


def is_of_transformers(architecture: str) -> bool:
    """Whether the installed transformers names the class among its causal language models."""
    package = folder_of("transformers")
    if package is None or not architecture.endswith("ForCausalLM"):
        return False
    try:
        return f'"{architecture}"' in (package / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    except OSError:
        return False
