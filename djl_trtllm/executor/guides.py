"""Guides are tried before the engine gets them: the gate at which their requests wait, and the process that tries them.

A bad guide can let a compiler run for minutes, take all memory or overflow its stack, and an engine compiles guides in
the loop that serves all requests. In the process of the gate it ends nothing but that process. A backend has a program
for each library that compiles guides: `python -m PROGRAM FD DIRECTORY`, whose main function is `serve_trials`.
"""

import asyncio
import contextlib
import hashlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from djl_trtllm.executor.protocol import FullQueue, Refusal, Stats, Submit, Try
from djl_trtllm.files import MOST_TOKENIZER_BYTES, read_file
from djl_trtllm.processes import (
    allow_more_memory,
    allow_more_processor_time,
    be_nice,
    leave_end_to_parent,
    processor_seconds,
    write_no_core_file,
)
from djl_trtllm.request import Guide

_POLL_SECONDS = 0.005
_START_SECONDS = 60.0
_TRIAL_SECONDS = 10
"""The most processor time of a trial, whatever else the machine does meanwhile."""
_QUICK_SECONDS = 0.25
"""The longest quick trial in seconds of processor time: a longer one goes on in the slow process."""
_LONGEST_QUICK = 2.0
"""The longest quick trial in seconds of time, on a machine that is not busy."""
_SIZE_PER_SECOND = 20_000
"""The size of guides (`_size_of`) that a trial is expected to do in a second."""
_LARGEST = 10**9
_SLOW_NICENESS = 10
_SILENT_SECONDS = 60.0
"""Seconds after which a process without an answer counts as stopped or hung. That says nothing about the guide."""
_LEFT_SECONDS = 1.0
"""Seconds after which a trial ends whose clients have left, if others wait: a new process takes as long to start."""
_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d{1,9})?,?(\d{0,9})\}|[^\\]", re.DOTALL)
_MOST_VALUES = re.compile(r'"m(?:ax|in)(?:Items|Length)":(\d{1,9})')
_LEAST_SECONDS = 0.01
"""The least seconds that a trial counts, so that clients with small guides take turns."""
_MOST_WAITING = 64
"""The most guides that wait for their trial; a client has its share of them although others have filled the queue."""
_MOST_VERDICTS = 1024
_MOST_OF_A_PROCESS = 256
"""The most guides that one process tries: each stays in its memory."""

_PROCESSOR_SECONDS = 5.0
"""The most processor time of a compilation, on one core; TensorRT-LLM compiles on several."""
_MEMORY = 2 * 1024**3
"""Bytes that compiling may take."""
_STACK = 2 * 1024**2
"""The stack in bytes. The engine process has 8 MiB, so a guide that fits here fits there."""
_LONGEST = 300
"""The most characters of a problem that reach the client."""
_TOKENIZER = "tokenizer.json"

Key = bytes
Prepare = Callable[[Key, Guide], str | None]
"""Prepares an engine for a guide that can be used. It is called again and again and does not block: it returns None
until the engine is prepared, then the problem, or "" if there is none."""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The result of a trial: the problem of a guide that cannot be used, or a line for the log about one that can."""

    problem: str = ""
    note: str = ""


Trial = Callable[[Guide], Verdict]
"""Compiles a guide as the engine does."""

_encode = msgspec.msgpack.Encoder().encode
_decode_guide = msgspec.msgpack.Decoder(Guide).decode
_decode_verdict = msgspec.msgpack.Decoder(Verdict).decode


@dataclass(frozen=True)
class _Held:
    request: Submit | Try
    guide: Guide
    key: Key
    expected: float
    """The seconds that its trial is expected to take."""
    context: Context
    """The context in which the request came: what is printed for it later is marked in the same way."""


class _Process:
    """A process that tries guides, one at a time."""

    def __init__(self, program: str, directory: str, now: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, str(fd), directory],
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
            )
        self.connection = Connection(ours.detach())
        self.trying: _Held | None = None
        self.began = now
        self._used = 0.0
        self.is_ready = False
        """Whether it has said that it can try guides."""
        self.trials = 0

    def begin(self, held: _Held, now: float) -> None:
        self.trying = held
        self.count_from(now)
        with contextlib.suppress(OSError):  # it has ended: the gate sees that
            self.connection.send_bytes(_encode(held.guide))

    def count_from(self, now: float) -> None:
        """The present trial begins now."""
        self.began, self._used = now, processor_seconds(self._process.pid)

    def is_slow(self, took: float) -> bool:
        """Whether the present trial, which has lasted `took` seconds, is a slow one. Others may have had the
        processor."""
        if took <= _QUICK_SECONDS:
            return False
        return took > _LONGEST_QUICK or processor_seconds(self._process.pid) - self._used > _QUICK_SECONDS

    def yield_processor(self) -> None:
        """Lower this process's priority below all others'."""
        be_nice(self._process.pid, _SLOW_NICENESS)

    def close(self) -> int:
        """End the process; returns its exit status."""
        with contextlib.suppress(OSError):
            self.connection.close()
        self._process.kill()
        return self._process.wait()


class GuideGate:
    """Holds requests until their guides have been tried.

    Next is the guide of the client whose trials have taken the least time so far, with what this one is expected to
    take, as sequences are next by the service that their client was given (`batching/queue.py`). Guides that are
    expected to take long have a process of their own, which lets all others have the processor first. A trial that
    lasts longer than expected while others wait goes on there; if another one is there, it begins again later.

    `submit` gets the requests whose guides can be used, `refuse` the others. The first guide starts the process.
    Nothing waits but `advance`, which the engine's loop calls while the gate holds requests.

    A verdict is remembered if it is one about the guide, as processor time is: the same guide takes as much the next
    time. Where the process was killed or hung, the guide is tried once more in a new one.
    """

    def __init__(
        self,
        program: str,
        directory: str,
        submit: Callable[[Submit | Try], None],
        refuse: Callable[[Submit | Try, Refusal], None],
        *,
        prepare: Prepare = lambda key, guide: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program = program
        self._directory = directory
        self._submit = submit
        self._refuse = refuse
        self._prepare = prepare
        self._clock = clock
        self._held: dict[int, _Held] = {}
        self._problems: OrderedDict[Key, str] = OrderedDict()
        """Problems of guides that were tried; "" if a guide can be used."""
        self._seconds: dict[str, float] = {}
        """The seconds that the trials of each client took; a new client begins with those of the client served last."""
        self._served = 0.0
        self._quick: _Process | None = None
        self._slow: _Process | None = None
        self._long: set[Key] = set()
        """Guides that took longer than expected, and wait for the slow process."""
        self._lost: set[Key] = set()
        """Guides whose process was lost in their last trial."""
        self._trials = 0
        self._trial_seconds = 0.0

    def __len__(self) -> int:
        """Return the number of requests that are held."""
        return len(self._held)

    def count_in(self, stats: Stats) -> Stats:
        """The engine's state with the figures of the gate."""
        waiting = len({held.key for held in self._untried()})
        return msgspec.structs.replace(
            stats, guides_waiting=waiting, guide_trials=self._trials, guide_seconds=self._trial_seconds
        )

    def hold(self, request: Submit | Try) -> None:
        """Keep a request until its guide has been tried, which may be the case already."""
        guide = request.guide
        assert guide is not None
        key = hashlib.sha256(_encode(guide)).digest()
        untried = self._untried()
        waiting, clients = {held.key for held in untried}, {held.request.client for held in untried}
        if len(waiting) >= _MOST_WAITING and key not in waiting and key not in self._problems:
            own = {held.key for held in untried if held.request.client == request.client}
            if len(own) >= _MOST_WAITING // len(clients | {request.client}):
                full = FullQueue(len(waiting), _MOST_WAITING, _TRIAL_SECONDS)
                text = f"the queue of guides that wait for their trial is full: {len(waiting)} wait, try again later"
                return self._refuse(request, Refusal(text, full))
        if request.client not in clients:
            if len(self._seconds) > _MOST_VERDICTS:
                self._seconds = {client: self._seconds[client] for client in clients}
            self._seconds[request.client] = max(self._seconds_of(request.client), self._served)
        self._held[request.request_id] = _Held(request, guide, key, _size_of(guide) / _SIZE_PER_SECOND, copy_context())
        self._release()

    def cancel(self, request_id: int) -> Submit | Try | None:
        """Return the request if it is held, and hold it no longer."""
        held = self._held.pop(request_id, None)
        return None if held is None else held.request

    def advance(self, seconds: float = 0.0) -> None:
        """Release requests, after waiting up to `seconds` for the trial or the preparation of a guide."""
        busy = [process for process in (self._slow, self._quick) if process is not None and process.trying is not None]
        if busy:
            wait([process.connection for process in busy], seconds)
        else:
            time.sleep(seconds)
        for process in busy:
            self._poll(process)
        self._release()

    def close(self) -> int | None:
        """End the processes; returns the exit status of the one that tried last, None if there is none."""
        status = None
        for process in (self._slow, self._quick):
            if process is not None:
                status = self._close(process)
        return status

    def _close(self, process: _Process) -> int:
        self._quick = None if self._quick is process else self._quick
        self._slow = None if self._slow is process else self._slow
        return process.close()

    def _untried(self) -> list[_Held]:
        return [held for held in self._held.values() if held.key not in self._problems]

    def _seconds_of(self, client: str) -> float:
        return self._seconds.get(client, self._served)

    def _expected(self, held: _Held) -> float:
        return self._seconds_of(held.request.client) + held.expected

    def _release(self) -> None:
        for held in sorted(self._held.values(), key=self._expected):
            problem = self._problems.get(held.key)
            if problem is not None:
                self._problems.move_to_end(held.key)
                problem = problem or self._prepare(held.key, held.guide)
            if problem is None:
                continue
            self._let_go(held, problem)
        self._long &= {held.key for held in self._held.values()}
        if self._quick is None or self._quick.trying is None:
            self._quick = self._try_next(self._quick, slow=False)
        if self._slow is None or self._slow.trying is None:
            self._slow = self._try_next(self._slow, slow=True)
        if self._slow is not None and self._slow.trying is None:
            self._close(self._slow)

    def _let_go(self, held: _Held, problem: str) -> None:
        del self._held[held.request.request_id]
        if problem:
            held.context.run(self._refuse, held.request, Refusal(f"the guide cannot be used: {problem}"))
        else:
            held.context.run(self._submit, held.request)

    def _waiting(self, *, slow: bool) -> list[_Held]:
        """The guides that wait for the slow process, or for the quick one, without the one that is being tried."""
        trying = {process.trying.key for process in (self._quick, self._slow) if process and process.trying}
        untried = (held for held in self._untried() if held.key not in trying)
        return [held for held in untried if (held.expected > _QUICK_SECONDS or held.key in self._long) == slow]

    def _try_next(self, process: _Process | None, *, slow: bool) -> _Process | None:
        """Let the process, or a new one, try the next guide; returns it."""
        first = {held.request.client: held for held in reversed(self._waiting(slow=slow))}
        if not first:
            return process
        held = min(reversed(first.values()), key=self._expected)
        process = process or _Process(self._program, self._directory, self._clock())
        if slow:
            process.yield_processor()
        self._served = max(self._served, self._seconds_of(held.request.client))
        process.begin(held, self._clock())
        return process

    def _poll(self, process: _Process) -> None:
        held, took = process.trying, self._clock() - process.began
        most = _SILENT_SECONDS if process.is_ready else _START_SECONDS
        assert held is not None
        try:
            if process.connection.poll():
                verdict = _decode_verdict(process.connection.recv_bytes())
                if process.is_ready:
                    self._found(process, held, verdict)
                else:
                    process.is_ready = True
                    process.count_from(self._clock())
            elif took > most:
                self._close(process)
                self._lose(process, held, f"its compiler did not answer within {most:g} seconds, twice")
            elif not process.is_ready or not self._waiting(slow=process is self._slow):
                pass  # nobody waits for the process
            elif took > _LEFT_SECONDS and all(each.key != held.key for each in self._held.values()):
                self._close(process)
                self._end_trial(process, held)
            elif process is self._quick and process.is_slow(took):
                self._set_aside(process, held)
        except (EOFError, OSError):
            status = self._close(process)
            if status == -signal.SIGXCPU:
                problem = f"it takes longer than {_TRIAL_SECONDS} seconds of processor time to compile"
                self._found(process, held, Verdict(problem))
            else:
                problem = f"it is too large or nested too deep: its compiler ended with status {status}, twice"
                self._lose(process, held, problem)

    def _set_aside(self, process: _Process, held: _Held) -> None:
        """Make room for other guides: the trial continues in the slow process, or waits for it."""
        self._count(process, held)
        if self._slow is None:
            self._quick, self._slow = None, process
            process.yield_processor()
        else:
            self._long.add(held.key)
            self._close(process)

    def _count(self, process: _Process, held: _Held) -> None:
        """Add the time that a trial took since it was last counted to its client's."""
        now, client = self._clock(), held.request.client
        took, process.began = now - process.began, now
        self._seconds[client] = self._seconds_of(client) + max(took, _LEAST_SECONDS)
        self._trial_seconds += took

    def _end_trial(self, process: _Process, held: _Held) -> None:
        self._count(process, held)
        self._trials += 1
        process.trying = None
        process.trials += 1
        if process.trials >= _MOST_OF_A_PROCESS:
            self._close(process)

    def _found(self, process: _Process, held: _Held, verdict: Verdict) -> None:
        self._end_trial(process, held)
        self._problems[held.key] = verdict.problem
        self._lost.discard(held.key)
        if len(self._problems) > _MOST_VERDICTS:
            self._problems.popitem(last=False)
        if verdict.note:
            held.context.run(print, verdict.note, flush=True)

    def _lose(self, process: _Process, held: _Held, problem: str) -> None:
        """The process is lost: try its guide again, or refuse its requests and remember nothing."""
        self._end_trial(process, held)
        if held.key not in self._lost:
            self._lost = (self._lost & {each.key for each in self._held.values()}) | {held.key}
            return
        self._lost.discard(held.key)
        for each in [each for each in self._held.values() if each.key == held.key]:
            self._let_go(each, problem)


class AsyncGuideGate(GuideGate):
    """A gate that the running event loop advances while it holds requests."""

    _advancing: asyncio.Task[None] | None = None

    def hold(self, request: Submit | Try) -> None:
        super().hold(request)
        if self and (self._advancing is None or self._advancing.done()):
            self._advancing = asyncio.get_running_loop().create_task(self._advance_while_held())

    def close(self) -> int | None:
        if self._advancing is not None:
            self._advancing.cancel()
        return super().close()

    async def _advance_while_held(self) -> None:
        while self:
            await asyncio.sleep(_POLL_SECONDS)
            self.advance()


# -- the process -------------------------------------------------------------------------------------------------------


def serve_trials(make_trial: Callable[[Path], Trial], argv: list[str]) -> None:
    """Try guides until the engine process is gone. `make_trial` gets the directory of the model or its tokenizer."""
    leave_end_to_parent()
    write_no_core_file()
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve, args=(Connection(int(argv[1])), make_trial, Path(argv[2])))
    thread.start()
    thread.join()


def _serve(connection: Connection, make_trial: Callable[[Path], Trial], directory: Path) -> None:
    attempt = make_trial(directory)
    allow_more_memory(_MEMORY)
    with contextlib.suppress(EOFError, OSError):
        connection.send_bytes(_encode(Verdict()))
        while True:
            guide = _decode_guide(connection.recv_bytes())
            allow_more_processor_time(_TRIAL_SECONDS)
            verdict = attempt(guide)
            # Both may quote the guide.
            connection.send_bytes(_encode(Verdict(_cut(verdict.problem), _cut(verdict.note))))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def trial_with_tokenizer(make_trial: Callable[[str | None], Trial], tokenizer_dir: Path) -> Trial:
    """Call `make_trial` with the text of the tokenizer.json, or with None if it is missing or unreadable."""
    file = tokenizer_dir / _TOKENIZER
    try:
        return make_trial(read_file(file, MOST_TOKENIZER_BYTES).decode() if file.is_file() else None)
    except Exception:
        print(f"{file} cannot be read for guides, which are parsed and not compiled before the engine gets them:")
        traceback.print_exc()
        return make_trial(None)


def _size_of(guide: Guide) -> int:
    """The characters of a guide, where `(ab){3}` is 6: compilers write counted repetitions out.

    A repetition without a count may match nothing, so a compiler joins its neighbours: `.*.*.*` costs the square of the
    number of repetitions.
    """
    size = len(guide.value)
    if size > _QUICK_SECONDS * _SIZE_PER_SECOND:
        return size
    sizes, last = [0], 0
    for part in _PARTS.finditer(guide.value):
        if part[0] == "(":
            sizes.append(0)
        elif part[0] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] = min(_LARGEST, sizes[-1] + last)
        elif part[1] or part[2]:
            sizes[-1] = min(_LARGEST, sizes[-1] + last * (max(int(part[1] or 0), int(part[2] or 0), 1) - 1))
        else:
            last = 1
            sizes[-1] += 1
    written_out = sum(sizes) + sum(map(int, _MOST_VALUES.findall(guide.value))) // 10
    repetitions = sum(map(guide.value.count, "*+?"))
    return max(size, written_out, repetitions**2 // 8)


def keywords_left_out(keywords: Sequence[str], *, strict: bool) -> Verdict:
    """The verdict about a JSON schema with keywords that the grammar does not follow."""
    shown = ", ".join(keywords)
    if not keywords:
        return Verdict()
    if strict:
        return Verdict(f"the engine's grammar does not follow {shown}: leave that out, or 'strict'")
    return Verdict(note=f"a JSON schema is followed except for {shown}: 'strict': true refuses such schemas")


def too_large(began: float) -> str | None:
    """Return the problem of a guide whose compilation, begun at this `time.process_time()`, has taken too long."""
    seconds = time.process_time() - began  # other processes do not make a guide slower
    if seconds <= _PROCESSOR_SECONDS:
        return None
    return f"it is too large: compiling it would stop all other requests for {seconds:.0f} seconds"


def reason_of(message: str) -> str:
    """Return the last part of a message of xgrammar or OpenVINO, which begins with places in its source."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1].rpartition(" is false: ")[2].rpartition(".cc:")[2].lstrip("0123456789: ") if lines else "unknown"
