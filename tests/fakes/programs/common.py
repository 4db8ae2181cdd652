"""What the scenarios share."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
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
        from tensorrt_llm._fake import names

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
