"""What a streamed token costs in the process of the caller.

`python -m tests.fakes.programs.cost BACKEND MODEL TOKENS [STREAMS]`, with the fake's environment.
BACKEND is "engine" or "torch"; MODEL is long enough for TOKENS. Prints CPU microseconds per response: of this process
(dispatch thread and event loop, with a consumer that only takes the new token ids) and of the worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from .common import llm_of, params, ranks


def main() -> None:
    which, model, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    streams = int(sys.argv[4]) if len(sys.argv) > 4 else 256
    llm = llm_of(which, model, **({} if which == "engine" else {"max_batch_size": streams}))

    async def one() -> int:
        asked = params(max_tokens=tokens, ignore_eos=True)
        output = llm.generate_async(list(range(10, 110)), sampling_params=asked, streaming=True)
        return sum([len(step.outputs[0].token_ids_diff) async for step in output])

    async def go() -> dict[str, float]:
        before, worker_before = os.times(), worker_seconds()
        got = sum(await asyncio.gather(*(one() for _ in range(streams))))
        after, worker_after = os.times(), worker_seconds()
        used = after.user + after.system - before.user - before.system
        return {"caller": used / got * 1e6, "worker": (worker_after - worker_before) / got * 1e6}

    def worker_seconds() -> float:
        times = ranks()[0].cpu_times()
        return float(times.user + times.system)

    print(json.dumps(asyncio.run(go())))
    llm.shutdown()


if __name__ == "__main__":
    main()
