"""What the tests of the fake do with it, in a process of its own.

`python -m tests.fakes.programs.scenarios [[NAME, ARGUMENTS], ...]`.

A scenario returns what it saw; a list of that is printed as the last line, in JSON.
"""

from __future__ import annotations

import json
import os
import sys

from . import constructing, failing, requesting


def main() -> None:
    """One scenario after the other."""
    scenarios = {**vars(constructing), **vars(failing), **vars(requesting)}
    seen = [scenarios[name](**arguments) for name, arguments in json.loads(sys.argv[1])]
    print("\n" + json.dumps(seen), flush=True)
    # A dead worker would keep the interpreter from ending.
    os._exit(0)


if __name__ == "__main__":
    main()
