"""What the tests of the fake do with it, in a process of its own.

`python -m tests.fakes.scenarios [[NAME, ARGUMENTS], ...]`.

A scenario returns what it saw; a list of that is printed as the last line, in JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

PROMPT = [5, 6, 7, 8, 9]
HANGS = 0.6
"""Seconds without an answer that stand for never."""

KEPT: list[Any] = []
"""What nobody refers to is shut down, which takes for ever behind a dead worker."""


def name_of(error: BaseException) -> str:
    """Class and message."""
    return f"{type(error).__name__}: {error}"


def engine_llm(model: str, **arguments: Any) -> Any:
    return importlib.import_module("tensorrt_llm._tensorrt_engine").LLM(model=model, **made(arguments))


def torch_llm(model: str, **arguments: Any) -> Any:
    return importlib.import_module("tensorrt_llm").LLM(model=model, **made(arguments))


def llm_of(which: str, model: str, **arguments: Any) -> Any:
    return engine_llm(model, **arguments) if which == "engine" else torch_llm(model, **arguments)


def made(value: Any) -> Any:
    """Configuration objects from dicts that name their class."""
    if isinstance(value, dict) and "class" in value:
        fields = {key: made(item) for key, item in value.items() if key != "class"}
        from tensorrt_llm._fake import settings as names

        module = importlib.import_module(names.TABLE["owners"][value["class"]]["module"])
        return getattr(module, value["class"])(**fields)
    if isinstance(value, dict):
        return {key: made(item) for key, item in value.items()}
    return value


def params(**fields: Any) -> Any:
    return made({"class": "SamplingParams", "detokenize": False, **fields})


def attempt(call: Callable[[], Any]) -> Any:
    """The result, or the exception as text with its cause."""
    try:
        return call()
    except Exception as error:
        cause = f" <- {name_of(error.__cause__)}" if error.__cause__ is not None else ""
        return name_of(error) + cause


async def read(llm: Any, prompt: list[int] | str = PROMPT, abort_after: int | None = None, **fields: Any) -> Any:
    """Tokens and reason of a streamed request, or its error; "hangs" where nothing comes."""
    options = {name: made(fields.pop(name)) for name in ("lora_request",) if name in fields}
    try:
        output = llm.generate_async(prompt, sampling_params=params(**fields), streaming=True, **options)
        return await read_output(output, abort_after)
    except Exception as error:
        return name_of(error)


async def ask(llm: Any, **fields: Any) -> Any:
    """The same of a request that another thread sends; "blocks" where it does not come back from that."""
    errors: list[str] = []

    def send() -> None:
        try:
            llm.generate_async(PROMPT, sampling_params=params(**fields))
        except Exception as error:
            errors.append(name_of(error))

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    await asyncio.to_thread(sending.join, HANGS)
    if sending.is_alive():
        return "blocks"
    return errors[0] if errors else await read(llm, **fields)


async def read_output(output: Any, abort_after: int | None = None) -> Any:
    tokens: list[int] = []
    if abort_after == 0:
        output.abort()
    while True:
        try:
            step = await asyncio.wait_for(output.__anext__(), HANGS)
        except StopAsyncIteration:
            first = output.outputs[0]
            return {"tokens": tokens, "reason": first.finish_reason, "stop": first.stop_reason, "text": first.text}
        except asyncio.TimeoutError:
            return "hangs"
        tokens += step.outputs[0].token_ids_diff
        if abort_after is not None and len(tokens) == abort_after:
            output.abort()


def ranks() -> list[psutil.Process]:
    """The worker processes of this one, the oldest first."""
    children = psutil.Process().children(recursive=True)
    found = [child for child in children if "tensorrt_llm._fake.mpi" in child.cmdline()]
    return sorted(found, key=psutil.Process.create_time)


# -- what the package has, what constructors do, what is built ---------------------------------------------------------


def signatures() -> Any:
    """All that can be seen of every owner in the table: names and defaults."""
    from tensorrt_llm._fake import settings as names

    seen: dict[str, Any] = {}
    for owner, description in names.TABLE["owners"].items():
        if owner in ("generate_async", "LLM", "BaseLlmArgs") or owner.startswith("LLM."):
            continue
        made_class = getattr(importlib.import_module(description["module"]), owner)
        if hasattr(made_class, "model_fields"):
            seen[owner] = sorted(made_class.model_fields)
        elif dataclasses.is_dataclass(made_class):
            fields = [field.name for field in dataclasses.fields(made_class) if not field.name.startswith("_")]
            plain = [
                name
                for name, value in vars(made_class).items()
                if isinstance(value, property) and name in description["members"]
            ]
            seen[owner] = sorted({*fields, *plain})
        elif hasattr(made_class, "__members__"):
            seen[owner] = sorted(made_class.__members__)
        elif issubclass(made_class, RuntimeError):
            seen[owner] = []
    for owner, module in (("LLM.tensorrt", "tensorrt_llm._tensorrt_engine"), ("LLM.pytorch", "tensorrt_llm")):
        with contextlib.suppress(ImportError):
            seen[owner] = sorted(importlib.import_module(module).LLM._args_class.model_fields)
    return seen


def types_in_the_table() -> Any:
    """Types that are no Python expression."""
    from tensorrt_llm._fake import settings as names

    return [
        member["type"]
        for owner in names.TABLE["owners"].values()
        for member in owner["members"].values()
        if member["kind"] != "method" and isinstance(attempt(functools.partial(names.type_of, member)), str)
    ]


def members_of_results(model: str) -> Any:
    llm = torch_llm(model)
    output = llm.generate(PROMPT, params(max_tokens=2))
    from tensorrt_llm._fake import settings as names

    missing = [name for name in names.members("RequestOutput") if not hasattr(output, name)]
    missing += [name for name in names.members("CompletionOutput") if not hasattr(output.outputs[0], name)]
    missing += [name for name in names.members("LLM") if not hasattr(llm, name)]
    llm.shutdown()
    return missing


def modules() -> Any:
    """What is found without importing, and what imports."""
    spec = importlib.util.find_spec("tensorrt_llm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = Path(spec.submodule_search_locations[0])
    llmapi = importlib.import_module("tensorrt_llm.llmapi")
    from importlib.metadata import version

    return {
        "files": (package / "_tensorrt_engine").exists(),
        "import": attempt(lambda: bool(importlib.import_module("tensorrt_llm._tensorrt_engine").LLM)),
        "BuildConfig": hasattr(llmapi, "BuildConfig"),
        "version": importlib.import_module("tensorrt_llm").__version__,
        "distribution": version("tensorrt_llm"),
        "tensorrt": attempt(lambda: version("tensorrt")),
    }


def construct(which: str, model: str, **arguments: Any) -> Any:
    """The error of a constructor, or "constructed"."""

    def call() -> str:
        llm_of(which, model, **arguments).shutdown()
        return "constructed"

    return attempt(call)


def build_and_save(model: str, engine: str, **arguments: Any) -> Any:
    llm = engine_llm(model, **arguments)
    llm.save(engine)
    steps = [label for label, _ in llm.llm_build_stats.build_steps_info]
    world = len(ranks())
    llm.shutdown()
    return {"files": sorted(path.name for path in Path(engine).iterdir()), "steps": steps, "ranks": world}


def settled(which: str, model: str, **arguments: Any) -> Any:
    """The arguments after the validators."""
    llm = llm_of(which, model, **arguments)
    names = ("max_batch_size", "max_num_tokens", "max_seq_len", "tensor_parallel_size")
    seen = {name: getattr(llm.args, name) for name in names}
    llm.shutdown()
    return seen


def objects(kind: str, **fields: Any) -> Any:
    """The error of making an object, or its explicit fields."""
    return attempt(lambda: made({"class": kind, **fields}).explicit_fields())


def plugin_config() -> Any:
    from tensorrt_llm.plugin import PluginConfig

    plugins = PluginConfig()
    plugins.tokens_per_block = 64
    seen = {
        "constructor": attempt(lambda: PluginConfig(tokens_per_block=64).tokens_per_block),
        "unknown keyword": attempt(lambda: hasattr(PluginConfig(nothing=64), "nothing")),
        "set": plugins.tokens_per_block,
        "unknown": attempt(lambda: setattr(plugins, "nothing", 1)),
        "wrong": attempt(lambda: setattr(plugins, "gemm_swiglu_plugin", "auto")),
        "disabled": attempt(lambda: PluginConfig(context_fmha="disable", nccl_plugin="disable").nccl_plugin),
        "auto": plugins.gpt_attention_plugin,
    }
    plugins.dtype = "bfloat16"
    return {**seen, "auto later": plugins.gpt_attention_plugin}


# -- aborts, errors and ends -------------------------------------------------------------------------------------------


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
        seen = {"waiting": waiting, "after": await ask(llm, max_tokens=2)}
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
        error = name_of(llm._executor._error_queue.queue[0])
        asked = [await ask(llm, max_tokens=2) for _ in range(2)]
        return {"waiting": waiting, "error": error, "next": asked[0], "then": asked[1]}

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


# -- what becomes of requests ------------------------------------------------------------------------------------------


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


def cost(which: str, model: str, tokens: int, streams: int = 256) -> Any:
    """What a streamed token costs: CPU microseconds per response, of the caller and of the worker.

    The caller is the dispatch thread and the event loop, with a consumer that only takes the new tokens. `which` is
    "engine" or "torch"; `model` is long enough for the tokens.
    """
    llm = llm_of(which, model, **({} if which == "engine" else {"max_batch_size": streams}))

    async def one() -> int:
        asked = params(max_tokens=tokens, ignore_eos=True)
        output = llm.generate_async(list(range(10, 110)), sampling_params=asked, streaming=True)
        return sum([len(step.outputs[0].token_ids_diff) async for step in output])

    async def go() -> dict[str, float]:
        before, worker_before = os.times(), ranks()[0].cpu_times()
        got = sum(await asyncio.gather(*(one() for _ in range(streams))))
        after, worker = os.times(), ranks()[0].cpu_times()
        used = after.user + after.system - before.user - before.system
        below = worker.user + worker.system - worker_before.user - worker_before.system
        return {"caller": used / got * 1e6, "worker": below / got * 1e6}

    seen = asyncio.run(go())
    llm.shutdown()
    return seen


def main() -> None:
    """Run one scenario after the other."""
    seen = [globals()[name](**arguments) for name, arguments in json.loads(sys.argv[1])]
    print("\n" + json.dumps(seen), flush=True)
    # A dead worker would keep the interpreter from ending.
    os._exit(0)


if __name__ == "__main__":
    main()
