"""The MPI runtime's daemon: starts the ranks, and ends them when the process that asked for them goes away."""

from __future__ import annotations

import os
import select
import subprocess
import sys


def main() -> None:
    world_size, address = int(sys.argv[1]), sys.argv[2]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tensorrt_llm._fake.mpi", "--rank", str(rank), address], stdin=subprocess.DEVNULL
        )
        for rank in range(world_size)
    ]
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    while True:
        for rank in ranks:
            rank.poll()  # one that has ended is no zombie then
        if poll.poll(200) and not os.read(0, 1):
            break
    for rank in ranks:
        rank.kill()
        rank.wait()


if __name__ == "__main__":
    main()
