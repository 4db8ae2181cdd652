"""Running the compiler: one subprocess, its log kept, its phases told, nothing left when it fails."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from djl_trtllm.engine.directory import EngineDir, check_engine
from djl_trtllm.engine.manifest import Manifest
from djl_trtllm.engine.plan import EnginePlan
from djl_trtllm.engine.spec import PHASE_MARK, PHASES
from djl_trtllm.engine.staging import staged
from djl_trtllm.errors import BuildError, CompilerMissingError, EngineError, EngineMismatchError

DEFAULT_TIMEOUT_SECONDS = 4 * 3600.0
_COMPILER_PACKAGES = ("torch", "openvino", "openvino-tokenizers", "optimum-intel", "nncf")
_POLL_SECONDS = 0.1
_TELL_EVERY_SECONDS = 30.0
_TERMINATE_SECONDS = 5.0
_TAIL_LINES = 20
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")


def build_engine(
    plan: EnginePlan,
    out: Path,
    progress: Callable[[str], None],
    *,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    cancel: threading.Event | None = None,
    command: list[str] | None = None,
) -> EngineDir:
    """Compile the plan's checkpoint into `out`, which appears whole or not at all.

    `progress` gets a line per phase (load, convert, compress, tokenizer, save) with the seconds since the start; the
    compiler's output goes to `OUT.log` beside `out`. `timeout` is in seconds; when it passes, `cancel` is set or this
    thread is interrupted, the compiler's process group is killed. `command` replaces the compiler in tests: it is given
    the spec file as its last argument.

    Raises CompilerMissingError, BuildError (with the log's last lines) and EngineError (`out` cannot be written).
    """
    if command is None:
        require_compiler(plan.source)
        command = [sys.executable, "-m", "djl_trtllm.engine.openvino"]
    log_path = out.with_name(f"{out.name}.log")
    started = time.monotonic()
    try:
        with staged(out) as partial:
            spec_path = partial / "spec.json"
            plan.compile_spec(partial).save(spec_path)
            environment = _environment(offline=not plan.trust_remote_code)
            _Compiler([*command, str(spec_path)], environment, log_path, progress, timeout, cancel).run()
            spec_path.unlink()
            _accept(plan, partial, log_path)
    except OSError as error:
        raise EngineError(f"cannot write the engine {out}: {error}") from error
    progress(f"compiled {out} in {time.monotonic() - started:.1f} s")
    return EngineDir(path=out, backend=plan.backend.value, manifest=Manifest.read(out), tokenizer_dir=out)


def require_compiler(checkpoint: Path) -> None:
    """Raise CompilerMissingError naming the packages that compiling needs and that are not installed."""
    missing = [package for package in _COMPILER_PACKAGES if not _is_installed(package)]
    if missing:
        raise CompilerMissingError(
            f"{checkpoint} is a checkpoint and must be compiled before it can be served here, and the compiler is not "
            f"installed (missing: {', '.join(missing)}). Either install it:\n"
            "    pip install 'djl-trtllm[compile]'\n"
            "or compile on a machine that has it and serve the directory it writes, which needs no compiler:\n"
            f"    djl-trtllm compile {checkpoint} OUT"
        )


def _accept(plan: EnginePlan, directory: Path, log_path: Path) -> None:
    try:
        check_engine(directory)
    except EngineMismatchError as error:
        raise BuildError(
            f"the compiler of {plan.source} ended well and left no whole engine: {error}", log_path
        ) from error
    Manifest.of(
        directory, backend=plan.backend.value, checkpoint=plan.checkpoint_identity, options=plan.build_options
    ).write(directory)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class _Compiler:
    """One run of the subprocess."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        log_path: Path,
        progress: Callable[[str], None],
        timeout: float,
        cancel: threading.Event | None,
    ) -> None:
        self._command = command
        self._environment = environment
        self._log_path = log_path
        self._progress = progress
        self._timeout = timeout
        self._cancel = cancel
        self._phase = PHASES[0]
        self._log_offset = 0

    def run(self) -> None:
        """Run to the end. Raises BuildError unless it ends with status 0."""
        with self._log_path.open("wb") as log_file:
            # The pipe on its standard input is never written: its end tells the compiler that this process died.
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )
        try:
            status = self._watch(process)
        finally:
            _kill_group(process)
            if process.stdin is not None:
                process.stdin.close()
        if status != 0:
            raise self._failure(f"ended with {_shown_status(status)}")

    def _watch(self, process: subprocess.Popen[bytes]) -> int:
        started = told = time.monotonic()
        while True:
            status = process.poll()
            now = time.monotonic()
            for phase in self._new_phases():
                self._phase, told = phase, now
                self._progress(f"compiling: {phase} ({now - started:.1f} s)")
            if status is not None:
                return status
            if self._cancel is not None and self._cancel.is_set():
                raise self._failure("was cancelled")
            if now - started > self._timeout:
                raise self._failure(f"took longer than {self._timeout:.0f} s and was killed")
            if now - told > _TELL_EVERY_SECONDS:
                self._progress(f"compiling: still in {self._phase} ({now - started:.0f} s)")
                told = now
            time.sleep(_POLL_SECONDS)

    def _new_phases(self) -> list[str]:
        with self._log_path.open("rb") as log_file:
            log_file.seek(self._log_offset)
            content = log_file.read()
        # A line still being written is read again when it is whole.
        whole = content[: content.rfind(b"\n") + 1]
        self._log_offset += len(whole)
        lines = whole.decode(errors="replace").splitlines()
        return [line.removeprefix(PHASE_MARK) for line in lines if line.startswith(PHASE_MARK)]

    def _failure(self, what: str) -> BuildError:
        text = self._log_path.read_bytes().decode(errors="replace")
        # Progress bars overwrite themselves with carriage returns; only their last state is of use.
        lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
        tail = [line for line in lines if line and not line.startswith(PHASE_MARK)][-_TAIL_LINES:]
        cause = next((f": {line}" for line in reversed(tail) if _EXCEPTION.match(line)), "")
        return BuildError(f"the compiler {what} in phase {self._phase}{cause}", self._log_path, tail)


def _environment(*, offline: bool) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    # The checkpoint is local; only code of its own may lie elsewhere on the hub.
    hub = {"HF_HUB_OFFLINE": "1"} if offline else {}
    return {
        **os.environ,
        **hub,
        "PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root]),
        "PYTHONUNBUFFERED": "1",
        # The working directory may be a model's, with files named like modules.
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_TERMINATE_SECONDS)
    # Also what the compiler started and left running.
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _shown_status(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    killed = f"signal {signal.Signals(-status).name}"
    return f"{killed} (out of memory?)" if -status == signal.SIGKILL else killed
