"""Takes the place of a program that tries guides: a guide's text says what happens."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

from djl_trtllm.executor.guides import Trial, Verdict, serve_trials
from djl_trtllm.request import Guide


def make_trial(directory: Path) -> Trial:
    def attempt(guide: Guide) -> Verdict:
        match guide.value.split()[0]:
            case "burn":
                used = resource.getrlimit(resource.RLIMIT_CPU)[0] - 9
                resource.setrlimit(resource.RLIMIT_CPU, (max(1, used), -1))
                while True:
                    pass
            case "hang":
                time.sleep(600)
            case "die":
                os.kill(os.getpid(), 11)
                time.sleep(600)  # the signal reaches any thread, and may be late
            case "bad":
                return Verdict(f"no good {guide.kind.value} in {directory}")
            case "pid":
                return Verdict(str(os.getpid()))
            case "nice":
                return Verdict(str(os.getpriority(os.PRIO_PROCESS, 0)))
            case "noted":
                return Verdict(note="something about it")
        return Verdict()

    return attempt


if __name__ == "__main__":
    serve_trials(make_trial, sys.argv)
