"""Folders of compiled kernels: those that all processes share, and FlashInfer's, which each has for itself."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FLASHINFER = "FLASHINFER_WORKSPACE_BASE"
FOLDERS = {
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TRTLLM_DG_CACHE_DIR": "tensorrt_llm",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "CUDA_CACHE_PATH": "cuda",
}
"""They stay the same from one version to the next: compiling again takes minutes."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    own: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", own)
    return own


def process() -> Any:
    """The module as a new process has it: it ends when nothing refers to it any more."""
    spec = importlib.util.find_spec("djl_trtllm.executor.kernels")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_compilers_keep_their_kernels_but_where_the_environment_says_otherwise(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    given = {"TRITON_CACHE_DIR": "elsewhere", FLASHINFER: "the user's"}
    environment.update(given)
    kept = tmp_path / "cache" / "kernels"
    for _ in range(2):  # the folder may be there
        process().keep_kernels(kept)
    assert {**{name: str(kept / folder) for name, folder in FOLDERS.items()}, **given}.items() <= environment.items()


def test_kernels_are_not_kept_where_there_can_be_no_folder(
    tmp_path: Path, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    environment.clear()
    process().keep_kernels(tmp_path / "file" / "kernels")
    assert environment == {} and "not kept" in capsys.readouterr().out
    process().take_own_folder(str(tmp_path / "file"), 1, 2)
    assert environment == {} and "rank 1 shares" in capsys.readouterr().out


def test_an_engine_process_or_rank_takes_the_next_free_folder_and_keeps_it_until_it_ends(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    running: list[Any] = []

    def taken(rank: int | None) -> str:
        running.append(process())
        environment.clear()
        for _ in range(2):
            if rank is None:
                running[-1].keep_kernels(tmp_path)
            else:
                running[-1].take_own_folder(str(tmp_path), rank, 2)
        return str(Path(environment[FLASHINFER]).relative_to(tmp_path))

    assert [taken(rank) for rank in (None, 1, 0, None, 0)] == ["rank-0", "rank-1", "rank-2", "rank-3", "rank-4"]
    del running[2]
    gc.collect()
    assert taken(0) == "rank-2"


def test_where_files_have_no_locks_each_rank_has_the_folder_of_its_number(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    for rank in (1, 0):
        process().take_own_folder(str(tmp_path), rank, 2)
        assert environment[FLASHINFER] == str(tmp_path / f"rank-{rank}")


def double(number: int, *, plus: int) -> int:
    return 2 * number + plus


@pytest.mark.parametrize(("ranks", "own"), [(2, "rank-1"), (1, "rank-0")])
def test_one_of_several_ranks_takes_its_own_folder_before_its_task_is_unpickled(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, ranks: int, own: str
) -> None:
    parent = process()
    parent.keep_kernels(tmp_path)
    task, args, options = parent.with_own_kernels(double, 3, plus=1)
    assert not any(double in each for each in (args, options.values()))
    world = SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: ranks)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=world)))
    assert getattr(process(), task.__name__)(*args, **options) == 7
    assert environment[FLASHINFER] == str(tmp_path / own)


@pytest.mark.parametrize("given", [None, "the user's"])
def test_a_task_stays_as_it_is_where_kernels_are_not_kept_or_flashinfers_are_elsewhere(
    tmp_path: Path, environment: dict[str, str], given: str | None
) -> None:
    parent = process()
    if given is not None:
        environment[FLASHINFER] = given
        parent.keep_kernels(tmp_path)
    assert parent.with_own_kernels(double, 3, plus=1) == (double, (3,), {"plus": 1})
