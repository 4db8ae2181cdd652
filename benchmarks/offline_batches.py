"""The peer of offline.py: `LLM.generate`, told what to run like raw_openvino.py.

python offline_batches.py MODEL
"""

from __future__ import annotations

import json
import sys
import time

from djl_trtllm import LLM, SamplingParams


def main() -> None:
    with LLM(sys.argv[1]) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            params = SamplingParams(max_tokens=request["tokens"], ignore_eos=True)
            started = time.perf_counter()
            outputs = llm.generate(request["prompts"], params, use_tqdm=False)
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
