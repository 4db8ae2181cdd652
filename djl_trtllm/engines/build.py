"""Find the engine of a model directory, or compile it in a subprocess.

The compiler's output is logged, its phases are reported, and what it leaves after a failure is removed.
"""

import errno
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from djl_trtllm.config import Config
from djl_trtllm.engines.cache import EngineCache, Manifest
from djl_trtllm.engines.compiler import DISK, HOST_MEMORY, PHASE_MARK, Compiler
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import BuildError, CompilerMissingError, EngineError, EngineMismatchError
from djl_trtllm.model import Layout
from djl_trtllm.model.remote.s3 import S3Address
from djl_trtllm.model.work_directory import staged, temporary_directory
from djl_trtllm.processes import child_environment, end_group
from djl_trtllm.progress import format_bytes, under_way

TIMEOUT_SECONDS = 4 * 3600.0
_POLL_SECONDS = 0.1
_REPORT_EVERY_SECONDS = 30.0
_TERMINATE_SECONDS = 5.0
_TAIL_LINES = 20
_SEARCHED_LINES = 400
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_BYTES = 4 << 20
"""A disk with less free space counts as full. A write that did not fit leaves a little of the disk free."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")


def build_engine(
    plan: EnginePlan,
    out: Path,
    progress: Callable[[str], None],
    *,
    command: list[str] | None = None,
) -> None:
    """Compile the plan's checkpoint into `out`, which appears complete or not at all.

    `progress` gets one line per compiler phase, with the duration of the one before it. The compiler's output goes to
    `OUT.log` beside `out`, which stays unless this thread is interrupted. The compiler's process group is killed after
    four hours, or when this thread is interrupted. Tests replace the compiler by `command`, which gets the spec
    file as its last argument.

    Raises CompilerMissingError, BuildError (with the cause, what to do and the log's last lines) and EngineError
    (this backend compiles nothing, or `out` cannot be written).
    """
    compiler = plan.compiler
    if compiler is None:
        raise EngineError(
            f"backend {plan.backend} ({plan.reason}) runs {plan.source} as it is: there is nothing to compile, serve it"
        )
    if command is None:
        compiler.require(plan.source)
        command = [sys.executable, "-m", compiler.module]
    log_path = out.with_name(f"{out.name}.log")
    started = time.monotonic()
    try:
        with staged(out) as partial, temporary_directory() as temporary:
            spec = plan.compile_spec(partial)
            spec_path = partial / "spec.json"
            spec.save(spec_path)
            environment = _environment(compiler, offline=plan.offline) | {"TMPDIR": temporary}
            run = _Run(compiler, [*command, str(spec_path)], environment, log_path, progress)
            try:
                run.to_its_end()
            finally:
                if spec.workspace is not None:
                    shutil.rmtree(spec.workspace, ignore_errors=True)
            spec_path.unlink()
            _accept(plan, partial, log_path)
    except (KeyboardInterrupt, SystemExit):
        log_path.unlink(missing_ok=True)
        raise
    except OSError as error:
        advice = f"; {DISK.advice}" if error.errno in _FULL else ""
        raise EngineError(f"cannot write the engine {out}: {error}{advice}") from error
    progress(f"compiled {out} in {time.monotonic() - started:.1f} s{run.took()}")


def _accept(plan: EnginePlan, directory: Path, log_path: Path) -> None:
    try:
        plan.check_whole(directory)
    except EngineMismatchError as error:
        head = f"the compiler of {plan.source} succeeded and left no complete engine: {error}"
        if (full := _full_disk(directory)) is not None:
            raise BuildError(f"{head}\n{full}", log_path, cause=DISK.name, advice=DISK.advice) from error
        raise BuildError(head, log_path) from error
    Manifest.of(
        directory,
        backend=plan.backend.value,
        checkpoint=plan.checkpoint_identity,
        options=plan.build_options,
        versions=plan.versions,
        platform=plan.platform,
        limits=plan.built_limits,
    ).write(directory)


@dataclass
class _Run:
    compiler: Compiler
    command: list[str]
    environment: dict[str, str]
    log_path: Path
    progress: Callable[[str], None]
    phase: str = field(init=False)
    phase_began: float | None = None
    log_offset: int = 0

    def __post_init__(self) -> None:
        self.phase = self.compiler.phases[0]

    def to_its_end(self) -> None:
        """Run the compiler and wait. Raises BuildError unless it exits with status 0."""
        with self.log_path.open("wb") as log_file:
            # Nothing is written to its standard input: end of file means that this process died.
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.environment,
            )
        try:
            with under_way("compiling"):
                status = self._watch(process)
        finally:
            end_group(process, _TERMINATE_SECONDS)
            if process.stdin is not None:
                process.stdin.close()
        if status != 0:
            raise self._failure(f"ended with {_shown_status(status)}", status)

    def _watch(self, process: subprocess.Popen[bytes]) -> int:
        started = reported = time.monotonic()
        while True:
            status = process.poll()
            now = time.monotonic()
            for phase in self._new_phases():
                self.progress(f"compiling: {phase}{self.took()}")
                self.phase, self.phase_began, reported = phase, now, now
            if status is not None:
                return status
            if now - started > TIMEOUT_SECONDS:
                raise self._failure(f"took longer than {TIMEOUT_SECONDS:.0f} s and was killed")
            if now - reported > _REPORT_EVERY_SECONDS:
                since = started if self.phase_began is None else self.phase_began
                self.progress(f"compiling: still in {self.phase} ({now - since:.0f} s)")
                reported = now
            time.sleep(_POLL_SECONDS)

    def took(self) -> str:
        """The duration of the present phase, in words for the line about the next one; "" before the first phase."""
        return "" if self.phase_began is None else f" ({self.phase} took {time.monotonic() - self.phase_began:.1f} s)"

    def _new_phases(self) -> Iterator[str]:
        with self.log_path.open("rb") as log_file:
            log_file.seek(self.log_offset)
            content = log_file.read()
        # A line that is still being written is read again when it is complete.
        whole = content[: content.rfind(b"\n") + 1]
        self.log_offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            marked = line.removeprefix(PHASE_MARK) if line.startswith(PHASE_MARK) else None
            phase = marked or self.compiler.phase_after(self.phase, line)
            if phase is not None:
                yield phase

    def _failure(self, what: str, status: int | None = None) -> BuildError:
        text = _COLOUR.sub("", self.log_path.read_bytes().decode(errors="replace"))
        # Progress bars overwrite themselves with carriage returns; keep only their last state.
        lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
        lines = [line for line in lines if line and not line.startswith(PHASE_MARK)]
        tail = lines[-_TAIL_LINES:]
        head = f"the compiler {what} in phase {self.phase}"
        found = None if status is None else self.compiler.cause_of(lines[-_SEARCHED_LINES:])
        if found is not None:
            cause, line = found
            return BuildError(f"{head}, {cause.name}: {line}", self.log_path, tail, cause.name, cause.advice)
        if status is not None and (full := _full_disk(self.log_path.parent, Path(self.environment["TMPDIR"]))):
            # Libraries have messages of their own for it, and the log may lack the last of them.
            return BuildError(f"{head}, {DISK.name}: {full}", self.log_path, tail, DISK.name, DISK.advice)
        if status == -signal.SIGKILL:
            return BuildError(head, self.log_path, tail, HOST_MEMORY.name, HOST_MEMORY.advice)
        line = next((f": {line}" for line in reversed(tail) if _EXCEPTION.match(line)), "")
        return BuildError(f"{head}{line}", self.log_path, tail)


def _full_disk(*folders: Path) -> str | None:
    """A sentence about the first of the folders whose disk has no room left, before anything is removed from it."""
    for folder in folders:
        free = shutil.disk_usage(folder).free
        if free < _NO_ROOM_BYTES:
            return f"{format_bytes(free)} are free on the disk of {folder}"
    return None


def _environment(compiler: Compiler, *, offline: bool) -> dict[str, str]:
    hub = {"HF_HUB_OFFLINE": "1"} if offline else {}
    return {**child_environment(), **hub, **compiler.environment, "TOKENIZERS_PARALLELISM": "false"}


def _shown_status(status: int) -> str:
    try:
        killed = f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"status {status}"
    return f"{killed} (out of memory?)" if -status == signal.SIGKILL else killed


_WORTH_REPORTING_BYTES = 2 * 10**9


def prepare_engine(
    config: Config,
    layout: Layout,
    progress: Callable[[str], None],
    *,
    plan: EnginePlan,
    before_compiling: Callable[[], object] = lambda: None,
    check: Callable[[EnginePlan, Path], Manifest | None] = EnginePlan.check,
) -> Path:
    """The directory of a model's engine, which is compiled first if the backend needs one and there is none.

    An engine directory is used unchanged. For a checkpoint, the bundled engine is used if it fits, else one from the
    local cache, compiled if necessary. A backend that compiles nothing runs the checkpoint itself. `progress` gets one
    line at a time. `before_compiling` is called only if the engine is compiled, and may raise to prevent it. `check` is
    `EnginePlan.check` for an engine that came with the model, whose files may be anybody's.

    Raises EngineMismatchError for an engine directory that is damaged or differs from this machine or these options,
    and CompilerMissingError, BuildError and EngineError if compiling fails.
    """
    if plan.compiler is None:
        return layout.path
    if layout.kind.is_engine:
        directory = layout.engine_dir or layout.path
        check(plan, directory)
        return directory
    refusal = None
    if layout.bundled_engine is not None:
        try:
            _check_bundled(plan, layout.bundled_engine, progress, check)
            return layout.bundled_engine
        except EngineMismatchError as error:
            head, *problems = str(error).splitlines()
            refusal = f"{head} {'; '.join(line.removeprefix('  - ') for line in problems)}".rstrip()
            progress(f"not using the bundled engine {layout.bundled_engine}: {refusal}")
    try:
        return _through_cache(config, plan, progress, before_compiling)
    except CompilerMissingError as error:
        if refusal is None:
            raise
        raise CompilerMissingError(f"the bundled engine is not used: {refusal}\n{error}") from error


def _check_bundled(
    plan: EnginePlan,
    path: Path,
    progress: Callable[[str], None],
    check: Callable[[EnginePlan, Path], Manifest | None],
) -> None:
    manifest = check(plan, path)
    if manifest is None and plan.asked:
        options = ", ".join(f"option.{name}={value}" for name, value in plan.asked.items())
        raise EngineMismatchError(f"it has no manifest, so it is unknown whether it was compiled with {options}")
    if manifest is None:
        progress(f"the bundled engine {path} has no manifest and is used unchecked")
    elif differences := manifest.differences(checkpoint=_identified(plan, progress)):
        raise EngineMismatchError("; ".join(differences))


def _through_cache(
    config: Config,
    plan: EnginePlan,
    progress: Callable[[str], None],
    before_compiling: Callable[[], object],
) -> Path:
    def build(out: Path) -> None:
        before_compiling()
        progress(f"compiling {plan.source} for {plan.backend} into {out}: {plan.recipe}")
        build_engine(plan, out, progress)

    _identified(plan, progress)
    cache = EngineCache(config.engine_cache_dir, int(config.options.engine_cache_max_gb * 1e9))
    if (path := cache.lookup(plan.cache_key)) is not None:
        progress(f"using the cached engine {path}")
    elif config.options.engine_cache is None:
        path = cache.get_or_build(plan.cache_key, build, progress)
    else:
        # Importing botocore takes a third of a second.
        from djl_trtllm.engines.fleet_cache import FleetCache

        fleet = FleetCache(S3Address.parse(config.options.engine_cache), wait_seconds=config.options.engine_cache_wait)
        provide = partial(fleet.provide, plan.cache_key, build=build, progress=progress)
        path = cache.get_or_build(plan.cache_key, provide, progress)
    return path


def _identified(plan: EnginePlan, progress: Callable[[str], None]) -> str:
    size = sum(path.stat().st_size for path in plan.source.glob("*.safetensors"))
    if size > _WORTH_REPORTING_BYTES:
        progress(f"reading {format_bytes(size)} of weights to identify the checkpoint")
    return plan.checkpoint_identity
