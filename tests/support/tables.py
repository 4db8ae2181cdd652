"""Tables of the tests: `tables.json` beside them, by what a test is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows(module: str, name: str, **places: object) -> Any:
    """Return a table of the folder that has this module (`__file__`), with `{PLACE}` in texts replaced."""
    text = json.dumps(json.loads(Path(module).with_name("tables.json").read_bytes())[name])
    for place, path in places.items():
        text = text.replace(f"{{{place}}}", str(path))
    return json.loads(text)
