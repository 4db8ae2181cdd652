"""Shared by all tests."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

from djl_trtllm.model import Tokenizer, load_tokenizer
from tests.support import processes
from tests.support.processes import pytest_sessionfinish, pytest_testnodedown, survivors  # noqa: F401 (pytest calls them)
from tests.support.virtual_time import run

if TYPE_CHECKING:
    from tests.support.in_process import Hosts

# Some tests compile for OpenVINO in this process, which would fork for reports to Google Analytics, and keep the pipes.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]

TESTS = Path(__file__).parent
TINY_STORIES = TESTS.parent / "serving" / "models" / "tiny-stories"

# No test depends on the speed of the machine. HYPOTHESIS_PROFILE=thorough looks for rarer examples.
settings.register_profile("quick", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


QUICK_SECONDS, _MUCH_MORE = 3, 4
"""What a test without the mark `slow` takes at most, and how much longer it may take on a machine that is busy."""
LONG = ("faults", "project", "integration", "trtllm", "finder", "docker", "backends", "engines", "executor")
"""Directories of tests that start processes. First those with few files: a file has one process. The others with slow
tests follow, so that the last files are short, and the processes of the run end together."""


def pytest_configure() -> None:
    """Where SIGINT is ignored (nohup, a shell's background jobs), programs that tests start would ignore it too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: looking for garbage among them was a third of the time of collecting them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _directory(item: pytest.Item) -> str:
    """The directory of `tests` that a test is in."""
    return item.path.relative_to(TESTS).parts[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long is begun first, so that several processes end at the same time.

    Within that the order stays, but tests of one directory follow each other: they share servers, which end with it.
    """
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if item.get_closest_marker("compile") is not None:
                item.add_marker(pytest.mark.skip(reason="needs torch: scripts/test --all has it"))
    slow = {_directory(item) for item in items if item.get_closest_marker("slow") is not None}
    places = dict.fromkeys(slow, len(LONG)) | {name: place for place, name in enumerate(LONG)}
    folders: dict[Path, int] = {}
    for item in items:
        folders.setdefault(item.path.parent, len(folders))
    items.sort(key=lambda item: (places.get(_directory(item), len(LONG) + 1), folders[item.path.parent]))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function as a test in virtual time."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test that takes long without the mark `slow` fails. What counts is processor time, also of ended processes."""
    began = sum(os.times()[:4])
    result = yield
    seconds = sum(os.times()[:4]) - began
    # Where each line is traced (coverage, a debugger), all takes longer.
    if item.get_closest_marker("slow") is None and sys.gettrace() is None:
        assert seconds < _MUCH_MORE * QUICK_SECONDS, f"it took {seconds:.1f} s of processor time: mark it as slow"
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """The last test of a directory fails where one of its tests, or a fixture, has left a process running.

    Other tests look at what runs below this process: TensorRT-LLM's ranks, for one, are known by their command line.
    """
    result = yield
    if nextitem is None or _directory(nextitem) != _directory(item):
        left = survivors(psutil.Process().children(recursive=True))
        commands = [process.cmdline() for process in left]
        for process in left:
            process.kill()
        assert not left, f"tests/{_directory(item)} has left processes: {commands}"
    return result


@pytest.fixture(scope="session")
def tiny_stories() -> Path:
    """The bundled model's directory."""
    return TINY_STORIES


@pytest.fixture(scope="session")
def tokenizer(tiny_stories: Path) -> Tokenizer:
    """The bundled model's tokenizer."""
    return load_tokenizer(tiny_stories)


@pytest.fixture(scope="session")
def whole_signal_stack() -> processes.SignalStack:
    """The main thread's signal stack before any test."""
    return processes.current()


@pytest.fixture(autouse=True)
def own_signal_stack(whole_signal_stack: processes.SignalStack) -> None:
    """No test inherits a broken signal stack.

    On processors with AMX, OpenVINO's CPU plugin gives the thread that loads it an alternate signal stack of the
    smallest size, and frees it while it is still in use where two plugins lived. Python's handlers run on that stack:
    the next SIGINT, in whichever test, would end the process with SIGSEGV. The engine process has no such handler.
    """
    processes.put(whole_signal_stack)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Played engine processes in the place of real ones."""
    # Most tests do not need what it imports.
    from tests.support.in_process import Hosts

    with Hosts().installed() as hosts:
        yield hosts
