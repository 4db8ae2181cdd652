"""docker/cut.py on a package that was made for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CUT = Path(__file__).parents[2] / "docker" / "cut.py"
KEPT = ("transformers/__init__.py", "transformers/models/llama/__pycache__/configuration_llama.cpython-312.pyc")
CUT_AWAY = (
    "transformers/tests/test_all.py",
    "transformers/include/any.h",
    "transformers/models/llama/__pycache__/modeling_llama.cpython-312.pyc",
)


def install(site: Path, name: str, files: tuple[str, ...]) -> None:
    """A package with these files, as pip leaves it."""
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text("some text")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_what_no_image_runs_is_removed_from_the_packages_that_the_file_names(tmp_path: Path) -> None:
    install(tmp_path, "transformers", KEPT + CUT_AWAY)
    install(tmp_path, "other", ("other/tests/test_it.py",))
    locked = tmp_path / "locked.txt"
    # A package may have a line for each Python, and be missing on this one.
    locked.write_text(
        "transformers==1.0 ; python_version < '3.11' \\\n    --hash=sha256:00\ntransformers==1.0\nno-such==1\n"
    )
    # Without site-packages: those of the tests stay whole.
    done = subprocess.run(
        [sys.executable, "-S", CUT, locked],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [file for file in KEPT + CUT_AWAY if (tmp_path / file).exists()] == list(KEPT)
    assert (tmp_path / "other" / "tests" / "test_it.py").exists()
    assert done.stdout == "cut 0.0 MB of transformers\n"
