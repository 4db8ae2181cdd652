"""`djl-trtllm bench`: put load on a server and report what its clients notice."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from djl_trtllm.commands import console
from djl_trtllm.commands.console import errors_for_the_reader, json_object, print_json, print_report, warn
from djl_trtllm.errors import BenchmarkError

if TYPE_CHECKING:
    from djl_trtllm.bench.session import Load, Plan, Progress, Result

app = typer.Typer(add_completion=False)
_record = partial(typer.Option, rich_help_panel="Keep what is measured, for djl-trtllm size and advise")
_RECORD = "Keep a point for each load: MODEL is what the server serves, a checkpoint or a directory with its options."
_ENGINE = "The server's engine: tensorrt_llm, vllm or openvino, with its version. Default: the one that MODEL names."


@app.command()
def bench(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="The server.")] = "http://localhost:8080",
    api: Annotated[str, typer.Option(help="API: chat, completions (OpenAI's), lmi, tgi, triton.")] = "chat",
    concurrency: console.ClientsOption = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R[,R...]", help="Open loop: requests per second at random times (Poisson).")
    ] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Most clients of a sweep.")] = 1024,
    duration: console.DurationOption = 10.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests that are measured, in place of a duration.")
    ] = None,
    warmup: console.WarmupOption = 2.0,
    prompt_tokens: console.PromptTokensOption = 128,
    output_tokens: console.OutputTokensOption = 128,
    dataset: Annotated[
        str, typer.Option(metavar="synthetic|FILE", help="Prompts; a file has JSON lines.")
    ] = "synthetic",
    ignore_eos: Annotated[bool, typer.Option(help="Ask for outputs of exactly the requested length.")] = True,
    model: console.ServerModelOption = None,
    parameters: Annotated[str, typer.Option(metavar="JSON", help="Other parameters of each request.")] = "{}",
    api_key: console.ApiKeyOption = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="Header of each request; may be repeated.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificates to trust (PEM), for https.")] = None,
    timeout: console.TimeoutOption = 600.0,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that the last requests of a load may take.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrival times.")] = 0,
    as_json: console.JsonOption = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report with plots.")] = None,
    record: Annotated[str | None, _record(metavar="MODEL", help=_RECORD)] = None,
    engine: Annotated[str | None, _record(metavar="NAME[==VERSION]", help=_ENGINE)] = None,
    gpu: Annotated[
        str | None, _record(metavar="NAME[:COUNT]", help="The server's GPUs. Default: this machine's.")
    ] = None,
) -> None:
    """Measure a server under load: throughput, time to first token, inter-token latency (docs/benchmarking.md).

    Without --concurrency and --rate a sweep finds the knee: the smallest number of clients at which the server
    generates nearly as much as it can. Exit status: 0; 3 if requests failed or had no end; 1 if none
    succeeded; 130 after Ctrl-C, which prints what was measured until then.
    """
    with errors_for_the_reader():
        # numpy and the client take a tenth of a second; other commands do without.
        from djl_trtllm.bench.client import Target
        from djl_trtllm.bench.report import page, require_chart, server_of, write_chart
        from djl_trtllm.bench.session import Load, Plan

        check_api(api)
        console.check_seconds(duration=duration, timeout=timeout)
        if concurrency is not None and rate is not None:
            raise BenchmarkError("--concurrency and --rate: give one of them")
        if html is not None:
            require_chart("--html", html)
        if record is None and (engine or gpu):
            raise BenchmarkError(f"{'--engine' if engine else '--gpu'}: only with --record MODEL; add that")
        recorder = None
        if record is not None:
            from djl_trtllm.commands.size_request import Recorder

            recorder = Recorder.of(record, engine, gpu)
        template = Load(duration=None if requests else duration, requests=requests, warmup=warmup, drain=drain)
        plan = Plan(
            target=Target.parse(url, _headers(header or [], api_key), None if ca is None else str(ca)),
            api=api,
            model=model,
            parameters=json_object("--parameters", parameters),
            ignore_end=ignore_eos,
            dataset=dataset,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            seed=seed,
            timeout=timeout,
            loads=_loads(template, concurrency, rate),
            template=template,
            most_clients=max_concurrency,
        )
        result = _measure(plan)
        _print(result, as_json=as_json)
        if html is not None:
            write_chart("--html", html, page(result))
        if recorder is not None:
            loads = [figures.as_json() for figures in result.figures]
            recorder.write(loads, prompt_tokens, f"djl-trtllm bench {server_of(plan)}")
    raise typer.Exit(_status(result))


def _measure(plan: Plan) -> Result:
    from djl_trtllm.bench.report import describe
    from djl_trtllm.bench.session import Result, run_here
    from djl_trtllm.progress import display_on

    result = Result(plan)
    display = display_on(Console(stderr=True))

    def show(progress: Progress) -> None:
        display.show("load", describe(progress), phase=progress.load)

    try:
        run_here(show, display.say, result)
    finally:
        display.end("load")
    return result


def _print(result: Result, *, as_json: bool) -> None:
    from djl_trtllm.bench import report

    warn(*result.warnings)
    if as_json:
        print_json(report.as_json(result))
        return
    if not result.figures:
        return
    rows = report.table(result)
    sentences = (report.LATENCIES, *report.conclusion(result), report.counting(result))
    print_report(rows, filter(None, sentences), right=range(len(rows[0])))


def _status(result: Result) -> int:
    if result.interrupted:
        return 130
    if not any(figures.succeeded for figures in result.figures):
        return 1
    return 3 if any(figures.failed or figures.unfinished for figures in result.figures) else 0


def check_api(api: str) -> None:
    """Raise BenchmarkError for an API that no load can be put on."""
    from djl_trtllm.bench.apis import APIS

    if api not in APIS:
        raise BenchmarkError(f"--api {api}: expected one of {', '.join(APIS)}")


def _loads(template: Load, concurrency: str | None, rate: str | None) -> tuple[Load, ...]:
    if concurrency is not None:
        return closed_loops("--concurrency", concurrency, template)
    return tuple(replace(template, rate=each) for each in _numbers("--rate", rate)) if rate is not None else ()


def closed_loops(option: str, text: str, template: Load) -> tuple[Load, ...]:
    """Loads with the numbers of clients that `option` has, separated by commas. Raises BenchmarkError."""
    counts = _numbers(option, text)
    if any(count != int(count) for count in counts):
        raise BenchmarkError(f"{option} {text}: expected whole numbers")
    return tuple(replace(template, concurrency=int(count)) for count in counts)


def _numbers(option: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < 1e6 for value in values):
        raise BenchmarkError(f"{option} {text}: expected numbers above 0, separated by commas")
    return values


def _headers(given: list[str], api_key: str | None) -> dict[str, str]:
    headers = {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon:
            raise BenchmarkError(f"--header {text}: expected NAME:VALUE")
        headers[name.strip()] = value.strip()
    return headers | console.bearer(api_key)
