"""A model on two GPUs: vLLM's ranks, and MPI's with NCCL around the fake TensorRT-LLM.

`pytest -s` prints what was measured, in lines that begin with `measured`. Open MPI is in OPAL_PREFIX, or beside Python.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from djl_trtllm.backends.vllm.names import installed_version
from tests.fakes.installation import fake_tensorrt_llm, worker_processes
from tests.gpu.kit import (
    START_SECONDS,
    check_that_it_says,
    check_the_end_of,
    figure,
    memory,
    taken,
    used_bytes,
    users_of_gpus,
)
from tests.support.server import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None or len(memory("used")) < 2, reason="needs two GPUs"),
]
needs_vllm = pytest.mark.skipif(installed_version() is None, reason="vLLM is not installed")
needs_mpi = pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed (extra test)")

STREAMS = 64


def vllm_server(model: Path, degree: str, scratch: Path) -> Server:
    return Server(model, {"OPTION_TENSOR_PARALLEL_DEGREE": degree}, scratch)


def mpi_server(directory: Path, model: Path, **script: Any) -> Server:
    """Ranks of mpi4py, which do an all-reduce by NCCL in each iteration of the fake."""
    served = directory / "model"
    served.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (served / name).symlink_to(model / name)
    (served / "serving.properties").write_text("option.backend=pytorch\noption.max_output_len=2048\n")
    root = os.environ.get("OPAL_PREFIX", sys.prefix)
    environ = fake_tensorrt_llm(directory, gpus=2, script={"all_reduce": "nccl", **script}) | {
        "FAKE_TENSORRT_LLM_MPI": "1",
        "OPAL_PREFIX": root,
        "MPI4PY_LIBMPI": f"{root}/lib/libmpi.so.40",
        "LD_LIBRARY_PATH": os.pathsep.join([f"{root}/lib", os.environ.get("LD_LIBRARY_PATH", "")]),
        "PATH": os.pathsep.join([f"{root}/bin", os.environ["PATH"]]),
        "OPTION_TENSOR_PARALLEL_DEGREE": "2",
    }
    return Server(served, environ, directory)


# -- a rank that is killed ---------------------------------------------------------------------------------------------


def second_of_vllm(server: Server) -> psutil.Process:
    """The server's process that holds memory of the second GPU."""
    below = {process.pid for process in server.descendants()}
    (rank,) = (pid for pid in users_of_gpus()[1] if pid in below)
    return psutil.Process(rank)


def second_of_mpi(server: Server) -> psutil.Process:
    return worker_processes(server.process.pid)[1]


@needs_vllm
def test_a_rank_of_vllm_that_is_killed_under_greedy_streams_is_a_pause(copier: Path, tmp_path: Path) -> None:
    before = used_bytes()
    with vllm_server(copier, "max", tmp_path) as server:
        began = time.monotonic()
        server.wait_for_ping(timeout=START_SECONDS)
        figure("vLLM's start", time.monotonic() - began)
        assert server.says("on 2 GPUs")
        check_the_end_of(second_of_vllm, server, STREAMS, before)
        assert server.says("rank 1 of vLLM")
        server.terminate()
        assert server.wait() == 0


@needs_mpi
def test_a_rank_of_mpi_that_is_killed_under_greedy_streams_is_a_pause(tmp_path: Path, tiny_stories: Path) -> None:
    before = used_bytes()
    with mpi_server(tmp_path, tiny_stories, gpu_bytes=4 << 30, steps_per_second=100) as server:
        server.wait_for_ping(timeout=START_SECONDS)
        check_the_end_of(second_of_mpi, server, STREAMS, before)
        assert server.says("a worker process of TensorRT-LLM is gone")
        server.terminate()
        assert server.wait() == 0


# -- a rank that cannot load -------------------------------------------------------------------------------------------


@needs_vllm
def test_a_rank_of_vllm_that_cannot_load_says_which_and_why(copier: Path, tmp_path: Path) -> None:
    with taken(1), vllm_server(copier, "2", tmp_path) as server:
        check_that_it_says(server, "rank 1 of vLLM", "its log says why", "Free memory on device cuda:1")


@needs_mpi
def test_a_rank_of_mpi_that_cannot_load_says_which_and_why(tmp_path: Path, tiny_stories: Path) -> None:
    with taken(1), mpi_server(tmp_path, tiny_stories, gpu_bytes=8 << 30) as server:
        check_that_it_says(server, "its log says why", "on rank 1", "out of memory")


# -- degrees -----------------------------------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.parametrize(("degree", "said"), [("3", "3 GPUs are needed, and 2 "), ("4", "4 GPUs are needed, and 2 ")])
def test_a_degree_that_is_not_possible_is_one_line_before_anything_loads(
    copier: Path, tmp_path: Path, degree: str, said: str
) -> None:
    with vllm_server(copier, degree, tmp_path) as server:
        assert server.wait() != 0
        assert len([line for line in server.log if said in line]) == 1
        assert not server.says("engine process")
