"""`djl-trtllm versus`: one model on several engines, measured in turns."""

from pathlib import Path
from typing import Annotated

import typer

from djl_trtllm.commands import console
from djl_trtllm.commands.console import errors_for_the_reader, print_json, print_report, warn
from djl_trtllm.errors import BenchmarkError

app = typer.Typer(add_completion=False)


@app.command()
def versus(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A directory, an archive, or an address in the hub or S3.")
    ],
    engines: Annotated[
        str, typer.Option(metavar="NAME[=PYTHON],...", help="Engines, with the Python of each: vllm=PYTHON,openvino.")
    ],
    clients: console.ClientsOption = "1,4,16,64",
    load: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts as JSON lines, such as recorded requests.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times that each engine is started and measured.")] = 3,
    duration: console.DurationOption = 10.0,
    warmup: console.WarmupOption = 2.0,
    prompt_tokens: console.PromptTokensOption = 128,
    output_tokens: console.OutputTokensOption = 128,
    instance: Annotated[
        str | None, typer.Option(metavar="NAME", help="AWS instance type whose price per hour counts, as g6.xlarge.")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Keep what is measured, for size and advise.")] = False,
    as_json: console.JsonOption = False,
    plot: console.PlotOption = None,
) -> None:
    """Measure one model on several engines behind this server, in turns (docs/versus.md).

    Exit status: 0; 3 if requests failed; 1 if an engine cannot serve the model; 130 after Ctrl-C, which prints what was
    measured until then.
    """
    with errors_for_the_reader():
        # numpy, the client and the engines' code take a tenth of a second; other commands do without.
        from djl_trtllm.bench.apis import read_prompts
        from djl_trtllm.bench.client import Target
        from djl_trtllm.bench.report import require_chart, write_chart
        from djl_trtllm.bench.session import Load, Plan
        from djl_trtllm.commands.bench import closed_loops
        from djl_trtllm.commands.size_request import Recorder
        from djl_trtllm.engines.hardware import read_states
        from djl_trtllm.sizing.machines import instance_named
        from djl_trtllm.versus.engines import read_engines
        from djl_trtllm.versus.rounds import Measured, Versus, compare

        console.check_seconds(duration=duration)
        if load is not None:
            read_prompts(load, output_tokens, "--load")
        if plot is not None:
            require_chart("--plot", plot)
        priced = None if instance is None else instance_named(instance)
        if priced is not None and priced.hourly_price is None:
            raise BenchmarkError(f"--instance {instance}: there is no on-demand price of it in instances.toml")
        plan = Plan(
            target=Target.parse("http://127.0.0.1", {}),
            api="completions",
            dataset="synthetic" if load is None else str(load),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            loads=closed_loops("--clients", clients or "", Load(duration=duration, warmup=warmup)),
        )
        found = Versus(model, plan, [Measured(engine) for engine in read_engines(engines)], priced)
        if record and not read_states():
            raise BenchmarkError("--record: points are of NVIDIA GPUs, and this machine has none; leave it out")
        recorders = [Recorder.of(model, name, None) for name in found.names if record]
        compare(found, rounds, console.progress_printer())
        warn(*found.warnings)
        if as_json:
            print_json(found.as_json())
        elif found.complete:
            print_report(found.table(), ["Medians (lowest-highest)."], right=range(1, 1 + len(found.names)))
            print_report(found.configuration(), found.conclusion())
        else:
            warn("interrupted before every engine had a round: there is nothing to compare")
        if plot is not None and found.complete:
            write_chart("--plot", plot, found.picture())
        for recorder, measured in zip(recorders, found.engines, strict=bool(recorders)):
            if measured.rounds:
                recorder.write(measured.middle["loads"], prompt_tokens, f"djl-trtllm versus {model}")
        if found.failure is not None:
            raise found.failure
    raise typer.Exit(130 if found.interrupted else 3 if any(measured.failed for measured in found.engines) else 0)
