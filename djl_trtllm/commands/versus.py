"""`djl-trtllm versus`: one model on several engines, measured in turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from djl_trtllm.commands.console import errors_for_the_reader, print_json, print_report, progress_printer, warn
from djl_trtllm.errors import BenchmarkError

if TYPE_CHECKING:
    from djl_trtllm.sizing.machines import Instance
    from djl_trtllm.versus.rounds import Versus

app = typer.Typer(add_completion=False)


@app.command()
def versus(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model directory, or its address in the hub or S3.")],
    engines: Annotated[
        str,
        typer.Option(
            metavar="NAME[=PYTHON],...",
            help="Engines, and the Python that has each: vllm=/opt/vllm/bin/python,openvino.",
        ),
    ],
    clients: Annotated[str, typer.Option(metavar="N[,N...]", help="Clients of each load.")] = "1,4,16,64",
    load: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts as JSON lines, such as recorded requests.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times that each engine is started and measured.")] = 3,
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds that each load is measured.")] = 10.0,
    warmup: Annotated[float, typer.Option(min=0, help="Seconds of each load that are not measured.")] = 2.0,
    api: Annotated[str, typer.Option(help="API: chat, completions (OpenAI's), lmi, tgi.")] = "completions",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of synthetic prompts, about.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for a prompt.")] = 128,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 600.0,
    instance: Annotated[
        str | None, typer.Option(metavar="NAME", help="AWS instance type whose price per hour counts, as g6.xlarge.")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Keep what is measured, for size and advise.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Write a picture (SVG).")] = None,
) -> None:
    """Measure one model on several engines behind this server, in turns (docs/versus.md).

    Exit status: 0; 3 if requests failed; 1 if an engine cannot serve the model; 130 after Ctrl-C, which prints what was
    measured until then.
    """
    with errors_for_the_reader():
        # numpy, the client and the engines' code take a tenth of a second; other commands do without.
        from djl_trtllm.bench.apis import APIS, read_prompts
        from djl_trtllm.bench.client import Target
        from djl_trtllm.bench.report import require_chart, write_chart
        from djl_trtllm.bench.session import Load, Plan, Result
        from djl_trtllm.commands.bench import closed_loops
        from djl_trtllm.engines.hardware import read_states
        from djl_trtllm.versus.engines import read_engines
        from djl_trtllm.versus.report import picture_of
        from djl_trtllm.versus.rounds import compare

        if api not in APIS:
            raise BenchmarkError(f"--api {api}: expected one of {', '.join(APIS)}")
        if load is not None:
            read_prompts(load, output_tokens, "--load")
        if plot is not None:
            require_chart("--plot", plot)
        priced = None if instance is None else _priced(instance)
        template = Load(duration=duration, warmup=warmup)
        plan = Plan(
            target=Target.parse("http://127.0.0.1", {}),
            api=api,
            dataset="synthetic" if load is None else str(load),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            timeout=timeout,
            loads=closed_loops("--clients", clients, template),
            template=template,
        )
        chosen = read_engines(engines)
        if record and not read_states():
            raise BenchmarkError("--record: points are of NVIDIA GPUs, and this machine has none; leave it out")
        recorders = []
        if record:
            from djl_trtllm.commands.bench_record import Recorder

            recorders = [Recorder.of(model, engine.name, None) for engine in chosen]
        found = compare(model, chosen, plan, rounds, progress_printer())
        _print(found, priced, as_json=as_json)
        if plot is not None and found.complete:
            write_chart("--plot", plot, picture_of(found))
        for recorder, measured in zip(recorders, found.engines, strict=bool(recorders)):
            if measured.rounds:
                recorder.write(Result(plan, loads=measured.middle.figures), f"djl-trtllm versus {model}")
        if found.failure is not None:
            raise found.failure
    raise typer.Exit(130 if found.interrupted else 3 if any(measured.failed for measured in found.engines) else 0)


def _priced(name: str) -> Instance:
    from djl_trtllm.sizing.machines import instance_named

    instance = instance_named(name)
    if instance.hourly_price is None:
        raise BenchmarkError(f"--instance {name}: there is no on-demand price of {instance.name} in instances.toml")
    return instance


def _print(found: Versus, instance: Instance | None, *, as_json: bool) -> None:
    from djl_trtllm.versus import report

    warn(*found.warnings)
    if as_json:
        print_json(report.as_json(found, instance))
        return
    if not found.complete:
        warn("interrupted before every engine had a round: there is nothing to compare")
        return
    rows, differing = report.table(found, instance), report.configuration(found)
    heading = ["Medians (lowest-highest). Options that differ:"] if differing else []
    print_report(rows, heading, right=range(1, len(rows[0])))
    print_report(differing, report.conclusion(found, instance))
