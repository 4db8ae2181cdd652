"""What becomes of requests."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from .common import KEPT, PROMPT, engine_llm, llm_of, name_of, params, ranks, read, torch_llm


def streaming(which: str, model: str, **arguments: Any) -> Any:
    """One request with everything that its steps show."""
    llm = llm_of(which, model, **arguments)

    async def go() -> Any:
        given = params(max_tokens=4)
        output = llm.generate_async(PROMPT, sampling_params=given, streaming=True)
        first_outputs = output.outputs[0]
        same, diffs, totals = [], [], []
        async for step in output:
            same.append(step is output and step.outputs[0] is first_outputs)
            diffs.append(list(step.outputs[0].token_ids_diff))
            totals.append(len(step.outputs[0].token_ids))
        with contextlib.suppress(StopAsyncIteration):
            await output.__anext__()
        # A consumer that comes late gets the responses one by one.
        late = llm.generate_async(PROMPT, sampling_params=params(max_tokens=4), streaming=True)
        await asyncio.sleep(0.3)
        backlog = [len(step.outputs[0].token_ids_diff) async for step in late]
        return {
            "same": same,
            "diffs": diffs,
            "totals": totals,
            "backlog": backlog,
            "mutated": [given.end_id, given._stream_interval],
            "reason": output.outputs[0].finish_reason,
            "finished": output.finished,
            "default_max_tokens": len((await read(llm, max_tokens=32))["tokens"]),
        }

    seen = asyncio.run(go())
    llm.shutdown()
    return seen


def without_loop(model: str) -> Any:
    """generate_async outside a loop, then used inside and outside one."""
    llm = torch_llm(model)
    output = llm.generate_async(PROMPT, sampling_params=params(max_tokens=3), streaming=True)

    async def inside() -> Any:
        try:
            await output.aresult()
        except AssertionError as error:
            return name_of(error)

    error = asyncio.run(inside())
    sync = [list(step.outputs[0].token_ids_diff) for step in output]
    llm.shutdown()
    return {"error": error, "sync": sync}


def requests(
    which: str,
    model: str,
    requests: list[dict[str, Any]],
    together: bool = False,
    shut_down: bool = True,
    **arguments: Any,
) -> Any:
    """What becomes of requests, one after the other or all at once."""
    llm = llm_of(which, model, **arguments)

    async def go() -> Any:
        if together:
            return await asyncio.gather(*(read(llm, **request) for request in requests))
        return [await read(llm, **request) for request in requests]

    seen = asyncio.run(go())
    if shut_down:
        llm.shutdown()
    else:
        KEPT.append(llm)
    return seen


def rounds(which: str, model: str, rounds: list[list[dict[str, Any]]], **arguments: Any) -> Any:
    """What becomes of requests: those of a round run at once, the next round begins when they have ended."""
    llm = llm_of(which, model, **arguments)
    KEPT.append(llm)

    async def go() -> Any:
        return [await asyncio.gather(*(read(llm, **request) for request in requests)) for requests in rounds]

    return asyncio.run(go())


def outputs(which: str, model: str, request: dict[str, Any], **arguments: Any) -> Any:
    """All sequences of one request that is not streamed."""
    llm = llm_of(which, model, **arguments)
    result = llm.generate(PROMPT, params(**request))
    seen = [
        {"tokens": o.token_ids, "reason": o.finish_reason, "logprobs": len(o.logprobs), "index": o.index}
        for o in result.outputs
    ]
    llm.shutdown()
    return seen


def logprobs(which: str, model: str, **arguments: Any) -> Any:
    """The log-probabilities of each step."""
    llm = llm_of(which, model, **arguments)

    async def go() -> Any:
        given = params(max_tokens=3, logprobs=1)
        output = llm.generate_async(PROMPT, sampling_params=given, streaming=True)
        steps = []
        async for step in output:
            first = step.outputs[0]
            steps.append([token_id for entry in first.logprobs_diff for token_id in entry])
        return steps

    seen = asyncio.run(go())
    children = len(ranks())
    llm.shutdown()
    return {"steps": seen, "worker processes": children}


def reading(which: str, model: str) -> Any:
    """Text of a streamed request, as the client's detokenizer makes it."""
    llm = llm_of(which, model)
    prompt = llm.tokenizer.encode("the little dog ran to the big tree and sat down.", add_special_tokens=False)

    async def go() -> Any:
        whole = await read(llm, prompt=prompt, max_tokens=len(prompt), detokenize=True)
        stopped = await read(llm, prompt=prompt, max_tokens=len(prompt), detokenize=True, stop="big")
        return {"whole": whole["text"], "stopped": stopped["text"], "reason": stopped["reason"], "why": stopped["stop"]}

    seen = asyncio.run(go())
    llm.shutdown()
    return seen


def statistics(which: str, model: str, **arguments: Any) -> Any:
    """get_stats_async before, during and after a request."""
    llm = llm_of(which, model, **arguments)

    async def collect(timeout: float) -> list[dict[str, Any]]:
        return [entry async for entry in llm.get_stats_async(timeout)]

    async def go() -> Any:
        before = await collect(0.1)
        await read(llm, max_tokens=4)
        first = await collect(0.6)
        ended = await collect(0.6)
        return {"before": before, "first": first, "ended": len(ended)}

    seen = asyncio.run(go())
    llm.shutdown()
    return seen


def order(model: str, count: int, max_tokens: int, **arguments: Any) -> Any:
    """The most requests that ran at once, the order in which they began, and how many tokens came."""
    llm = engine_llm(model, **arguments)
    began: list[int] = []
    running: set[int] = set()
    tokens: list[int] = []
    most = 0

    async def one(number: int) -> None:
        nonlocal most
        output = llm.generate_async(PROMPT, sampling_params=params(max_tokens=max_tokens), streaming=True)
        async for step in output:
            tokens.extend(step.outputs[0].token_ids_diff)
            if number not in running:
                began.append(number)
                running.add(number)
                most = max(most, len(running))
        running.discard(number)

    async def go() -> None:
        await asyncio.gather(*(one(number) for number in range(count)))

    asyncio.run(go())
    llm.shutdown()
    return {"most": most, "began": began, "tokens": len(tokens)}
