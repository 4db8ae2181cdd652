from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.config import Config
from djl_trtllm.engines import build, fleet_cache
from djl_trtllm.engines.build import build_engine, prepare_engine
from djl_trtllm.engines.cache import Manifest
from djl_trtllm.engines.compiler import Compiler
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import BuildError, CompilerMissingError, EngineError, EngineMismatchError, TokenizerError
from djl_trtllm.model import Layout, inspect
from djl_trtllm.model.work_directory import TEMPORARY_PREFIX
from tests.engines.helpers import CPU_ONLY, alive, built, configured, write_engine_files
from tests.support.processes import wait_until
from tests.support.s3 import Store

Fake = Callable[..., list[str]]


@pytest.fixture
def plan(checkpoint: Path) -> EnginePlan:
    return plan_engine(configured(), inspect(checkpoint), CPU_ONLY)


def test_a_build_has_a_manifest_tells_its_phases_and_keeps_its_log(
    plan: EnginePlan, tmp_path: Path, fake_compiler: Fake
) -> None:
    told: list[str] = []
    engine = tmp_path / "engine"
    build_engine(plan, engine, told.append, command=fake_compiler("succeed"))
    assert sorted(path.name for path in engine.iterdir()) == [
        "manifest.json",
        "openvino_model.bin",
        "openvino_model.xml",
    ]
    manifest = Manifest.read(engine)
    assert manifest is not None
    assert manifest.checkpoint == plan.checkpoint_identity
    assert manifest.options == {"dtype": "fp16", "quantize": "none", "trust_remote_code": False}
    assert (manifest.backend, manifest.versions, manifest.platform) == ("openvino", plan.versions, plan.platform)
    assert manifest.limits == plan.built_limits != {}
    assert manifest.verify(engine) == []
    assert [line.split(" (")[0] for line in told[:-1]] == [
        f"compiling: {phase}" for phase in ("load", "convert", "tokenizer", "save")
    ]
    assert all(re.fullmatch(r"compiling: \w+( \(\w+ took \d+\.\d s\))?", line) for line in told[:-1])
    before = ["", *(f" ({phase} took" for phase in ("load", "convert", "tokenizer", "save"))]
    assert all(phase in line for phase, line in zip(before, told, strict=True))
    assert told[-1].startswith(f"compiled {engine} in ")
    assert (tmp_path / "engine.log").exists()


def test_where_nothing_is_compiled_it_is_said_what_to_do(checkpoint: Path, tmp_path: Path) -> None:
    plan = plan_engine(configured(backend="scripted"), inspect(checkpoint), CPU_ONLY)
    with pytest.raises(EngineError, match=rf"backend scripted \(.*\) runs {checkpoint} as it is: .* serve it"):
        build_engine(plan, tmp_path / "engine", print)
    for ask in (plan.compile_spec, plan.check_whole):
        with pytest.raises(ValueError, match="backend scripted"):
            ask(tmp_path)


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
    with pytest.raises(BuildError, match=r"ended with signal SIGKILL \(out of memory\?\) in phase load") as caught:
        build_engine(plan, tmp_path / "engine", print, command=fake_compiler("killed"))
    assert caught.value.cause == "out of host memory"
    assert caught.value.advice is not None and caught.value.advice in str(caught.value)


ENVIRONMENT = r"""import json, os, sys
sys.stdout.buffer.write(b"goes on\ncaf\xe9\ngoes on\n")
print(json.dumps(dict(os.environ)), flush=True)
os.kill(os.getpid(), 15)"""


@pytest.mark.parametrize("own_code", [False, True])
def test_a_compiler_has_an_environment_of_its_own_and_a_log_of_any_bytes_with_lines_that_begin_phases(
    plan: EnginePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_code: bool
) -> None:
    assert plan.compiler is not None
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    lines = dict.fromkeys(("convert", "save"), re.compile("goes on"))
    compiler = replace(plan.compiler, phase_lines=lines, environment={"A": "wolf"})
    monkeypatch.setattr(type(plan), "compiler", compiler)
    told: list[str] = []
    with pytest.raises(BuildError, match="ended with signal SIGTERM in phase save"):
        command = [sys.executable, "-c", ENVIRONMENT]
        build_engine(replace(plan, trust_remote_code=own_code), tmp_path / "engine", told.append, command=command)
    assert [line.split()[1] for line in told] == ["convert", "save"]
    found = json.loads((tmp_path / "engine.log").read_text(errors="replace").splitlines()[-1])
    own = {"A": "wolf", "TOKENIZERS_PARALLELISM": "false", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    assert own.items() <= found.items() and found.get("HF_HUB_OFFLINE") == (None if own_code else "1")
    assert Path(found["TMPDIR"]).name.startswith(TEMPORARY_PREFIX) and not Path(found["TMPDIR"]).exists()


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
    with suppress(OSError), (small_disk / "other").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(EngineError, match=r"cannot write the engine .*No space left on device; free some space"):
        build_engine(plan, small_disk / "engine", print, command=fake_compiler("succeed"))
    assert not list(small_disk.glob(".engine*"))


def test_a_compiler_that_ends_well_without_a_whole_engine_is_a_failure(
    plan: EnginePlan, tmp_path: Path, fake_compiler: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = r"left no complete engine: .*\n.*openvino_model\.xml: not a complete OpenVINO model"
    with pytest.raises(BuildError, match=says) as caught:
        build_engine(plan, tmp_path / "engine", print, command=fake_compiler("half"))
    assert caught.value.cause is None and not (tmp_path / "engine").exists()
    for free, cause in ((4 << 20, None), ((4 << 20) - 1, "no space on the disk")):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        with pytest.raises(BuildError, match=says) as caught:
            build_engine(plan, tmp_path / "engine", print, command=fake_compiler("half"))
        assert caught.value.cause == cause
    assert "4.2 MB are free on the disk of" in str(caught.value)


def test_a_directory_in_the_way_is_not_overwritten(plan: EnginePlan, tmp_path: Path, fake_compiler: Fake) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "letters.txt").write_text("dear")
    with pytest.raises(EngineError, match="cannot write the engine"):
        build_engine(plan, tmp_path / "engine", print, command=fake_compiler("succeed"))
    assert (tmp_path / "engine" / "letters.txt").read_text() == "dear"


def test_a_build_past_its_time_or_interrupted_is_killed(
    plan: EnginePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_compiler: Fake
) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    pids = tmp_path / "pids"
    command = fake_compiler("hang", str(pids))
    told: list[str] = []
    with monkeypatch.context() as patch, pytest.raises(BuildError, match="took longer than 1 s and was killed"):
        patch.setattr(build, "TIMEOUT_SECONDS", 1)
        patch.setattr(build, "_REPORT_EVERY_SECONDS", 0.1)
        build_engine(plan, tmp_path / "engine", told.append, command=command)
    assert any(re.fullmatch(r"compiling: still in load \([01] s\)", line) for line in told)
    wait_until(lambda: not pids.exists() or not any(alive(int(pid)) for pid in pids.read_text().split()))
    pids.unlink(missing_ok=True)
    with pytest.raises(KeyboardInterrupt):
        build_engine(plan, tmp_path / "engine", interrupt, command=command)
    wait_until(lambda: not pids.exists() or not any(alive(int(pid)) for pid in pids.read_text().split()))
    assert not list(tmp_path.glob("*engine*"))


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


# -- What is served: as it is, bundled, cached. Nothing here compiles for real.


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(compiler: Compiler, checkpoint: Path) -> None:
        raise CompilerMissingError(f"{checkpoint} must be compiled")

    monkeypatch.setattr(Compiler, "require", refuse)


def bundle(model: Path, *, quantize: str = "none", manifest: bool = True) -> Path:
    path = write_engine_files(model / "engine")
    shutil.copy(model / "config.json", path)
    if manifest:
        plan = plan_engine(configured(), inspect(model), CPU_ONLY)
        options = plan.build_options | {"quantize": quantize}
        Manifest.of(
            path,
            backend="openvino",
            checkpoint=plan.checkpoint_identity,
            options=options,
            versions=plan.versions,
            platform=plan.platform,
        ).write(path)
    return path


def prepared(path: Path, told: list[str] | None = None, **options: object) -> Path:
    config = configured(engine_cache_dir=path.parent / "cache", **options)
    layout = inspect(path)
    plan = plan_engine(config, layout, CPU_ONLY)
    return prepare_engine(config, layout, (told if told is not None else []).append, plan=plan)


def test_an_engine_directory_is_served_as_it_is(model: Path) -> None:
    assert prepared(model, backend="scripted") == model  # which loads no engine
    path = bundle(model, manifest=False)
    assert prepared(path, quantize="int8") == path
    bundle(model, quantize="int8")
    assert prepared(path) == path
    (path / "openvino_model.bin").write_bytes(bytes(10))
    with pytest.raises(EngineMismatchError, match=r"openvino_model\.bin: truncated, 10 of 1000 bytes"):
        prepared(path)


def test_options_the_engine_was_not_compiled_with_fail_before_loading_with_what_differs(model: Path) -> None:
    path = bundle(model, quantize="int8")
    with pytest.raises(EngineMismatchError, match=str(path)) as caught:
        prepared(path, quantize="none", dtype="fp32")
    assert str(caught.value).splitlines()[1:-1] == [
        "  - option.dtype: engine has fp16, asked for fp32",
        "  - option.quantize: engine has int8, asked for none",
    ]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("change", ["options", "checkpoint", "damage"])
def test_a_bundled_engine_that_does_not_fit_is_reported_and_not_used(model: Path, change: str) -> None:
    path = bundle(model)
    options: dict[str, object] = {}
    if change == "options":
        options, reason = {"quantize": "int8"}, "option.quantize: engine has none, asked for int8"
    elif change == "checkpoint":
        (model / "generation_config.json").write_text("{}")
        reason = "checkpoint: engine was made from sha256:"
    else:
        (path / "openvino_model.bin").write_bytes(b"")
        reason = "openvino_model.bin: truncated, 0 of 1000 bytes"
    told: list[str] = []
    with pytest.raises(CompilerMissingError) as caught:
        prepared(model, told, **options)
    assert told[0].startswith(f"not using the bundled engine {path}: ")
    assert reason in told[0]
    assert reason in str(caught.value) and "must be compiled" in str(caught.value)


@pytest.mark.usefixtures("no_compiler")
def test_a_bundled_engine_without_a_manifest_is_used_unless_options_were_asked_for(model: Path) -> None:
    with pytest.raises(CompilerMissingError, match=rf"^{model} must be compiled$"):
        prepared(model)
    path = bundle(model, manifest=False)
    told: list[str] = []
    assert prepared(model, told) == path
    assert told == [f"the bundled engine {path} has no manifest and is used unchecked"]
    with pytest.raises(CompilerMissingError, match=r"with option\.dtype=fp16, option\.quantize=int8\n"):
        prepared(model, quantize="int8", dtype="fp16")
    bundle(model)
    assert prepared(model) == prepared(model, quantize="none") == path


# -- through the cache ---------------------------------------------------------------------------------------------


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A compiler that is quick."""
    compiling = Mock(side_effect=lambda plan, out, progress: built(plan, out))
    monkeypatch.setattr(build, "build_engine", compiling)
    return compiling


def machine(model: Path, cache: Path, **options: object) -> tuple[Config, Layout, EnginePlan]:
    """What `prepare_engine` takes on a machine with this cache."""
    config, layout = configured(engine_cache_dir=cache, **options), inspect(model)
    return config, layout, plan_engine(config, layout, CPU_ONLY)


def test_a_checkpoint_is_compiled_into_the_cache_and_found_there_again(model: Path, compiling: Mock) -> None:
    told: list[str] = []
    engine = prepared(model, told)
    entry = model.parent / "cache" / plan_engine(configured(), inspect(model), CPU_ONLY).cache_key
    assert engine == entry
    assert Manifest.read(entry) is not None
    assert told == [f"compiling {model} for openvino into {entry}: weights fp16"]
    told.clear()
    assert prepared(model, told) == engine
    assert told == [f"using the cached engine {entry}"]
    assert compiling.call_count == 1
    bundle(model)
    told.clear()
    other = prepared(model, told, quantize="int8", engine_cache_max_gb=1e-9)  # there is no room for both
    assert other != entry and other.parent == entry.parent
    assert told[0].startswith(f"not using the bundled engine {model / 'engine'}: ")
    assert " does not fit: option.quantize: engine has none, asked for int8; " in told[0]
    assert compiling.call_count == 2


@pytest.mark.parametrize(("size", "told"), [(2 * 10**9, False), (2 * 10**9 + 1, True)])
def test_reading_much_to_identify_a_checkpoint_is_reported(model: Path, compiling: Mock, size: int, told: bool) -> None:
    config, layout, plan = machine(model, model.parent / "cache")
    (model / "more.safetensors").touch()
    os.truncate(model / "more.safetensors", size - (model / "model.safetensors").stat().st_size)
    plan.__dict__["checkpoint_identity"] = "sha256:0"  # which nobody reads here
    lines: list[str] = []
    prepare_engine(config, layout, lines.append, plan=plan)
    assert ("reading 2.0 GB of weights to identify the checkpoint" in lines) is told


def test_a_check_before_compiling_may_prevent_it(model: Path, compiling: Mock) -> None:
    config, layout, plan = machine(model, model.parent / "cache")
    refuse = Mock(side_effect=TokenizerError("of another model"))
    with pytest.raises(TokenizerError):
        prepare_engine(config, layout, print, plan=plan, before_compiling=refuse)
    assert not compiling.called
    prepare_engine(config, layout, print, plan=plan)
    prepare_engine(config, layout, print, plan=plan, before_compiling=refuse)
    assert compiling.call_count == 1


def test_of_a_fleet_one_machine_compiles_and_others_wait_as_long_as_the_option_says(
    model: Path, compiling: Mock, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    for name in ("a", "b"):
        config, layout, plan = machine(model, tmp_path / name, engine_cache="s3://models/engines")
        engine = prepare_engine(config, layout, lines.append, plan=plan)
        assert engine.parent == tmp_path / name and Manifest.read(engine) is not None
    assert compiling.call_count == 1
    assert any("downloaded the engine from s3://models/engines/" in line for line in lines)
    fleet = Mock(wraps=fleet_cache.FleetCache)
    monkeypatch.setattr(fleet_cache, "FleetCache", fleet)
    options = {"engine_cache": "s3://models/engines", "engine_cache_wait": 77}
    config, layout, plan = machine(model, tmp_path / "c", **options)
    prepare_engine(config, layout, print, plan=plan)
    fleet.assert_called_once_with(("models", "engines"), wait_seconds=77)
