from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.engines.build import build_engine
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import BuildError, CompilerMissingError, EngineError
from djl_trtllm.model import inspect
from tests.engines.helpers import CPU_ONLY, configured, wait_until

Fake = Callable[..., list[str]]


@pytest.fixture
def plan(checkpoint: Path) -> EnginePlan:
    return plan_engine(configured(), inspect(checkpoint), CPU_ONLY)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_build_has_a_manifest_tells_its_phases_and_keeps_its_log(
    plan: EnginePlan, tmp_path: Path, fake_compiler: Fake
) -> None:
    told: list[str] = []
    engine = build_engine(plan, tmp_path / "engine", told.append, command=fake_compiler("succeed"))
    assert sorted(path.name for path in engine.path.iterdir()) == [
        "manifest.json",
        "openvino_model.bin",
        "openvino_model.xml",
    ]
    assert engine.manifest is not None
    assert engine.manifest.checkpoint == plan.checkpoint_identity
    assert engine.manifest.options == {"dtype": "fp16", "quantize": "none", "trust_remote_code": False}
    assert engine.manifest.verify(engine.path) == []
    assert [line.split(" (")[0] for line in told[:-1]] == [
        f"compiling: {phase}" for phase in ("load", "convert", "tokenizer", "save")
    ]
    assert all(re.fullmatch(r"compiling: \w+( \(\w+ took \d+\.\d s\))?", line) for line in told[:-1])
    before = ["", *(f" ({phase} took" for phase in ("load", "convert", "tokenizer", "save"))]
    assert all(phase in line for phase, line in zip(before, told, strict=True))
    assert told[-1].startswith(f"compiled {engine.path} in ")
    assert (tmp_path / "engine.log").exists()


def test_a_failure_shows_the_phase_and_the_last_lines_of_the_log(
    plan: EnginePlan, tmp_path: Path, fake_compiler: Fake
) -> None:
    with pytest.raises(BuildError) as caught:
        build_engine(plan, tmp_path / "engine", print, command=fake_compiler("fail"))
    message, log = str(caught.value), tmp_path / "engine.log"
    cause = "ValueError: this architecture is not supported"
    assert message.splitlines()[0] == f"the compiler ended with status 1 in phase convert: {cause}"
    assert message.rstrip().endswith(f"whole log: {log}")
    assert caught.value.tail[-3:] == ("line 59", "Loading: 100%", cause)
    assert len(caught.value.tail) == 20
    assert "line 0" in log.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["engine.log"]


def test_a_compiler_killed_by_the_system_says_so(plan: EnginePlan, tmp_path: Path, fake_compiler: Fake) -> None:
    with pytest.raises(BuildError, match=r"ended with signal SIGKILL \(out of memory\?\) in phase load") as caught:
        build_engine(plan, tmp_path / "engine", print, command=fake_compiler("killed"))
    assert caught.value.cause == "out of host memory"
    assert caught.value.advice is not None and caught.value.advice in str(caught.value)


def test_a_compiler_that_ends_well_without_a_whole_engine_is_a_failure(
    plan: EnginePlan, tmp_path: Path, fake_compiler: Fake
) -> None:
    with pytest.raises(
        BuildError, match=r"left no complete engine: .*\n.*openvino_model\.xml: not a complete OpenVINO model"
    ):
        build_engine(plan, tmp_path / "engine", print, command=fake_compiler("half"))
    assert not (tmp_path / "engine").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "djl-trtllm-test", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this process may not mount a disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_while_compiling_is_named_and_left_clean(
    plan: EnginePlan, small_disk: Path, fake_compiler: Fake
) -> None:
    with pytest.raises(BuildError) as caught:
        build_engine(plan, small_disk / "engine", print, command=fake_compiler("fill"))
    assert caught.value.cause == "no space on the disk"
    head = "the compiler ended with status 1 in phase load, no space on the disk: "
    assert str(caught.value).splitlines()[0].startswith(f"{head}0 bytes are free on the disk of {small_disk}")
    assert "option.engine_cache_dir" in str(caught.value)
    assert [path.name for path in small_disk.iterdir()] == ["engine.log"]


def test_a_disk_that_is_full_before_is_named(plan: EnginePlan, small_disk: Path, fake_compiler: Fake) -> None:
    with suppress(OSError), (small_disk / "other").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(EngineError, match=r"cannot write the engine .*No space left on device; free some space"):
        build_engine(plan, small_disk / "engine", print, command=fake_compiler("succeed"))
    assert not list(small_disk.glob(".engine*"))


def test_an_engine_that_a_full_disk_cut_off_is_reported_with_the_disk(
    plan: EnginePlan, tmp_path: Path, fake_compiler: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(BuildError, match=r"left no complete engine: ") as caught:
        build_engine(plan, tmp_path / "engine", print, command=fake_compiler("half"))
    assert caught.value.cause == "no space on the disk"
    assert "1.0 kB are free on the disk of" in str(caught.value)


def test_a_build_past_its_time_is_killed(plan: EnginePlan, tmp_path: Path, fake_compiler: Fake) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(BuildError, match="took longer than 1 s and was killed"):
        build_engine(plan, tmp_path / "engine", print, timeout=1, command=fake_compiler("hang", str(pids)))
    wait_until(lambda: not pids.exists() or not any(alive(int(pid)) for pid in pids.read_text().split()))


def test_an_interrupt_kills_the_compiler(plan: EnginePlan, tmp_path: Path, fake_compiler: Fake) -> None:
    pids = tmp_path / "pids"

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(plan, tmp_path / "engine", interrupt, command=fake_compiler("hang", str(pids)))
    wait_until(lambda: not pids.exists() or not any(alive(int(pid)) for pid in pids.read_text().split()))
    assert not list(tmp_path.glob(".engine*"))


_PARENT = """
import sys
from pathlib import Path
from djl_trtllm.config import load
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.engines.build import build_engine
from djl_trtllm.model import inspect
checkpoint, out, *command = sys.argv[1:]
build_engine(plan_engine(load(None, {}), inspect(Path(checkpoint))), Path(out), print, command=command)
"""


def test_the_compiler_dies_with_a_parent_that_is_killed(checkpoint: Path, tmp_path: Path, fake_compiler: Fake) -> None:
    pid_file = tmp_path / "pid"
    command = fake_compiler("orphan", str(pid_file))
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(checkpoint), str(tmp_path / "engine"), *command],
        env={**os.environ, "PYTHONPATH": root},
    )
    wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
    compiler = int(pid_file.read_text())
    assert alive(compiler)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not alive(compiler))
    assert not (tmp_path / "engine").exists()


def test_a_missing_compiler_says_what_to_install_and_the_other_way(
    plan: EnginePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package in ("torch", "nncf"):
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(CompilerMissingError) as caught:
        build_engine(plan, tmp_path / "engine", print)
    message = str(caught.value)
    assert "missing: torch, nncf" in message
    assert "pip install 'djl-trtllm[compile]'" in message
    assert f"djl-trtllm compile {plan.source} OUT" in message


def test_a_directory_in_the_way_is_not_overwritten(plan: EnginePlan, tmp_path: Path, fake_compiler: Fake) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "letters.txt").write_text("dear")
    with pytest.raises(EngineError, match="cannot write the engine"):
        build_engine(plan, tmp_path / "engine", print, command=fake_compiler("succeed"))
    assert (tmp_path / "engine" / "letters.txt").read_text() == "dear"
