"""Aborts, errors and ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from typing import Any

from .common import HANGS, KEPT, PROMPT, attempt, llm_of, name_of, params, ranks, read, read_output, torch_llm


def error_is_raised_by_the_iterator(model: str) -> Any:
    """A request's own failure: where it is raised, and what a further step does."""
    llm = torch_llm(model)

    async def go() -> Any:
        output = llm.generate_async(PROMPT, sampling_params=params(max_tokens=9), streaming=True)
        errors = []
        for _ in range(4):
            try:
                await asyncio.wait_for(output.__anext__(), HANGS)
                errors.append("step")
            except asyncio.TimeoutError:
                errors.append("hangs")
                break
            except Exception as error:
                errors.append(name_of(error))
        return {"steps": errors, "finished": output.finished, "next": await read(llm, max_tokens=2)}

    seen = asyncio.run(go())
    llm.shutdown()
    return seen


def abort_in_queue(which: str, model: str) -> Any:
    """One request runs, another waits and is aborted; is it answered before and after the first has ended?"""
    llm = llm_of(which, model, max_batch_size=1)

    async def go() -> Any:
        running = llm.generate_async(PROMPT, sampling_params=params(max_tokens=4000), streaming=True)
        await running.__anext__()
        waiting = llm.generate_async(PROMPT, sampling_params=params(max_tokens=4), streaming=True)
        waiting.abort()
        waiting_task = asyncio.ensure_future(waiting.__anext__())
        done, _ = await asyncio.wait([waiting_task], timeout=0.5)
        before = bool(done)
        running.abort()
        await read_output(running)
        done, _ = await asyncio.wait([waiting_task], timeout=HANGS)
        reason = waiting.outputs[0].finish_reason if done else None
        tokens = list(waiting.outputs[0].token_ids)
        waiting_task.cancel()
        return {"before": before, "after": reason, "tokens": tokens, "next": (await read(llm, max_tokens=2))["reason"]}

    seen = asyncio.run(go())
    llm.shutdown()
    return seen


def abort(which: str, model: str, after: int, twice: bool = False, **arguments: Any) -> Any:
    """Abort after this number of tokens; the sampling parameter `logprobs` may be among the arguments."""
    fields = {"logprobs": arguments.pop("logprobs")} if "logprobs" in arguments else {}
    llm = llm_of(which, model, **arguments)

    async def go() -> Any:
        output = llm.generate_async(PROMPT, sampling_params=params(max_tokens=40, **fields), streaming=True)
        try:
            seen = await read_output(output, after)
        except AttributeError as error:
            return name_of(error)
        if twice:
            output.abort()
            await asyncio.sleep(0.1)
        return {**seen, "aborted": output.aborted(), "next": (await read(llm, max_tokens=2))["reason"]}

    seen = asyncio.run(go())
    llm.shutdown()
    return seen


def dead_worker(model: str, how: str, **arguments: Any) -> Any:
    """The last rank is killed or stopped from outside while a request runs."""
    llm = torch_llm(model, **arguments)
    KEPT.append(llm)

    async def go() -> Any:
        output = llm.generate_async(PROMPT, sampling_params=params(max_tokens=4000), streaming=True)
        await output.__anext__()
        ranks()[-1].send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        waiting = await read_output(output)
        after = await read(llm, max_tokens=2)
        seen = {"waiting": waiting, "after": after}
        if hasattr(llm, "_check_health"):
            seen["healthy"] = llm._check_health()
        return seen

    seen = asyncio.run(go())
    thread = threading.Thread(target=llm.shutdown, daemon=True)
    thread.start()
    thread.join(HANGS)
    seen["shutdown"] = "hangs" if thread.is_alive() else "returns"
    return seen


def background_error(model: str, ends_worker: bool, lora_request: Any = None, **arguments: Any) -> Any:
    """The engine raises: what waits, what comes after. `ends_worker`: at once, else with the next request."""
    llm = torch_llm(model, **arguments)

    async def go() -> Any:
        waiting = [await read(llm, max_tokens=9, lora_request=lora_request)]
        if not ends_worker:
            waiting.append(await read(llm, max_tokens=2))
        # It comes with the end of the worker, later on a busy machine.
        while llm._executor._error_queue.empty():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return {"waiting": waiting, "next": await read(llm, max_tokens=2), "then": await read(llm, max_tokens=2)}

    seen = asyncio.run(go())
    llm.shutdown()
    return seen


def after_shutdown(model: str) -> Any:
    llm = torch_llm(model)
    llm.shutdown()
    left = [process.pid for process in ranks()]
    return {"error": attempt(lambda: llm.generate_async(PROMPT)), "left": left}


def processes(model: str, **arguments: Any) -> Any:
    """How many ranks there are, and whether a killed parent leaves any."""
    llm = torch_llm(model, **arguments)
    found = ranks()
    seen = {"ranks": len(found), "parents": [os.getpid() in [p.pid for p in rank.parents()] for rank in found]}
    llm.shutdown()
    return seen


def be_killed(model: str) -> Any:
    """Ends without a word; the ranks' ids are printed before."""
    KEPT.append(torch_llm(model))
    print(json.dumps([rank.pid for rank in ranks()]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def unguarded() -> Any:
    """What a process that is a rank gets when it makes an LLM."""
    os.environ["OMPI_COMM_WORLD_RANK"] = "0"
    from tensorrt_llm._fake.mpi import MpiPoolSession

    return attempt(lambda: MpiPoolSession(1))
