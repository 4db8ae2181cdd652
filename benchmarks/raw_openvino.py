"""The peer of end_to_end.py: OpenVINO GenAI's pipeline in this process, stepped as fast as it goes.

    python raw_openvino.py '{"engine_dir": ..., ...}'     the executor options of `djl-trtllm serve`

Reads lines of JSON from standard input, `{"prompts": [[id, ...], ...], "tokens": ..., "logprobs": ...}`, runs them, and
prints the tokens and the seconds.
"""

from __future__ import annotations

import json
import sys
import time

from djl_trtllm.backends.openvino.executor import OpenVinoExecutor
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.request import Sampling


def main() -> None:
    # The executor is what the host runs; here nothing is between it and the loop.
    executor = OpenVinoExecutor(**json.loads(sys.argv[1]))
    print("ready", flush=True)
    request_id = 0
    for line in sys.stdin:
        request = json.loads(line)
        sampling = Sampling(max_new_tokens=request["tokens"], ignore_eos=True)
        started = time.perf_counter()
        for prompt_ids in request["prompts"]:
            executor.submit(Submit(request_id, prompt_ids, sampling, logprobs=request.get("logprobs", False)))
            request_id += 1
        tokens = 0
        while executor.busy:
            tokens += len(executor.step().tokens)
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
