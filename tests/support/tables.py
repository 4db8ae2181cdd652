"""Tables of tests that are data: `tables.json` beside a test has them by the names of the tests."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])


def by_table(*names: str) -> Callable[[Test], Test]:
    """Run a test once with each row of its table, whose columns are the arguments of these names.

    The table of `test_a_rule` is `a_rule`. An argument of the type bytes is a text there, a character for each byte.
    """

    def with_rows(test: Test) -> Test:
        written = inspect.unwrap(test)
        rows = table(inspect.getfile(written), test.__name__.removeprefix("test_"))
        for place, name in enumerate(names):
            if len(names) > 1 and inspect.get_annotations(written)[name] == "bytes":
                for row in rows:
                    row[place] = row[place].encode("latin-1")
        marked: Test = pytest.mark.parametrize(names[0] if len(names) == 1 else names, rows)(test)
        return marked

    return with_rows


def table(module: str, name: str, **places: object) -> Any:
    """Return a table of the folder that has this module (`__file__`), with `{PLACE}` in texts replaced."""
    text = json.dumps(json.loads(_file(Path(module).parent))[name])
    for place, path in places.items():
        text = text.replace(f"{{{place}}}", str(path))
    return json.loads(text)


@cache
def _file(folder: Path) -> bytes:
    return (folder / "tables.json").read_bytes()
