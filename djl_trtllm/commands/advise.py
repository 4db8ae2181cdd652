"""`djl-trtllm advise`: which machines and settings hold a load, cheapest first, and why the others do not."""

import math
import re
from functools import partial
from typing import Annotated

import typer

from djl_trtllm.commands import size
from djl_trtllm.commands.console import JsonOption, errors_for_the_reader, print_answer, warn
from djl_trtllm.errors import SizingError

app = typer.Typer(add_completion=False)
_goal = partial(typer.Option, rich_help_panel="What is to be held")
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|)", re.IGNORECASE)


@app.command()
def advise(
    model: size.ModelArgument = None,
    clients: Annotated[int, _goal(min=1, max=size.MOST, help="Clients that send one request after another.")] = 1,
    isl: Annotated[int, _goal(min=1, max=size.MOST, help="Prompt tokens of a request.")] = 1024,
    osl: Annotated[int, _goal(min=1, max=size.MOST, help="Output tokens of a request.")] = 256,
    ttft: Annotated[str | None, _goal(metavar="TIME", help="Time to the first token, as 1s or 500ms.")] = None,
    stream: Annotated[
        float | None, _goal(min=0.001, help="Output tokens per second of each stream, such as 20.")
    ] = None,
    budget: Annotated[float | None, _goal(min=0, metavar="USD", help="USD per hour, of one machine.")] = None,
    gpu: size.GpuOption = None,
    gpu_memory: size.GpuMemoryOption = None,
    instance: size.InstanceOption = None,
    tp: size.DegreesOption = None,
    quantize: size.QuantizeOption = None,
    kv_cache_dtype: size.KvCacheOption = None,
    backend: size.BackendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Name the machines and settings that hold a load, cheapest first, and why the others do not (docs/advise.md).

    Without a machine: all AWS instance types. Exit status: 0, or 1 if none holds it or the model does not exist.
    """
    with errors_for_the_reader():
        from djl_trtllm.commands.comparison import Advice, Goals
        from djl_trtllm.commands.size_request import degrees_to_compare, machines_of, read_request
        from djl_trtllm.sizing.machines import aws_machines, split
        from djl_trtllm.sizing.speed import Load

        degrees = degrees_to_compare(split(tp or ()))
        for name, value in (("--stream", stream), ("--budget", budget)):
            if value is not None and not math.isfinite(value):
                raise SizingError(f"{name} {value}: expected a number")
        lengths = {"max_input_len": isl, "max_output_len": osl}
        flags = {"backend": backend, "quantize": quantize, "kv_cache_dtype": kv_cache_dtype, **lengths}
        goals = Goals(Load(isl, osl, clients), None if ttft is None else _seconds(ttft), stream, budget)
        request = read_request(size.named_model(model), flags)
        if request.shortened is not None:
            raise SizingError(f"--isl {isl} --osl {osl}: {request.shortened}; ask for no more than that together")
        machines = machines_of(split(gpu or ()), gpu_memory, split(instance or ()), here=False) or aws_machines()
        advice = Advice(request, machines, goals, degrees)
        print_answer(advice.as_json(), advice.lines(), as_json=as_json)
        warn(*advice.warnings)
    if not advice.holding:
        raise typer.Exit(1)


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    value = 0.0 if match is None else float(match["number"]) / (1000 if match["unit"].lower() == "ms" else 1)
    if not 0 < value < 1e6:
        raise SizingError(f"--ttft {text}: expected a time above 0, as 1s or 500ms")
    return value
