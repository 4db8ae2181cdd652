"""What is published: a source distribution and a wheel, and a model served from the wheel."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import httpx
import pytest
from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet

import djl_trtllm
from tests.support.processes import PATIENCE, wait_until
from tests.support.server import START_SECONDS, free_port
from tests.support.uv import uv

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "djl_trtllm"
TOOLKIT = "tensorrt_llm_toolkit.py"
DEMO = ROOT / "serving" / "models" / "tiny-stories" / "engine"
LINK = re.compile(r"\]\(([^)]+)\)")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working tree as a developer has it, with what must not be published."""
    source = tmp_path_factory.mktemp("source") / "tree"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "models")
    shutil.copytree(ROOT, source, ignore=ignored)
    shutil.copytree(DEMO, source / DEMO.relative_to(ROOT))
    litter = [
        "scratch.py",
        "build/lib/djl_trtllm/removed.py",
        ".venv-test/lib/module.py",
        "djl_trtllm/__pycache__/a.pyc",
    ]
    for name in litter:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("")
    return source


@pytest.fixture(scope="module")
def dist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both files are. uv makes the wheel out of the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    uv("build", "--out-dir", out, source)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"djl_trtllm-{djl_trtllm.__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    return dist / f"djl_trtllm-{djl_trtllm.__version__}.tar.gz"


def package_files() -> set[str]:
    """Every file of the package: modules, py.typed and data."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT)) for path in files}


def test_the_wheel_has_the_package_its_data_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"djl_trtllm-{djl_trtllm.__version__}.dist-info/"
    demo = {f"djl_trtllm/demo/tiny-stories/{path.name}" for path in DEMO.iterdir()}
    assert {name for name in names if not name.startswith(info)} == package_files() | {TOOLKIT} | demo
    assert {"djl_trtllm/py.typed", "djl_trtllm/backends/tensorrt_llm/names.json", info + "licenses/LICENSE"} <= names


def test_the_source_distribution_has_what_builds_the_wheel_and_the_documents(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    root = {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
        "setup.cfg",
        "setup.py",
        TOOLKIT,
    }
    documents = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*") if path.is_file()}
    documents = {name for name in documents if "_site/" not in name and "__pycache__" not in name}
    demo = {str(path.relative_to(ROOT)) for path in DEMO.iterdir()}
    built_of = package_files() | root | documents | demo
    assert {name for name in names if not name.startswith("djl_trtllm.egg-info/")} == built_of


def test_the_metadata_is_valid(wheel: Path) -> None:
    text = zipfile.ZipFile(wheel).read(f"djl_trtllm-{djl_trtllm.__version__}.dist-info/METADATA")
    metadata = Metadata.from_email(text, validate=True)
    assert str(metadata.version) == djl_trtllm.__version__
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.requires_python == SpecifierSet(">=3.10")
    assert "Typing :: Typed" in (metadata.classifiers or [])
    assert metadata.description_content_type == "text/markdown"
    assert metadata.project_urls


def links(description: str) -> list[str]:
    return LINK.findall(description)


def test_the_readme_of_the_package_index_has_no_link_to_a_file_that_is_not_there(wheel: Path) -> None:
    text = zipfile.ZipFile(wheel).read(f"djl_trtllm-{djl_trtllm.__version__}.dist-info/METADATA")
    description = BytesParser().parsebytes(text).get_payload()
    assert isinstance(description, str)
    assert "docs/options.md" in description
    assert [link for link in links(description) if not link.startswith("https://")] == []


def test_with_a_public_repository_the_readme_links_to_it(source: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(source, project)
    pyproject = (project / "pyproject.toml").read_text()
    pyproject = pyproject.replace("[project.urls]\n", '[project.urls]\nRepository = "https://example.org/us/here"\n')
    (project / "pyproject.toml").write_text(pyproject)
    uv("build", "--sdist", "--out-dir", tmp_path / "dist", project)
    with tarfile.open(next((tmp_path / "dist").glob("*.tar.gz"))) as archive:
        member = archive.extractfile(f"djl_trtllm-{djl_trtllm.__version__}/PKG-INFO")
        assert member is not None
        found = links(member.read().decode())
    written = [link for link in links((ROOT / "README.md").read_text()) if not link.startswith("https://")]
    assert written
    assert [link for link in found if "example.org" in link] == [
        f"https://example.org/us/here/blob/HEAD/{link}" for link in written
    ]
    for link in written:
        assert (ROOT / link.partition("#")[0]).is_file(), link


def test_a_clean_environment_serves_the_demonstration_model_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    uv("venv", "--python", sys.executable, environment)
    uv(
        "pip",
        "install",
        "--python",
        environment / "bin" / "python",
        f"djl-trtllm[cpu] @ {wheel.as_uri()}",
        cwd=tmp_path,
    )
    assert not list(environment.glob("lib/python*/site-packages/torch")), "serving needs no torch"
    port = free_port()
    command = [str(environment / "bin" / "djl-trtllm"), "serve", "--demo", "--host", "127.0.0.1", "--port", str(port)]
    log = tmp_path / "log"
    # Nothing of this test's own environment: the package has to stand in the new one.
    environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    with log.open("wb") as stderr:
        server = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=stderr, stderr=stderr)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False) as client:

            def ready() -> bool:
                assert server.poll() is None, log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/ping").status_code == 200
                return False

            wait_until(ready, START_SECONDS, "/ping 200")
            request = {"inputs": "Once upon a time, in a dark wood,", "parameters": {"max_new_tokens": 6}}
            answer = client.post("/invocations", json=request)
            models = client.get("/ping").json()
        assert answer.status_code == 200, log.read_text()
        assert answer.json()["generated_text"].startswith(" there lived")
        assert list(models) == ["tiny-stories"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0, log.read_text()
    finally:
        server.kill()
        server.wait()


# -- `tensorrt_llm_toolkit` as it is installed: from the wheel and in place, alone and beside the real one -------------

PROGRAM = "from tensorrt_llm_toolkit.utils.utils import max_token_finder; print(max_token_finder.__module__)"
REAL = """import setuptools
names = ["tensorrt_llm_toolkit", "tensorrt_llm_toolkit.utils"]
setuptools.setup(name="tensorrt_llm_toolkit", version="0.9", packages=names)
"""


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


@pytest.mark.parametrize(("editable", "first"), [(False, "ours"), (True, "real")])
def test_the_real_one_wins_in_the_same_environment(
    source: Path, wheel: Path, real: Path, tmp_path: Path, editable: bool, first: str
) -> None:
    python = environment(tmp_path / "environment")
    ours: list[str | Path] = ["--editable", source] if editable else [wheel]
    if first == "ours":
        install(python, *ours)
        assert finder_of(python, tmp_path) == "djl_trtllm.finder"
        install(python, real)
    else:
        install(python, real)
        install(python, *ours)
    assert finder_of(python, tmp_path) == "tensorrt_llm_toolkit.utils.utils"
    uv("pip", "uninstall", "--python", python, "tensorrt_llm_toolkit")
    assert finder_of(python, tmp_path) == "djl_trtllm.finder"
    uv("pip", "uninstall", "--python", python, "djl-trtllm")
    assert "ModuleNotFoundError: No module named 'tensorrt_llm_toolkit'" in finder_of(python, tmp_path)


def test_the_real_one_wins_in_a_folder_that_comes_later(wheel: Path, real: Path, tmp_path: Path) -> None:
    """As in an environment that was made with --system-site-packages in LMI's container."""
    python = environment(tmp_path / "environment")
    install(python, wheel)
    site = next((tmp_path / "environment").glob("lib/python*/site-packages"))
    (site / "later.pth").write_text(f"{real}\n")
    assert finder_of(python, tmp_path) == "tensorrt_llm_toolkit.utils.utils"
