"""docker/trt_llm_partition.py as a program, with the arguments of DJL Serving's script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.test_dockerfiles import DOCKERFILES, ROOT, final_stage

SCRIPT = ROOT / "docker" / "trt_llm_partition.py"


def run(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=600,
    )


def properties(directory: Path, text: str) -> Path:
    directory.mkdir()
    (directory / "serving.properties").write_text(text)
    return directory


def test_the_images_have_it_where_existing_commands_call_it() -> None:
    copy = "docker/trt_llm_partition.py /opt/djl/partition/trt_llm_partition.py"
    for dockerfile in DOCKERFILES:
        assert copy in [instruction.text for instruction in final_stage(dockerfile) if instruction.name == "COPY"]


def test_its_arguments_override_the_file(tmp_path: Path) -> None:
    file = properties(tmp_path / "in", "option.model_id=/no/such/model\noption.tensor_parallel_degree=x\n")
    arguments = ["--properties_dir", str(file), "--trt_llm_model_repo", str(tmp_path / "out")]
    done = run(*arguments)
    assert done.returncode == 1 and "option.tensor_parallel_degree=x" in done.stderr
    degrees = ["--tensor_parallel_degree", "1", "--pipeline_parallel_degree", "1"]
    done = run(*arguments, *degrees)
    assert done.returncode == 1 and "/no/such/model" in done.stderr
    done = run(*arguments, *degrees, "--model_path", "/nor/this/one")
    assert done.returncode == 1 and "option.model_id=/nor/this/one (command line)" in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_it_needs() -> None:
    done = run("--properties_dir", "somewhere")
    assert done.returncode == 2 and "--trt_llm_model_repo" in done.stderr


@pytest.mark.slow
def test_it_compiles_an_engine_that_is_served(tmp_path: Path, tiny_stories: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for path in tiny_stories.iterdir():
        if path.is_file() and path.name != "serving.properties":
            (checkpoint / path.name).symlink_to(path)
    file = properties(tmp_path / "in", f"engine=MPI\noption.model_id={checkpoint}\noption.max_rolling_batch_size=4\n")
    out = tmp_path / "out"
    degrees = ["--tensor_parallel_degree", "1", "--pipeline_parallel_degree", "1"]
    cache = str(tmp_path / "cache")
    done = run("--properties_dir", file, "--trt_llm_model_repo", out, *degrees, OPTION_ENGINE_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr
    assert (out / "openvino_model.xml").is_file() and f"compiled {out}" in done.stdout
    assert "option.max_rolling_batch_size=4" in (out / "serving.properties").read_text()
    assert "option.model_id" not in (out / "serving.properties").read_text()
