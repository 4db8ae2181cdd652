"""Every kind of fault: what it does to a server under streams, and the table of them all."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil

from tests.faults.figures import guide_bombs, hostile_models, hostile_requests, large_adapter
from tests.faults.load import Case, Kind, Load, Row, engine_replaced, repeated, row_of
from tests.faults.ray import ray_faults
from tests.support.floods import BEGUN, FLOODS, GRPC, HELD, SENT, SILENT, flooded
from tests.support.models import TINY_STORIES, tensorrt_llm_model
from tests.support.processes import survivors, wait_until
from tests.support.reference import story
from tests.support.s3 import Store, s3_server, variables
from tests.support.server import Server, free_port


def _has_another(server: Server, before: list[psutil.Process]) -> bool:
    return server.hosts() not in ([], before)


def engine_killed(case: Case) -> Iterator[Row]:
    with case.server() as server:

        def strike() -> None:
            with engine_replaced(server):
                server.host().kill()

        name = f"engine killed, {case.times} times in a row"
        yield row_of(name, case.engine, server, case.streams, repeated(case.times, strike))

        def kill_at_once(load: Load) -> None:
            for _ in range(case.times):
                server.host().kill()
                wait_until(partial(_has_another, server, server.hosts()), what="a new engine process")
            load.wait_for_parts(4 * case.streams)

        name = f"engine killed as it loads, {case.times} times"
        yield row_of(name, case.engine, server, case.streams, kill_at_once)


# -- the engine process stops (SIGSTOP) and is replaced after option.executor_hang_timeout -----------------------------

HANG_SECONDS = 2


def engine_stopped(case: Case) -> Iterator[Row]:
    with case.server(OPTION_EXECUTOR_HANG_TIMEOUT=str(HANG_SECONDS)) as server:

        def strike() -> None:
            with engine_replaced(server):
                server.host().send_signal(signal.SIGSTOP)

        row = row_of("engine stopped", case.engine, server, case.streams, repeated(min(case.times, 3), strike))
        row.note = row.note or f"option.executor_hang_timeout={HANG_SECONDS}"
        yield row


# -- the engine raises an error under all requests; a request that makes every engine process raise, sent again --------

ONCE, ALWAYS = 177, 178
"""Numbers of tokens: of a request at whose sixth token the engine raises, and of one that no engine survives. Streams
that go on have fewer left."""
FAULTS = [
    {"action": "raise", "at_token": 5, "max_new_tokens": ONCE},
    {"action": "raise", "at_token": 0, "max_new_tokens": ALWAYS},
]


def engine_raising(case: Case) -> Iterator[Row]:
    with case.server({"faults": FAULTS}) as server:

        def answered() -> bool:
            status = server.generate(ONCE).status_code
            assert status in (200, 503), status
            return status == 200  # refused: the engine process before has not been replaced yet

        def strike() -> None:
            with engine_replaced(server):
                wait_until(answered, what="an answer to the request that makes it raise")

        name = f"engine raising, {case.times} times in a row"
        yield row_of(name, case.engine, server, case.streams, repeated(case.times, strike))


def poison(case: Case) -> Iterator[Row]:
    with case.server({"faults": FAULTS}) as server:
        statuses: list[int] = []

        def cause(load: Load) -> None:
            for _ in range(case.times):
                statuses.append(server.generate(ALWAYS).status_code)
            load.wait_for_parts(4 * load.streams)

        name = f"a request that kills engines, sent {case.times} times"
        row = row_of(name, case.engine, server, case.streams, cause)
        assert statuses == [424] * case.times, statuses
        row.note = row.note or f"{server.metric('executor_restarts_total'):g} engine processes were lost"
        yield row


# -- the engine process cannot get memory any more (RLIMIT_AS), and long prompts want some -----------------------------

_ENGINES_SPARE = 4 * 2**20
_TRIES = 20


def engine_out_of_memory(case: Case) -> Iterator[Row]:
    with case.server() as server:
        ends: list[str] = []

        def cause(load: Load) -> None:
            with engine_replaced(server):
                host = server.host()
                limit = host.memory_info().vms + _ENGINES_SPARE
                resource.prlimit(host.pid, resource.RLIMIT_AS, (limit, limit))
                ends.append(_end_by_memory(server, host))
            load.wait_for_parts(4 * case.streams)

        row = row_of("engine out of memory", case.engine, server, case.streams, cause)
        row.note = row.note or ends[0]
        yield row


def _end_by_memory(server: Server, host: psutil.Process) -> str:
    """Send long prompts until the process has ended; where none ends it, kill it as the kernel would. Which it was."""
    for number in range(_TRIES):
        server.post(story(30, number), max_new_tokens=1)
        if not host.is_running() or host.status() == psutil.STATUS_ZOMBIE:
            said = next((line for line in server.log if f"(pid {host.pid}) is gone" in line), "")
            return f"its own end: {said.partition('is gone: ')[2][:150]}"
        time.sleep(0.05)
    host.kill()
    return "no prompt ended it, so it was killed"


# -- The server is killed, and its supervisor starts another one on the same port --------------------------------------


def server_killed(case: Case) -> Iterator[Row]:
    lost = 0
    with ExitStack() as stack:
        model, needed = case.model()
        server = stack.enter_context(Server(model, case.environ(**needed), case.folder))
        server.wait_for_ping()

        def cause(load: Load) -> None:
            nonlocal lost
            below = server.descendants()
            server.process.kill()
            server.process.wait()
            assert survivors(below) == [], "an engine process outlived its server"
            second = Server(model, case.environ(**needed), case.folder, port=server.port)
            stack.enter_context(second).wait_for_ping()
            load.server = second
            lost = min(len(load.failed), case.streams + load.unanswered)
            load.wait_for_parts(4 * case.streams)

        row = row_of("server killed", case.engine, server, case.streams, cause)
        row.allowed = lost  # what the first was answering, or had accepted: none once there is a second
        row.lost_pings = 0  # in between there is nobody
        yield row


# -- the server cannot get memory any more (RLIMIT_AS), and clients send it large bodies -------------------------------

_SERVERS_SPARE = 16 * 2**20
_BODIES = 20
"""Their bodies have 5 MB each."""


def server_out_of_memory(case: Case) -> Iterator[Row]:
    places = {"OPTION_MAX_ROLLING_BATCH_SIZE": str(case.streams + _BODIES)}
    with case.server(None, **places) as server:
        status: list[str] = []

        def cause(load: Load) -> None:
            limit = server.process.memory_info().vms + _SERVERS_SPARE
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            with flooded(server.port, {"bodies": _BODIES}) as count:
                wait_until(lambda: server.says("MemoryError"), what="a server without memory")
                load.wait_for_parts(4 * case.streams)
            # The limit stays: what the large bodies took is free again.
            load.wait_for_parts(4 * case.streams)
            status.append(f"of the large bodies {count['500']} were answered with 500")

        row = row_of("server out of memory", case.engine, server, case.streams, cause)
        row.note = row.note or status[0]
        yield row


# -- SIGTERM in each state of the model: what runs is finished, and the server ends with status 0 ----------------------

SHUTDOWN = {"SERVING_SHUTDOWN_TIMEOUT": "60"}


def sigterm(case: Case) -> Iterator[Row]:
    """In the short form only as it recovers: tests/integration/server/test_faults.py has the other states."""
    if not case.short:
        yield _loading(case)
        yield _idle(case)
    for state in ("recovering",) if case.short else ("under streams", "recovering", "draining"):
        with case.server(**SHUTDOWN) as server:
            sent: list[float] = []

            def cause(load: Load, state: str = state, server: Server = server, sent: list[float] = sent) -> None:
                if state == "recovering":
                    server.host().kill()
                    wait_until(lambda: server.ping() == 503, what="a server that recovers")
                sent.append(time.monotonic())
                server.terminate()
                if state == "draining":
                    wait_until(lambda: server.ping() != 200, what="a server that drains")
                    server.terminate()

            row = row_of(f"SIGTERM {state}", case.engine, server, case.streams, cause, once=True)
            yield _ended(row, server, sent[0])


def _loading(case: Case) -> Row:
    model, needed = case.model({"start_seconds": 60} if case.engine != "openvino" else None)
    with Server(model, case.environ(**needed, **SHUTDOWN), case.folder) as server:
        wait_until(lambda: server.ping() == 503, what="a server that loads")
        began = time.monotonic()
        server.terminate()
        return _ended(Row("SIGTERM loading", case.engine), server, began)


def _idle(case: Case) -> Row:
    with case.server(**SHUTDOWN) as server:
        began = time.monotonic()
        server.terminate()
        return _ended(Row("SIGTERM idle", case.engine), server, began)


def _ended(row: Row, server: Server, began: float) -> Row:
    status = server.wait()
    row.recovered = time.monotonic() - began
    row.failed += int(status != 0)
    row.lost_pings = 0  # it has ended
    row.note = row.note or f"seconds to its end, with status {status}"
    return row


# -- A server that may open 1,024 files, more idle clients than that, and the engine process is killed -----------------

FILES, CLIENTS = 1024, 1100
_PROGRAM = (
    "-c",
    f"from resource import *; from djl_trtllm.cli import main; setrlimit(RLIMIT_NOFILE, ({FILES}, {FILES})); main()",
)


def descriptors_exhausted(case: Case) -> Iterator[Row]:
    model, needed = case.model()
    with Server(model, case.environ(**needed), case.folder, _PROGRAM) as server:
        server.wait_for_ping()

        def strike() -> None:
            with engine_replaced(server):
                server.host().kill()

        def cause(load: Load) -> None:
            with flooded(server.port, {"idle connections": CLIENTS}):
                repeated(min(case.times, 3), strike)(load)

        name = "descriptors exhausted, engine killed"
        yield row_of(name, case.engine, server, case.streams, cause)


# The disk with TMPDIR and the cache is full: the engine process is killed, or another model's engine is compiled.

_SIZE = 64 << 20
_DISKS_SPARE = {"openvino": 2 << 20}
"""So far its compiler gets: the engine has 7 MB. Others find no room at all."""


def disk_full(case: Case) -> Iterator[Row]:
    disk = case.folder / "disk"
    disk.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", disk], capture_output=True).returncode:
        yield Row("disk full", case.engine, skipped=True, note="not run: mounting a disk needs root")
        return
    try:
        compiles = case.engine != "scripted"
        if not (case.short and compiles):
            yield _engine_killed(case, disk)
        if compiles:
            yield _engine_compiled(case, disk)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def _engine_killed(case: Case, disk: Path) -> Row:
    """The successor of the engine process needs a folder there."""
    with case.server(TMPDIR=str(disk), DJL_CACHE_DIR=str(disk)) as server:
        filler = _fill(disk)

        def strike() -> None:
            with engine_replaced(server):
                server.host().kill()

        row = row_of("disk full, engine killed", case.engine, server, case.streams, repeated(case.times, strike))
        filler.unlink()
    return row


def _engine_compiled(case: Case, disk: Path) -> Row:
    """A checkpoint is registered on the server, which has to compile it; again when there is room."""
    store = case.folder / "store"
    store.mkdir()
    with case.server(TMPDIR=str(disk), DJL_CACHE_DIR=str(disk), SERVING_MODEL_STORE=str(store)) as server:
        _checkpoint(case, store / "compiled")
        filler = _fill(disk, _DISKS_SPARE.get(case.engine, 0))
        told: list[str] = []

        def cause(load: Load) -> None:
            refused = server.http.post("/models", params={"url": "compiled"})
            assert refused.status_code >= 400, refused.text
            assert any(said in refused.text for said in ("no space on the disk", "No space left on device")), (
                refused.text
            )
            assert not list(disk.rglob("openvino_model.*")) and not list(disk.rglob("rank0.engine"))
            told.append(f"registering it: {refused.status_code}, and 200 when there is room")
            load.wait_for_parts(2 * case.streams)

        row = row_of("disk full, engine compiled", case.engine, server, case.streams, cause)
        filler.unlink()
        made = server.http.post("/models", params={"url": "compiled"})
        assert made.status_code == 200, made.text
        row.note = row.note or told[0]
    return row


def _checkpoint(case: Case, to: Path) -> None:
    if case.engine == "openvino":
        shutil.copytree(TINY_STORIES, to, ignore=shutil.ignore_patterns("engine"))
    else:
        limits = {"option.max_rolling_batch_size": 4, "option.max_seq_len": 1024, "option.max_output_len": 512}
        tensorrt_llm_model(to, **{"option.backend": "tensorrt", **limits})


def _fill(disk: Path, spare: int = 0) -> Path:
    """Write a file until there is no room for a byte, and take back `spare` bytes of it."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    os.truncate(filler, filler.stat().st_size - spare)
    return filler


# -- the store of the model cannot be reached: while the server runs, and when another one starts ----------------------

ADDRESS = "s3://models/story"


def s3_gone(case: Case) -> Iterator[Row]:
    where = case.folder / "store"
    where.mkdir()
    store = Store(where)
    for path in TINY_STORIES.rglob("*"):
        if path.is_file():
            store.put(f"story/{path.relative_to(TINY_STORIES)}", path)
    with ExitStack() as stack:
        bucket = stack.enter_context(ExitStack())
        environ = case.environ(**variables(bucket.enter_context(s3_server(store))))
        server = stack.enter_context(Server(ADDRESS, environ, case.folder))
        server.wait_for_ping()
        bucket.close()

        def cause(load: Load) -> None:
            with engine_replaced(server):
                server.host().kill()
            load.wait_for_parts(4 * case.streams)

        yield row_of("S3 gone, engine killed", case.engine, server, case.streams, cause)
    began = time.monotonic()
    with Server(ADDRESS, environ, case.folder) as late:
        status = late.wait(600)
        said = next((line for line in reversed(late.log) if "s3" in line.lower()), "")
    seconds = time.monotonic() - began
    note = f"it ends with status {status}: {said.strip()[-120:]}"
    yield Row("S3 gone, server started", case.engine, recovered=seconds, failed=int(status == 0), note=note)


# -- Clients that send what is refused, or hardly anything, as fast as they can, beside those that behave --------------

_MORE_MEMORY = 300e6
_CLIENTS = {"idle connections": 1000, "slow senders": 100, "gRPC calls": 10, "gRPC readers": 10}
_MOST_CLIENTS = 20
_SHORT_CLIENTS = 2
"""How many clients there are of each kind that sends without a pause, where all these kinds come together."""
TOKENS = 40
SECONDS, SHORT_SECONDS = 5.0, 0.3
"""How long a flood goes on."""
_TOGETHER = {"all that is sent again and again": (*SENT,), "all that is held open": (*HELD,), "gRPC": (*GRPC,)}
"""The floods of the short form, which share a server. Otherwise each kind has a server of its own."""


def floods(case: Case) -> Iterator[Row]:
    grpc_port = free_port()
    environ = {
        "OPTION_MAX_ROLLING_BATCH_SIZE": str(case.streams + _MOST_CLIENTS),
        "SERVING_TRITON_GRPC_PORT": str(grpc_port),
    }
    kinds_of = _TOGETHER if case.short else {kind: (kind,) for kind in FLOODS}
    with ExitStack() as stack:
        server: Server | None = None
        for name, kinds in kinds_of.items():
            if server is None or not case.short:
                stack.close()
                server = stack.enter_context(case.server(None, **environ))
                # The process that renders chats starts with the first one, which takes seconds on a busy machine.
                chat = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 1}
                assert server.http.post("/invocations", json=chat).status_code == 200
            yield _flood(case, server, name, kinds, grpc_port if kinds[0] in GRPC else server.port)


def _flood(case: Case, server: Server, name: str, kinds: Sequence[str], port: int) -> Row:
    seen: list[str] = []
    usual = _SHORT_CLIENTS if kinds[0] in SENT and case.short else _MOST_CLIENTS

    def cause(load: Load) -> None:
        with flooded(port, {kind: _CLIENTS.get(kind, usual) for kind in kinds}) as count:
            time.sleep(SHORT_SECONDS if case.short else SECONDS)
            load.wait_for_parts(2 * case.streams)
        load.wait_for_parts(2 * case.streams)
        seen.append(", ".join(f"{what}: {number}" for what, number in count.most_common(3)))
        # A flood that nobody answers floods nothing.
        assert count.total() >= BEGUN and SILENT not in count, count

    row = row_of(f"flood: {name}", case.engine, server, case.streams, cause, tokens=TOKENS)
    row.memory_allowed = int(row.memory_before + _MORE_MEMORY)
    row.note = row.note or f"{seen[0]}; {(row.memory - row.memory_before) / 1e6:.0f} MB more"
    return row


_ANY = ("openvino", "scripted", "tensorrt_llm")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("engine_killed", engine_killed, _ANY),
        Kind("engine_stopped", engine_stopped, _ANY),
        Kind("engine_raising", engine_raising, ("scripted", "tensorrt_llm")),
        Kind("poison", poison, ("scripted", "tensorrt_llm"), short=("tensorrt_llm",)),
        Kind("engine_out_of_memory", engine_out_of_memory, ("openvino", "scripted")),
        Kind("server_killed", server_killed, _ANY),
        Kind("server_out_of_memory", server_out_of_memory, _ANY),
        Kind("sigterm", sigterm, _ANY),
        Kind("descriptors_exhausted", descriptors_exhausted, _ANY),
        Kind("disk_full", disk_full, _ANY, short=("scripted", "tensorrt_llm")),
        Kind("s3_gone", s3_gone, ("openvino",), short=("openvino",)),
        Kind("floods", floods, _ANY),
        Kind("hostile_models", hostile_models, ("scripted",), short=()),
        Kind("large_adapter", large_adapter, ("tensorrt_llm",), short=("tensorrt_llm",)),
        Kind("hostile_requests", hostile_requests, ("scripted",)),
        Kind("guide_bombs", guide_bombs, ("openvino",), short=("openvino",)),
        Kind("ray", ray_faults, ("scripted",)),
    )
}
"""The kinds, with the engines that each can be played on, and those of its short form."""
