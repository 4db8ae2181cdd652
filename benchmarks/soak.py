"""Memory of the server and its engine process over many requests: `python -m benchmarks.soak [MODEL] [--requests N]`.

OpenVINO touches its KV cache block by block, so memory grows until the pool has been walked once, and until the
engine's other caches (kernels by shape, among others) are full. The pool is small here, and growth is counted over the
second half. One request in eight leaves before its answer is
complete, half of the others are streamed, prompts and lengths vary, prefix reuse is on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.servers import Server, of_the_shell, serving

BUNDLED = Path(__file__).parent.parent / "serving" / "models" / "tiny-stories"
WORDS = ("the", "wolf", "girl", "grandmother", "wood", "house", "basket", "red", "hood", "little", "old", "ran", "in")
POOL_TOKENS = 8192
AT_ONCE = 32
ROWS = 10
WALKED_AFTER = ROWS // 2
"""Rows until the pool has been walked for certain, and the caches are full."""

MB = 1e6


@dataclass
class Row:
    """Memory in bytes, after this number of requests."""

    requests: int
    server: int
    host: int
    threads: int
    files: int
    seconds: float

    def show(self) -> str:
        """A line of the table."""
        return (
            f"{self.requests:>9,} {self.server / MB:>12.1f} {self.host / MB:>10.1f} {self.threads:>8} {self.files:>6} "
            f"{self.seconds:>8.1f}"
        )


def request(number: int) -> tuple[dict[str, object], bool]:
    """The request of this number, and whether its client leaves early."""
    rng = random.Random(number)
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
    parameters = {"max_new_tokens": rng.randint(1, 12), "do_sample": rng.random() < 0.5, "details": rng.random() < 0.5}
    return {"inputs": prompt, "parameters": parameters, "stream": rng.random() < 0.5}, rng.random() < 0.125


async def send(port: int, number: int) -> None:
    """Send one request, and read its answer or leave."""
    body, leaves = request(number)
    content = json.dumps(body).encode()
    head = "POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = await (reader.read(16) if leaves else reader.read())
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"request {number}: {answer[:500]!r}")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def send_all(port: int, numbers: Iterator[int]) -> None:
    """Send requests, `AT_ONCE` at a time, until the numbers are used up."""

    async def worker() -> None:
        for number in numbers:
            await send(port, number)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


def measure(server: Server, requests: int, since: float) -> Row:
    """The memory now."""
    process, host = server.process, server.host()
    return Row(
        requests,
        process.memory_info().rss,
        host.memory_info().rss,
        process.num_threads() + host.num_threads(),
        process.num_fds() + host.num_fds(),
        time.monotonic() - since,
    )


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description="Memory of server and engine process over many requests.")
    parser.add_argument("model", nargs="?", type=Path, default=BUNDLED)
    parser.add_argument("--requests", type=int, default=20_000)
    arguments = parser.parse_args()
    environ = of_the_shell(
        OPTION_MAX_TOKENS_IN_PAGED_KV_CACHE=str(POOL_TOKENS),
        OPTION_ENABLE_KV_CACHE_REUSE="true",
    )
    numbers = itertools.count()
    with serving(arguments.model, **environ) as server:
        since = time.monotonic()
        print(f"{'requests':>9} {'server MB':>12} {'host MB':>10} {'threads':>8} {'files':>6} {'seconds':>8}")
        rows = [measure(server, 0, since)]
        print(rows[0].show(), flush=True)
        step = arguments.requests // ROWS
        for row in range(1, ROWS + 1):
            asyncio.run(send_all(server.port, itertools.islice(numbers, step)))
            rows.append(measure(server, row * step, since))
            print(rows[-1].show(), flush=True)
    walked, last = rows[WALKED_AFTER], rows[-1]
    print(
        f"from {walked.requests:,} to {last.requests:,} requests: server {(last.server - walked.server) / MB:+.1f} MB, "
        f"host {(last.host - walked.host) / MB:+.1f} MB"
    )


if __name__ == "__main__":
    main()
