"""What MPI is given, and loads that wait for a rank; MPI and its processes are played."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from djl_trtllm.backends.tensorrt_llm import mpi
from djl_trtllm.backends.tensorrt_llm.mpi import (
    SpawnError,
    ending_with_ranks,
    load_with_ranks,
    prepare_mpi,
    watched_ranks,
)
from djl_trtllm.executor.kernels import keep_kernels
from djl_trtllm.executor.ranks import RankError

RANK = ("python", "-m", "mpi4py.futures.server")


class Process:
    """A process below this one."""

    def __init__(self, *command: str) -> None:
        self.pid = 7
        self.command = command

    def name(self) -> str:
        return self.command[0]

    def cmdline(self) -> tuple[str, ...]:
        return self.command

    def is_running(self) -> bool:
        return True

    def status(self) -> str:
        return str(psutil.STATUS_SLEEPING)


class Pool:
    """mpi4py's, whose tasks end when they are made to. A shutdown waits for ever."""

    def __init__(self) -> None:
        self.tasks: list[Future[Any]] = []
        self.given: list[tuple[Any, ...]] = []
        self.joined_by: threading.Thread | None = None

    def submit(self, task: Callable[..., Any], *args: Any) -> Future[Any]:
        self.given.append((task, *args))
        self.tasks.append(Future())
        return self.tasks[-1]

    def shutdown(self) -> None:
        self.joined_by = threading.current_thread()
        threading.Event().wait()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    module: Any = ModuleType("mpi4py.futures")
    module.MPIPoolExecutor = Pool
    monkeypatch.setitem(sys.modules, "mpi4py.futures", module)
    monkeypatch.setattr(mpi, "_JOIN_SECONDS", 0.1)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    return Pool()


@pytest.fixture
def below(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes below this one."""
    processes: list[Process] = []
    this = SimpleNamespace(children=lambda *, recursive: list(processes))
    monkeypatch.setattr(mpi, "psutil", SimpleNamespace(Process=lambda: this, Error=psutil.Error))
    monkeypatch.setattr(mpi, "_POLL_SECONDS", 0.01)
    return processes


def die(module: str) -> None:
    """A thread ends with an error that this module raises."""
    code = compile("def end():\n    raise ValueError('no ranks')", "end.py", "exec")
    names: dict[str, Any] = {"__name__": module}
    exec(code, names)
    thread = threading.Thread(target=names["end"])
    thread.start()
    thread.join()


# -- what MPI needs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("in_memory", [False, True])
def test_open_mpi_gets_what_it_needs_and_what_the_user_set_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: bool, in_memory: bool
) -> None:
    environment = {"OMPI_MCA_rmaps_base_oversubscribe": "0"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "of-the-engine"))
    memory = tmp_path / "memory"
    monkeypatch.setattr(mpi, "folder_in_memory", lambda folder: memory / folder.name)
    if in_memory:
        (memory / "of-the-engine").mkdir(parents=True)
    prepare_mpi()
    assert environment["OMPI_MCA_rmaps_base_oversubscribe"] == "0"
    assert (environment.get("OMPI_ALLOW_RUN_AS_ROOT") == "1") == root
    assert (environment.get("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM") == "1") == root
    segments = str((memory if in_memory else tmp_path) / "of-the-engine")
    assert environment["OMPI_MCA_btl_sm_backing_directory"] == segments
    assert environment["OMPI_MCA_btl_vader_backing_directory"] == segments


def test_a_task_comes_with_the_folder_of_its_ranks_kernels(
    pool: Pool, below: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    keep_kernels(tmp_path)
    with watched_ranks():
        pool.submit(str.upper, "a wolf")
    ((_, folder, pickled),) = pool.given
    assert folder == str(tmp_path) and b"a wolf" in pickled


# -- ranks that end, or do not come ------------------------------------------------------------------------------------


def test_a_task_whose_rank_ends_gets_the_error(
    pool: Pool, below: list[Process], capsys: pytest.CaptureFixture[str]
) -> None:
    below.append(Process(*RANK))
    submit, hook = Pool.submit, threading.excepthook
    with pytest.raises(RankError, match=r"ended before its time \(process 7\)"), watched_ranks():
        task = pool.submit(print)
        threading.Timer(0.2, below.clear).start()
        assert isinstance(task.exception(timeout=60), RankError)
        raise RuntimeError("Executor worker died during initialization")
    assert "ended before its time" in capsys.readouterr().out
    assert (Pool.submit, threading.excepthook) == (submit, hook)


@pytest.mark.parametrize("command", [("orted",), ("nvcc", "-m64", "-I/opt/tensorrt_llm/include")])
def test_other_processes_may_end(pool: Pool, below: list[Process], command: tuple[str, ...]) -> None:
    below.append(Process(*command))
    with watched_ranks():
        task = pool.submit(print)
        threading.Timer(0.1, below.clear).start()
        threading.Timer(0.3, task.set_result, ("loaded",)).start()
        assert task.result(timeout=60) == "loaded"


@pytest.mark.parametrize(("module", "notices"), [("mpi4py.futures._core", True), ("tensorrt_llm.llmapi", False)])
def test_a_spawn_that_fails_is_the_error_of_the_tasks(
    pool: Pool, below: list[Process], module: str, notices: bool
) -> None:
    if notices:
        with pytest.raises(SpawnError, match="ValueError: no ranks"), watched_ranks():
            task = pool.submit(print)
            die(module)
            task.result(timeout=60)
    else:
        with watched_ranks():
            task = pool.submit(print)
            die(module)
            assert not task.done()


@pytest.mark.parametrize(
    ("commands", "fails"),
    [([("prte",)], True), ([("prte",), ("sh",)], True), ([("prte",), RANK], False), ([("sh",)], False)],
)
def test_ranks_that_do_not_come_are_waited_for_a_while(
    pool: Pool, below: list[Process], monkeypatch: pytest.MonkeyPatch, commands: list[tuple[str, ...]], fails: bool
) -> None:
    monkeypatch.setattr(mpi, "_SPAWN_SECONDS", 0.1)
    below += [Process(*command) for command in commands]

    def load() -> bool:
        with watched_ranks():
            task = pool.submit(print)
            threading.Timer(0.5, lambda: None if task.done() else task.set_result(True)).start()
            return bool(task.result(timeout=60))

    if fails:
        with pytest.raises(SpawnError):
            load()
    else:
        assert load()


def test_a_load_that_waits_for_something_else_ends_its_process(
    below: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(mpi, "_UNWINDING_SECONDS", 0.1)
    below.append(Process(*RANK))
    with watched_ranks():
        threading.Timer(0.1, below.clear).start()
        assert ended.wait(60)
    assert statuses == [3]


def test_a_compile_ends_its_process_with_its_ranks(
    pool: Pool, below: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended, ending_with_ranks():
        pool.submit(print)
        die("mpi4py.futures._core")
        pool.tasks[0].result(timeout=60)
    assert ended.value.code == 3


def test_a_pool_is_not_joined_for_ever(pool: Pool, below: list[Process]) -> None:
    with pytest.raises(RuntimeError, match="died during initialization"), watched_ranks():
        try:
            raise RuntimeError("Executor worker died during initialization")
        finally:
            pool.shutdown()
    assert pool.joined_by is not None and pool.joined_by.daemon, "the process can end"


# -- ranks of a launcher -----------------------------------------------------------------------------------------------


class Session:
    """TensorRT-LLM's to a launcher's ranks, of which this process is the only one."""

    def submit(self, task: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return task(*args, **options)


def worker_main(number: int, *, worker_cls: Callable[[int], Any]) -> Any:
    """As TensorRT-LLM's: an error is logged, and that is all."""
    try:
        return worker_cls(number)
    except ArithmeticError:
        return None


@pytest.fixture
def launched(below: list[Process], pool: Pool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of a launcher's ranks that are gone; TensorRT-LLM's tasks go to its ranks."""
    gone: list[int] = []
    module: Any = ModuleType("tensorrt_llm.llmapi.mpi_session")
    module.RemoteMpiCommSessionClient = Session
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(mpi, "launched_ranks", lambda: [Process(*RANK)])
    monkeypatch.setattr(mpi, "dead", lambda ranks: gone)
    return gone


@pytest.mark.parametrize(("number", "made", "ends"), [(2, 0.5, False), (0, None, True)])
def test_a_rank_that_cannot_make_its_worker_ends_all_ranks(
    launched: list[int], monkeypatch: pytest.MonkeyPatch, number: int, made: float | None, ends: bool
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(mpi, "_WORDS_SECONDS", 0.01)
    monkeypatch.setattr(mpi, "_end_all_ranks", ended.set)
    submit = Session.submit
    with watched_ranks():
        assert Session().submit(worker_main, number, worker_cls=lambda number: 1 / number) == made
        assert Session().submit(len, "other tasks") == 11
    assert ended.wait(60 if ends else 0.1) is ends
    assert Session.submit is submit


def test_the_end_of_a_launchers_rank_ends_the_load(pool: Pool, launched: list[int]) -> None:
    with pytest.raises(RankError, match=r"\(process 9\): the output of its launcher says why"), watched_ranks():
        task = pool.submit(print)
        launched.append(9)
        task.result(timeout=60)


# -- the second try ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "given", "loads"), [(1, None, 2), (2, None, 1), (1, "0", 1)], ids=["one", "several", "the-user-says"]
)
def test_one_gpu_is_loaded_in_the_engine_process_where_mpi_starts_no_rank(
    pool: Pool, below: list[Process], monkeypatch: pytest.MonkeyPatch, ranks: int, given: str | None, loads: int
) -> None:
    environment = {} if given is None else {"TLLM_WORKER_USE_SINGLE_PROCESS": given}
    monkeypatch.setattr(os, "environ", environment)
    seen: list[str | None] = []

    def load() -> str:
        seen.append(environment.get("TLLM_WORKER_USE_SINGLE_PROCESS"))
        if seen[-1] != "1":
            task = pool.submit(print)
            die("mpi4py.futures._core")
            task.result(timeout=60)
        return "loaded"

    if loads == 2:
        assert load_with_ranks(load, ranks) == "loaded"
    else:
        with pytest.raises(SpawnError):
            load_with_ranks(load, ranks)
    assert seen == [given, "1"][:loads]
