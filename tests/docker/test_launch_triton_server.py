"""The script that Triton's workflow starts, with a program in the place of djl-trtllm that says how it was called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docker.test_dockerfiles import DOCKERFILES, ROOT, final_stage
from tests.support.tables import by_table

SCRIPT = Path(__file__).parents[2] / "scripts" / "launch_triton_server.py"
PROGRAM = f"""#!{sys.executable}
import json, os, sys
kept = {{name: value for name, value in os.environ.items() if name.startswith(("SERVING_", "OPTION_"))}}
print(json.dumps([sys.argv[1:], kept]))
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "repo" / "tensorrt_llm" / "1").mkdir(parents=True)
    return tmp_path / "repo"


def launch(
    repository: Path, *arguments: str, world_size: str = "1", **environ: str
) -> subprocess.CompletedProcess[str]:
    folder = repository.parent / "bin"
    folder.mkdir(exist_ok=True)
    program = folder / "djl-trtllm"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return subprocess.run(
        [sys.executable, str(SCRIPT), f"--world_size={world_size}", f"--model_repo={repository}", *arguments],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **environ},
        capture_output=True,
        text=True,
        check=False,
        cwd=repository.parent,
    )


def called(*given: Any, **more: Any) -> tuple[list[str], dict[str, str]]:
    done = launch(*given, **more)
    assert done.returncode == 0, done.stderr
    arguments, environment = json.loads(done.stdout)
    return arguments, environment


def write_config(repository: Path, config: object) -> None:
    (repository / "tensorrt_llm" / "1" / "config.json").write_text(json.dumps(config))


def test_it_serves_the_repository_with_the_ports_as_options_whatever_the_other_arguments_are(repository: Path) -> None:
    others = ("--force", "-f", "--multi-model", "--no-mpi", "--oversubscribe", "--disable-spawn-processes")
    named = ("--tritonserver", "/opt/tritonserver", "--tensorrt_llm_model_name=x", "--exit-timeout-secs=3")
    assert called(repository, *others, *named) == (
        ["serve", str(repository)],
        {"SERVING_INFERENCE_PORT": "8000"},
    )
    ports = ("--http_port=7000", "--grpc_port", "7001", "--metrics_port=0")
    assert called(repository, *ports)[1] == {
        "SERVING_TRITON_HTTP_PORT": "7000",
        "SERVING_TRITON_GRPC_PORT": "7001",
        "SERVING_TRITON_METRICS_PORT": "0",
        "SERVING_INFERENCE_PORT": "7000",
    }


@by_table("arguments", "environ", "port", apart=True)
def test_the_servers_own_port_is_one_of_tritons_unless_it_is_set(
    repository: Path, arguments: tuple[str, ...], environ: dict[str, str], port: str | None
) -> None:
    assert called(repository, *arguments, **environ)[1].get("SERVING_INFERENCE_PORT") == port


@by_table("config", apart=True)
def test_the_world_size_is_that_of_the_engine(repository: Path, config: object) -> None:
    write_config(repository, config)
    assert "OPTION_TENSOR_PARALLEL_DEGREE" not in called(repository, world_size="2")[1]
    wrong = launch(repository)
    assert (wrong.returncode, "was compiled for 2" in wrong.stderr) == (2, True)


def test_without_an_engine_that_says_it_the_world_size_is_the_tensor_parallel_degree(repository: Path) -> None:
    write_config(repository, {"model_type": "llama"})
    assert called(repository, world_size="2")[1]["OPTION_TENSOR_PARALLEL_DEGREE"] == "2"
    assert (
        called(repository, world_size="2", OPTION_TENSOR_PARALLEL_DEGREE="1")[1]["OPTION_TENSOR_PARALLEL_DEGREE"] == "1"
    )


def test_the_log_goes_to_a_file(repository: Path) -> None:
    done = launch(repository, "--log", "--log-file=here.txt")
    assert (done.returncode, done.stdout) == (0, "")
    assert json.loads((repository.parent / "here.txt").read_text())[0][0] == "serve"


@by_table("arguments", "message", apart=True)
def test_what_is_wrong_is_named(repository: Path, arguments: tuple[str, ...], message: str) -> None:
    done = launch(repository, *arguments)
    assert (done.returncode, message in done.stderr) == (2, True)


def test_without_the_program_scripts_serve_makes_an_environment(repository: Path) -> None:
    """The script beside it, which has this name in the repository."""
    copy = repository.parent / "scripts" / SCRIPT.name
    copy.parent.mkdir()
    copy.write_text(SCRIPT.read_text())
    serve = copy.with_name("serve")
    serve.write_text(PROGRAM)
    serve.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(copy), f"--model_repo={repository}"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)[0] == [str(repository)]


# -- docker/trt_llm_partition.py as a program, with the arguments of DJL Serving's script ------------------------------

PARTITION = ROOT / "docker" / "trt_llm_partition.py"


def run(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PARTITION, *arguments],
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
    done = run(*arguments, *degrees, "--model_path", "/nor/this/one")
    assert done.returncode == 1 and "option.model_id=/nor/this/one (command line)" in done.stderr
    assert not (tmp_path / "out").exists()
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
