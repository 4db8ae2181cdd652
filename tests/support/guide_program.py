"""Takes the place of the process that tries guides: a guide's text says what happens."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection

from djl_trtllm.executor.guide_process import Verdict, decode_guide, encode_verdict


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            guide = decode_guide(connection.recv_bytes())
        except EOFError:
            return
        if guide.value == "hang":
            time.sleep(600)
        if guide.value == "die":
            os.kill(os.getpid(), 11)
        problem = "no good" if guide.value.startswith("bad") else None
        connection.send_bytes(encode_verdict(Verdict(problem, os.getpid())))


if __name__ == "__main__":
    main()
