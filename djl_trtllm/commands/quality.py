"""`djl-trtllm quality`: whether two engines, quantisations or servers answer alike."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from djl_trtllm.commands import console
from djl_trtllm.commands.console import errors_for_the_reader, print_json, print_report, progress_printer, warn
from djl_trtllm.config.options.choices import LogLevel
from djl_trtllm.logs import configure

if TYPE_CHECKING:
    from djl_trtllm.quality.report import Report

app = typer.Typer(add_completion=False)
_SIDE = "A model directory, its serving.properties, an archive, an address of a model, or http(s)://SERVER."


@app.command()
def quality(
    a: Annotated[str, typer.Argument(metavar="A", help=f"The reference. {_SIDE}")],
    b: Annotated[str, typer.Argument(metavar="B", help=f"What is compared with it. {_SIDE}")],
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts as JSON lines, or recorded requests. Default: 32 texts."),
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Tokens to generate for a prompt.")] = 64,
    agreement: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of equal tokens, of those after the same text.")
    ] = 0.98,
    kl: Annotated[float, typer.Option("--kl", min=0, help="Greatest mean KL divergence, in nats.")] = 0.01,
    perplexity: Annotated[float, typer.Option(min=1, help="Greatest ratio of the perplexities.")] = 1.02,
    model: console.ServerModelOption = None,
    api_key: console.ApiKeyOption = None,
    timeout: console.TimeoutOption = 600.0,
    as_json: console.JsonOption = False,
    plot: console.PlotOption = None,
) -> None:
    """Compare the greedy answers of two models or servers to the same prompts (docs/quality.md).

    Exit status: 0 if they agree, 3 if they differ, 1 if they could not be compared.
    """
    configure(LogLevel.WARNING.value)
    with errors_for_the_reader():
        # numpy, the client and the engines' code take a tenth of a second; other commands do without.
        from djl_trtllm.bench.report import require_chart, write_chart
        from djl_trtllm.quality.figures import Thresholds
        from djl_trtllm.quality.report import picture_of, run
        from djl_trtllm.quality.sides import open_side

        console.check_seconds(timeout=timeout)
        if plot is not None:
            require_chart("--plot", plot)
        headers = console.bearer(api_key)
        report = run(
            open_side(a, headers, model, timeout),
            open_side(b, headers, model, timeout),
            prompts,
            output_tokens,
            Thresholds(agreement, kl, perplexity),
            progress_printer(),
        )
        _print(report, as_json=as_json)
        if plot is not None:
            write_chart("--plot", plot, picture_of(report))
    raise typer.Exit(3 if report.differs else 0)


def _print(report: "Report", *, as_json: bool) -> None:
    warn(*report.warnings)
    if as_json:
        print_json(report.as_json())
        return
    print_report(report.table(), report.conclusion())
