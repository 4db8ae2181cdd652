"""Hosts that are real processes: what only the kernel can show."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from djl_trtllm.executor.protocol import Failed, Ready, Start, Step
from djl_trtllm.executor.request_lines import split_mark
from tests.executor.host_server import Server, request
from tests.executor.probe import has_ended
from tests.support import executors

PARENT = """
import subprocess, sys
descriptor = sys.argv[1]
command = [sys.executable, "-m", "djl_trtllm.executor.process", descriptor]
print(subprocess.Popen(command, pass_fds=[int(descriptor)]).pid, flush=True)
sys.stdin.read()
"""


def test_an_engine_that_is_lost_while_the_event_loop_waits_for_it_is_reported_all_the_same() -> None:
    ours, theirs = socket.socketpair()
    program = Path(__file__).with_name("blocked_host.py")
    command = [sys.executable, str(program), str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    theirs.close()
    server = Server(ours)
    try:
        server.send(Start("__main__:BlockedExecutor", {}))
        assert isinstance(server.receive(), Ready)
        server.send(request(1, origin="story-1"))
        assert server.receive() == Failed("RuntimeError: the other end is gone")
        assert process.wait(60) == 1
        assert process.stderr is not None
        first, *others = process.stderr.read().decode().rstrip().split("\n")
        assert split_mark(first) == ("story-1", "submitting 1")
        assert {split_mark(line)[0] for line in others} == {""}, "the engine's end is no request's"
    finally:
        process.kill()
        process.communicate()
        ours.close()


def test_an_engine_process_that_hangs_ends_with_its_parent() -> None:
    """It does not see that its socket closes; here nobody closes it at all."""
    ours, theirs = socket.socketpair()
    descriptor = theirs.fileno()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    server = Server(ours)
    found: psutil.Process | None = None
    try:
        assert parent.stdout is not None
        found = psutil.Process(int(parent.stdout.readline()))
        server.send(Start(executors.SCRIPTED, {"faults": [{"action": "hang", "at_token": 1}]}))
        assert isinstance(server.receive(), Ready)
        server.send(request(1))
        assert isinstance(server.receive(), Step)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        assert has_ended(found)
    finally:
        if found is not None and found.is_running():
            found.kill()
        parent.kill()
        parent.communicate()
        theirs.close()
        ours.close()
