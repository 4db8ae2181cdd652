"""Batches without a server: OpenVINO GenAI's pipeline, stepped as fast as it goes, or `LLM.generate`.

    python batches.py raw '{"engine_dir": ..., ...}'     the executor options of `djl-trtllm serve`
    python batches.py llm MODEL

Reads lines of JSON from standard input, `{"prompts": [[id, ...], ...], "tokens": ..., "logprobs": ...}`, runs them, and
prints the tokens and the seconds. `Peer` is such a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from djl_trtllm import LLM, SamplingParams

MODEL = Path(__file__).parents[1] / "serving" / "models" / "tiny-stories"
BEGINNINGS = (
    "tell me a story of the little red riding hood",
    "Once upon a time, in a dark wood,",
    "The wolf knocked on the door of the cottage and said",
    "Tell me a story about a fox and a bear",
)


class Peer:
    """A process that runs the batches that come on its standard input. Ends the program if it ends."""

    def __init__(self, kind: str, argument: str, environ: Mapping[str, str] = os.environ) -> None:
        command = [sys.executable, __file__, kind, argument]
        self.process = psutil.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**environ})
        self._read()

    def run(self, prompts: list[list[int]], tokens: int, *, logprobs: bool = True) -> dict[str, float]:
        """`tokens` and `seconds` of a batch."""
        request = {"prompts": prompts, "tokens": tokens, "logprobs": logprobs}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer: dict[str, float] = json.loads(self._read())
        return answer

    def rate(self, prompts: list[list[int]], tokens: int, *, logprobs: bool = True) -> float:
        """Tokens per second."""
        answer = self.run(prompts, tokens, logprobs=logprobs)
        return answer["tokens"] / answer["seconds"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> str:
        line: str = self.process.stdout.readline()
        if not line:
            sys.exit("a process ended")
        return line


def _raw(options: str) -> Callable[[dict[str, Any]], int]:
    # The executor is what the host runs; here nothing is between it and the loop.
    from djl_trtllm.backends.openvino.executor import OpenVinoExecutor
    from djl_trtllm.executor.protocol import Submit
    from djl_trtllm.request import Sampling

    executor, numbers = OpenVinoExecutor(**json.loads(options)), iter(range(1 << 62))

    def run(request: dict[str, Any]) -> int:
        sampling, tokens = Sampling(max_new_tokens=request["tokens"], ignore_eos=True), 0
        for ids in request["prompts"]:
            executor.submit(Submit(next(numbers), ids, sampling, logprobs=request["logprobs"]))
        while executor.busy:
            tokens += len(executor.step().tokens)
        return tokens

    return run


def _llm(model: str) -> Callable[[dict[str, Any]], int]:
    llm = LLM(model)

    def run(request: dict[str, Any]) -> int:
        params = SamplingParams(max_tokens=request["tokens"], ignore_eos=True)
        outputs = llm.generate(request["prompts"], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def main() -> None:
    run = {"raw": _raw, "llm": _llm}[sys.argv[1]](sys.argv[2])
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        tokens = run(request)
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
