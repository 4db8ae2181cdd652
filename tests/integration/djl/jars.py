"""The real thing: DJL's Python engine and djl_python from Maven Central, fetched once into `.djl/` of the checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

HERE = Path(__file__).parent
_CACHE = HERE.parents[2] / ".djl"
_FETCH_SECONDS = 300


def djl_engine() -> Path:
    """A folder with `lib/` (the jars, and the driver's classes) and `python/` (djl_python and its engine).

    Skips the test where there is no JDK or no Maven; where CI is set, that is a failure.
    """
    key = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in ("pom.xml", "Driver.java"))).hexdigest()[:12]
    folder = _CACHE / f"engine-{key}"
    if folder.is_dir():
        return folder
    missing = [tool for tool in ("mvn", "javac") if shutil.which(tool) is None]
    if missing:
        message = f"{' and '.join(missing)} not found: DJL Serving's engine comes from Maven Central"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    _CACHE.mkdir(exist_ok=True)
    with FileLock(_CACHE / "lock"):
        if not folder.is_dir():
            _make(folder)
    return folder


def _make(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=_CACHE) as temporary:
        partial = Path(temporary) / "engine"
        lib = partial / "lib"
        lib.mkdir(parents=True)
        maven = ["mvn", "-q", "-B", "-f", str(HERE / "pom.xml"), "dependency:copy-dependencies"]
        _run([*maven, "-DincludeScope=runtime", f"-DoutputDirectory={lib}"])
        _run(["javac", "-cp", f"{lib}/*", "-d", str(lib / "classes"), str(HERE / "Driver.java")])
        with zipfile.ZipFile(next(lib.glob("python-*.jar"))) as jar:
            names = [name for name in jar.namelist() if name.startswith(("djl_python/", "djl_python_engine.py"))]
            jar.extractall(partial / "python", names)
        partial.rename(folder)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def djl_python() -> Path:
    """The folder of djl_python and its engine: what DJL_PYTHON_HOME names, else that of Maven Central."""
    named = os.environ.get("DJL_PYTHON_HOME")
    return Path(named) if named else djl_engine() / "python"
