"""Tables of tests. A test runs all rows of its table as one test, and a failure names its row.

`tables.json` beside a test has tables by the names of the tests.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from djl_trtllm.config import Options
from djl_trtllm.config.options import OPTIONS
from tests.support.virtual_time import run

Test = TypeVar("Test", bound=Callable[..., object])

_SHOWN = 300
"""Characters of a value in the name of a row."""


def by_table(*names: str, apart: bool = False) -> Callable[[Test], Test]:
    """Run a test with each row of its table, whose columns are the arguments of these names.

    The table of `test_a_rule` is `a_rule`. An argument of the type bytes is a text there, a character for each byte.
    `apart`: each row is a test of its own, with its own fixtures.
    """

    def with_rows(test: Test) -> Test:
        written = inspect.unwrap(test)
        rows = table(inspect.getfile(written), test.__name__.removeprefix("test_"))
        for place, name in enumerate(names):
            if len(names) > 1 and inspect.get_annotations(written)[name] == "bytes":
                for row in rows:
                    row[place] = row[place].encode("latin-1")
        columns = names[0] if len(names) == 1 else names
        marked: Test = (pytest.mark.parametrize if apart else by_rows)(columns, rows)(test)
        return marked

    return with_rows


def by_rows(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test with each row: as `pytest.mark.parametrize` with these arguments, but all rows are one test.

    A row has its own `tmp_path`, `monkeypatch` and virtual time, and `caplog` and `capsys` without what the rows before
    it wrote. It shares all other fixtures with them: where a test changes one, `parametrize` is right.
    """
    columns = (names,) if isinstance(names, str) else names
    named = [dict(zip(columns, (row,) if isinstance(names, str) else row, strict=True)) for row in rows]
    if not named:
        raise ValueError(f"a table of {', '.join(columns)} has no rows: the test would prove nothing")

    def with_rows(test: Test) -> Test:
        @functools.wraps(test)
        def all_rows(**fixtures: Any) -> None:
            for number, row in enumerate(named):
                try:
                    with _fixtures_of_row(number, fixtures) as own:
                        result = test(**row, **own)
                        if inspect.iscoroutine(result):
                            run(result)
                except BaseException as error:
                    shown = ", ".join(f"{name}={value!r:.{_SHOWN}}" for name, value in row.items())
                    # Python 3.11's `add_note` does the same; 3.10 has none.
                    vars(error).setdefault("__notes__", []).append(f"row {number}: {shown}")
                    raise

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in columns]
        all_rows.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]  # pytest reads it
        return cast(Test, all_rows)

    return with_rows


@contextmanager
def _fixtures_of_row(number: int, fixtures: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The test's fixtures, and in the place of some of them those of a row."""
    own = dict(fixtures)
    if "caplog" in own:
        own["caplog"].clear()
    if "capsys" in own:
        own["capsys"].readouterr()
    if "tmp_path" in own:
        own["tmp_path"] /= str(number)
        own["tmp_path"].mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield own | ({"monkeypatch": monkeypatch} if "monkeypatch" in own else {})


def table(module: str, name: str, **places: object) -> Any:
    """Return a table of the folder that has this module (`__file__`), with `{PLACE}` in texts replaced."""
    text = json.dumps(json.loads(_file(Path(module).parent))[name])
    for place, path in places.items():
        text = text.replace(f"{{{place}}}", str(path))
    return json.loads(text)


@functools.cache
def _file(folder: Path) -> bytes:
    return (folder / "tables.json").read_bytes()


def options_of(row: Mapping[str, Any]) -> Options:
    """Options by field: texts and lists, as JSON has them, become values of the options' types."""
    plain = {name: value for name, value in row.items() if isinstance(value, str | list)}
    typed = {name: OPTIONS[name].type.check(value, OPTIONS[name].option) for name, value in plain.items()}
    return Options(**{**row, **typed})
