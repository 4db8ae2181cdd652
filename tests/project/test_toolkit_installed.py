"""`tensorrt_llm_toolkit` as it is installed: from the wheel and in place, alone and beside the real one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.uv import uv

ROOT = Path(__file__).parents[2]
PROGRAM = "from tensorrt_llm_toolkit.utils.utils import max_token_finder; print(max_token_finder.__module__)"
REAL = """import setuptools
names = ["tensorrt_llm_toolkit", "tensorrt_llm_toolkit.utils"]
setuptools.setup(name="tensorrt_llm_toolkit", version="0.9", packages=names)
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "tree"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "models", "tests")
    shutil.copytree(ROOT, source, ignore=ignored)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    uv("build", "--wheel", "--out-dir", out, source)
    return next(out.glob("*.whl"))


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A project with the name and the layout of LMI's toolkit."""
    package = tmp_path / "real" / "tensorrt_llm_toolkit" / "utils"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "utils.py").write_text("def max_token_finder(properties): pass\n")
    (tmp_path / "real" / "setup.py").write_text(REAL)
    return tmp_path / "real"


def environment(folder: Path, *arguments: str) -> Path:
    uv("venv", "--python", sys.executable, *arguments, folder)
    return folder / "bin" / "python"


def install(python: Path, *what: str | Path) -> None:
    # Nothing of a dependency is imported before the function is called.
    uv("pip", "install", "--no-deps", "--python", python, *what)


def finder_of(python: Path, cwd: Path) -> str:
    environ = {"HOME": str(cwd), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([python, "-c", PROGRAM], cwd=cwd, env=environ, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


@pytest.mark.parametrize("editable", [False, True])
@pytest.mark.parametrize("first", ["ours", "real"])
def test_the_real_one_wins_in_the_same_environment(
    source: Path, wheel: Path, real: Path, tmp_path: Path, editable: bool, first: str
) -> None:
    python = environment(tmp_path / "environment")
    ours: list[str | Path] = ["--editable", source] if editable else [wheel]
    if first == "ours":
        install(python, *ours)
        assert finder_of(python, tmp_path) == "djl_trtllm.finder.toolkit"
        install(python, real)
    else:
        install(python, real)
        install(python, *ours)
    assert finder_of(python, tmp_path) == "tensorrt_llm_toolkit.utils.utils"
    uv("pip", "uninstall", "--python", python, "tensorrt_llm_toolkit")
    assert finder_of(python, tmp_path) == "djl_trtllm.finder.toolkit"
    uv("pip", "uninstall", "--python", python, "djl-trtllm")
    assert "ModuleNotFoundError: No module named 'tensorrt_llm_toolkit'" in finder_of(python, tmp_path)


def test_the_real_one_wins_in_a_folder_that_comes_later(wheel: Path, real: Path, tmp_path: Path) -> None:
    """As in an environment that was made with --system-site-packages in LMI's container."""
    python = environment(tmp_path / "environment")
    install(python, wheel)
    site = next((tmp_path / "environment").glob("lib/python*/site-packages"))
    (site / "later.pth").write_text(f"{real}\n")
    assert finder_of(python, tmp_path) == "tensorrt_llm_toolkit.utils.utils"
