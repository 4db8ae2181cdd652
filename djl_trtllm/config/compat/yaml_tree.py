"""YAML with the line of every value."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from djl_trtllm.config.compat.foreign_format import ForeignSetting, FormatError

_DEEPEST = 50
_MOST_VALUES = 20_000


def entries(text: str) -> list[ForeignSetting]:
    """Every value with the path of its keys as name (`trt_llm.build.max_seq_len`).

    A list is one entry for each member, under the list's own name; null and empty collections have the value "".
    Raises `FormatError`.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise FormatError(line, f"this is not YAML: {error.problem or error.context}{_hint(text, line)}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = "its values are nested too deep" if isinstance(error, RecursionError) else str(error)
        raise FormatError(1, f"this is not YAML: {' '.join(reason.split())}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise FormatError(root.start_mark.line + 1, "expected `key: value` lines")
    found: list[ForeignSetting] = []
    for entry in _walk(root, "", 0):
        found.append(entry)
        if len(found) > _MOST_VALUES:
            # Aliases multiply values; a few lines can have billions of them.
            raise FormatError(1, f"more than {_MOST_VALUES} values")
    return found


def _walk(node: yaml.Node, name: str, depth: int) -> Iterator[ForeignSetting]:
    line = node.start_mark.line + 1
    if depth > _DEEPEST:
        raise FormatError(line, f"more than {_DEEPEST} nested levels")
    if isinstance(node, yaml.MappingNode) and node.value:
        lines: dict[str, int] = {}
        for key, value in node.value:
            key_line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise FormatError(key_line, "a key must be a scalar")
            if key.value in lines:
                raise FormatError(key_line, f"{key.value} is here and on line {lines[key.value]}; keep one")
            lines[key.value] = key_line
            yield from _walk(value, f"{name}.{key.value}" if name else key.value, depth + 1)
    elif isinstance(node, yaml.SequenceNode) and node.value:
        for member in node.value:
            yield from _walk(member, name, depth + 1)
    elif isinstance(node, yaml.ScalarNode):
        null = node.tag == "tag:yaml.org,2002:null"
        yield ForeignSetting(name, "" if null else node.value, line)
    else:
        yield ForeignSetting(name, "", line)


def _hint(text: str, line: int) -> str:
    """What is most often wrong on a line that YAML cannot read."""
    lines = text.splitlines()
    content = lines[line - 1] if line <= len(lines) else ""
    if "\t" in content[: len(content) - len(content.lstrip())]:
        return "; indent with spaces, not with tabs"
    if content.lstrip().startswith(("%", "@", "`")):
        return "; put quotes around the value"
    return "; check the indentation and the colons of this line and the one before"
