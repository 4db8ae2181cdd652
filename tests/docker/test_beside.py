"""The package in the images of engines: resolved, installed by docker/install.sh, verified as far as no GPU is needed.

`beside/` has what is installed in an image of each engine's release.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.fakes.installation import fake_tensorrt_llm
from tests.support.uv import uv

ROOT = Path(__file__).parents[2]
IMAGES = sorted((Path(__file__).parent / "beside").glob("*.txt"))
REFERENCE = next(image for image in IMAGES if image.stem == "tensorrt-llm-1.2.1")
REPLACED = {"uvicorn"}
"""What the project needs newer than some images have it; no engine pins it."""
TOOLS = re.findall(r"'(.+?>=.+?)'", (ROOT / "docker" / "verify").read_text())
"""What docker/verify installs besides, for tests."""
IMPORTS = """
import pkgutil, sys
import djl_trtllm
# What other extras, and DJL, bring.
without = ("openvino", "cluster", "__main__", "handler", "async_handler")
for module in pkgutil.walk_packages(djl_trtllm.__path__, "djl_trtllm."):
    if not any(f".{name}" in module.name for name in without):
        __import__(module.name)
from tools.tensorrt_llm.check import main
sys.exit(main(["--installed"]))
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.version_info < (3, 11), reason="install.sh needs tomllib")]
every_image = pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)


@every_image
def test_what_the_project_asks_for_goes_together_with_the_pins_of_an_engine(image: Path, tmp_path: Path) -> None:
    pins = [line for line in image.read_text().splitlines() if not line.startswith("#") and "# any" not in line]
    assert len(pins) > 2
    (tmp_path / "pins.txt").write_text("\n".join(pins))
    options = ("--quiet", "--no-header", "--no-annotate", "--python-version", "3.12", "--extra=otel", "--extra=grpc")
    (tmp_path / "tools.txt").write_text("\n".join(TOOLS))
    files = ("pyproject.toml", tmp_path / "pins.txt", tmp_path / "tools.txt")
    resolved = uv("pip", "compile", *options, *files, cwd=ROOT).splitlines()
    assert {"javaproperties", "boto3", "hypothesis"} <= {Requirement(line).name for line in resolved}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the packages of one image after the other: what they share is compiled once."""
    environment = tmp_path_factory.mktemp("beside") / "environment"
    uv("venv", "--quiet", "--seed", "--python", sys.executable, environment)
    return environment


class Container:
    """The packages of an image, and no others, in an environment where commands see a TensorRT-LLM."""

    def __init__(self, image: Path, directory: Path, environment: Path) -> None:
        self.directory = directory
        self._environment = environment
        # `--upgrade`: as in a new environment, and not the versions that the image before this one had.
        self.install("--exact", "--upgrade", "--requirement", image, "pip")
        version = image.stem.removeprefix("tensorrt-llm-") if "tensorrt" in image.stem else "1.2.1"
        fake = fake_tensorrt_llm(directory, version="1.0.0" if version == "1.0" else version)
        environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        self._site = fake["PYTHONPATH"].split(":")[0]
        self._environ = {**environ, **fake, "PATH": f"{self._environment / 'bin'}:/usr/bin:/bin"}
        self._before = self._installed()

    def install(self, *what: str | Path) -> None:
        uv("pip", "install", "--quiet", "--python", self._environment, *what)

    def run(self, *command: str | Path, path: str = "", expect: tuple[int, ...] = (0,), **more: str) -> str:
        environ = {**self._environ, "PYTHONPATH": f"{path}:{self._site}" if path else self._site, **more}
        done = subprocess.run(command, cwd=self.directory, env=environ, capture_output=True, text=True)
        assert done.returncode in expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    def check(self, said: str) -> None:
        """The image's packages are as they were, and the project works beside them; `said` was said by install.sh."""
        after = self._installed()
        moved = {name for name, had in self._before.items() if after[name] != had}
        assert moved <= REPLACED and all(f"replacing {name} " in said for name in moved)
        # The fake differs from the table of names in what needs a GPU or C++ code.
        assert " equal, " in self.run("python3", "-c", IMPORTS, path=str(ROOT), expect=(0, 1))
        # The contract tests are read, and not run.
        test, tests = "test_ids_equal_those_of_sentencepiece", ROOT / "tests"
        pytest_here = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", test)
        ran = self.run(*pytest_here, tests / "model" / "test_tokenizer_formats.py", tests / "trtllm", path=str(ROOT))
        assert " passed" in ran and " deselected" in ran, ran

    def _installed(self) -> dict[str, str]:
        listed = json.loads(uv("pip", "list", "--format=json", "--python", self._environment))
        return {package["name"]: package["version"] for package in listed}


@pytest.mark.parametrize("image", [image for image in IMAGES if image != REFERENCE], ids=lambda path: path.stem)
def test_an_image_gets_the_project_and_keeps_its_packages(image: Path, environment: Path, tmp_path: Path) -> None:
    container = Container(image, tmp_path, environment)
    docker = ROOT / "docker"
    said = container.run(
        docker / "install.sh", ROOT / "pyproject.toml", docker / "requirements-core.txt", "otel", "grpc"
    )
    container.install(*TOOLS)
    container.check(said)


def test_an_image_is_verified(environment: Path, tmp_path: Path) -> None:
    """As docker/verify does it, with a first start."""
    container = Container(REFERENCE, tmp_path, environment)
    said = container.run(ROOT / "docker" / "verify", "--inside", expect=(0, 1), PYTEST_ARGUMENTS="--collect-only")
    assert " equal, " in said and "tests collected" in said, said
    assert json.loads((tmp_path / "first-start.json").read_text())["passed"], said
    # The checkout that was verified is gone.
    container.check(said)
