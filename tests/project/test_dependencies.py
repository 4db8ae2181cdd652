"""What the project asks of other packages can be had: by itself on each Python, and beside TensorRT-LLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.uv import uv

ROOT = Path(__file__).parents[2]

# What TensorRT-LLM 1.2 pins of the packages that this project, or a package of its, asks for as well.
TENSORRT_LLM = (
    "datasets==3.1.0",
    "fastapi>=0.120.1,<=0.121.3",
    "numpy<2",
    "nvidia-ml-py>=13",
    "prometheus_client",
    "psutil",
    "pydantic>=2.9.1",
    "sentencepiece>=0.1.99",
    "starlette>=0.49.1",
    "torch==2.9.1",
    "transformers==4.57.3",
    "uvicorn",
)


def resolve(*arguments: str | Path, python: str) -> dict[str, str]:
    """Name and version of each package that would be installed; nothing is."""
    options = ("--quiet", "--no-header", "--no-annotate", "--python-platform", "x86_64-manylinux_2_28")
    lines = uv("pip", "compile", *options, "--python-version", python, *arguments, cwd=ROOT).splitlines()
    return dict(line.split("==") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.10", "3.13"])
def test_the_lowest_versions_go_together(python: str) -> None:
    chosen = resolve("--resolution", "lowest-direct", "--extra", "cpu", "pyproject.toml", python=python)
    assert chosen["transformers"].startswith("4.57."), "TensorRT-LLM's version is among those that are tried"


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_the_core_installs_beside_tensorrt_llm(python: str, tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("\n".join(TENSORRT_LLM))
    chosen = resolve("pyproject.toml", pins, python=python)
    assert (chosen["transformers"], chosen["torch"], chosen["datasets"]) == ("4.57.3", "2.9.1", "3.1.0")
    assert {"javaproperties", "boto3"} <= chosen.keys()


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_the_ray_that_installs_beside_tensorrt_llm_is_the_one_that_its_page_names(python: str, tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("\n".join(TENSORRT_LLM))
    chosen = resolve("--extra", "ray", "pyproject.toml", pins, python=python)
    release = ".".join(chosen["ray"].split(".")[:2])
    assert f"`ray[serve]=={release}.*`" in (ROOT / "docs" / "ray.md").read_text()


@pytest.mark.slow
def test_alone_the_newest_ray_of_the_range_is_chosen() -> None:
    assert resolve("--extra", "ray", "pyproject.toml", python="3.12")["ray"].startswith("2.60.")
