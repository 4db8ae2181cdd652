"""What becomes of requests that TensorRT-LLM itself fails: `python -m tests.trtllm.failing_program CASE MODEL ADAPTER`.

Without this server in front, which keeps them from it. Prints JSON in the last line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib import import_module
from typing import Any

from djl_trtllm.backends.tensorrt_llm.names import module_of

PROMPT = [5, 6, 7, 8, 9]


def imported(name: str, version: str) -> Any:
    return getattr(import_module(module_of(name, version)), name)


_kept: list[Case] = []
"""An LLM that nobody holds shuts down, which waits for workers that are gone."""


class Case:
    """A loaded LLM. `patience`: seconds without an answer that stand for never."""

    def __init__(self, model: str, **arguments: Any) -> None:
        package = import_module("tensorrt_llm")
        self.version: str = package.__version__
        self.patience = float(os.environ.get("PATIENCE", "30"))
        self.llm = package.LLM(model=model, **arguments)
        _kept.append(self)

    async def read(self, tokens: int, prompt: list[int] = PROMPT, abort: bool = False, **fields: Any) -> str:
        """The reason of its end, or its error."""
        lora_request = fields.pop("lora_request", None)
        params = imported("SamplingParams", self.version)(
            max_tokens=tokens, ignore_eos=True, detokenize=False, **fields
        )
        try:
            result = self.llm.generate_async(prompt, params, lora_request=lora_request, streaming=True)
            if abort:
                result.abort()
            while True:
                await asyncio.wait_for(result.__anext__(), self.patience)
        except StopAsyncIteration:
            return str(result.outputs[0].finish_reason)
        except asyncio.TimeoutError:
            return "hangs"
        except Exception as error:
            return f"{type(error).__name__}: {error}"


async def xgrammar(model: str, _: str) -> Any:
    return await _guide(model, "xgrammar")


async def llguidance(model: str, _: str) -> Any:
    return await _guide(model, "llguidance")


async def _guide(model: str, package: str) -> Any:
    case = Case(model, guided_decoding_backend=package)
    bad = imported("GuidedDecodingParams", case.version)(regex="(")
    other, own = await asyncio.gather(case.read(200), case.read(9, guided_decoding=bad))
    return {"own": own, "other": other, "after": await case.read(3)}


async def token(model: str, _: str) -> Any:
    case = Case(model)
    return {"own": await case.read(3, prompt=[5, 10**6]), "after": await case.read(3)}


async def abort(model: str, _: str) -> Any:
    case = Case(model)
    return {"own": await case.read(40, abort=True, logprobs=1), "after": await case.read(3)}


async def adapter(model: str, path: str) -> Any:
    case = Case(model, enable_lora=True)
    request = imported("LoRARequest", case.version)("adapter", 1, path)
    own = await case.read(3, lora_request=request)
    errors = case.llm._executor._error_queue
    return {"own": own, "worker": "lives" if errors.empty() else "ended"}


def main() -> None:
    case, model, path = sys.argv[1:]
    answer = asyncio.run(globals()[case](model, path))
    print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
