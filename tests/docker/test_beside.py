"""The package in the images of engines: resolved, installed by docker/install.sh, verified as far as no GPU is needed.

`beside/` has what is installed in an image of each engine's release.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.fakes.installation import fake_tensorrt_llm
from tests.support.uv import uv

ROOT = Path(__file__).parents[2]
IMAGES = sorted((Path(__file__).parent / "beside").glob("*.txt"))
REPLACED = {"uvicorn"}
"""What the project needs newer than some images have it; no engine pins it."""
IMPORTS = """
import pkgutil, sys
import djl_trtllm
# What other extras, and DJL, bring.
without = ("openvino", "cluster", "__main__", "handler", "async_handler")
for module in pkgutil.walk_packages(djl_trtllm.__path__, "djl_trtllm."):
    if not any(f".{name}" in module.name for name in without):
        __import__(module.name)
print(len(sys.modules))
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.version_info < (3, 11), reason="install.sh needs tomllib")]
every_image = pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)


@every_image
def test_what_the_project_asks_for_goes_together_with_the_pins_of_an_engine(image: Path, tmp_path: Path) -> None:
    pins = [line for line in image.read_text().splitlines() if not line.startswith("#") and "# any" not in line]
    assert len(pins) > 2
    (tmp_path / "pins.txt").write_text("\n".join(pins))
    options = ("--quiet", "--no-header", "--no-annotate", "--python-version", "3.12", "--extra=otel", "--extra=grpc")
    resolved = uv("pip", "compile", *options, "pyproject.toml", tmp_path / "pins.txt", cwd=ROOT).splitlines()
    assert {"javaproperties", "boto3"} <= {Requirement(line).name for line in resolved}


@every_image
def test_an_image_gets_the_project_and_keeps_its_packages(image: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    uv("venv", "--quiet", "--seed", "--python", sys.executable, environment)
    uv("pip", "install", "--quiet", "--python", environment, "--requirement", image)
    version = image.stem.removeprefix("tensorrt-llm-") if "tensorrt" in image.stem else "1.2.1"
    fake = fake_tensorrt_llm(tmp_path, version="1.0.0" if version == "1.0" else version)
    environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environ |= {**fake, "PATH": f"{environment / 'bin'}:/usr/bin:/bin", "PYTHONPATH": fake["PYTHONPATH"].split(":")[0]}

    def run(*command: str | Path, expect: tuple[int, ...] = (0,), **more: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environ | more, capture_output=True, text=True)
        assert done.returncode in expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    def installed() -> dict[str, str]:
        listed = json.loads(uv("pip", "list", "--format=json", "--python", environment))
        return {package["name"]: package["version"] for package in listed}

    before = installed()
    # The fake differs from the table of names in what needs a GPU or C++ code.
    starts = image.stem == "tensorrt-llm-1.2.1"  # twenty seconds, which one image proves
    verify = {"PYTEST_ARGUMENTS": "--collect-only", "VERIFY_FIRST_START": "" if starts else "no"}
    said = run(ROOT / "docker" / "verify", "--inside", expect=(0, 1), **verify)
    assert " equal, " in said and "tests collected" in said, said
    assert (tmp_path / "first-start.json").exists() is starts
    assert not starts or json.loads((tmp_path / "first-start.json").read_text())["passed"], said
    after = installed()
    moved = {name for name, had in before.items() if after[name] != had}
    assert moved <= REPLACED and all(f"replacing {name} " in said for name in moved)
    # The checkout that was verified is gone.
    run("python3", "-c", IMPORTS, PYTHONPATH=f"{ROOT}:{environ['PYTHONPATH']}")
    ids = f"{ROOT / 'tests' / 'model' / 'test_tokenizer_formats.py'}::test_ids_equal_those_of_sentencepiece"
    run("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", ids, PYTHONPATH=f"{ROOT}:{environ['PYTHONPATH']}")
