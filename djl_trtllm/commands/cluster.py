"""`djl-trtllm cluster`: a model on a Ray cluster."""

from pathlib import Path
from typing import Annotated, Any

import typer

from djl_trtllm.commands.console import ModelArgument, OptionOption, errors_for_the_reader, progress_printer
from djl_trtllm.errors import ConfigError

app = typer.Typer(
    help="Serve a model with several replicas on a Ray cluster (docs/ray.md).",
    no_args_is_help=True,
    add_completion=False,
)

_ANY_ADDRESS = "0.0.0.0"  # noqa: S104  # clients on other machines reach it, as they do `serve`


@app.callback()
def cluster() -> None:
    """Make `up` a subcommand: Typer would make an only command the program itself."""


@app.command()
def up(
    model: ModelArgument = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Number of replicas. Default: 1.")] = None,
    autoscale: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX[:CONCURRENCY]", help="Replicas, and sequences on each, instead of --replicas."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _ANY_ADDRESS,
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    name: Annotated[str, typer.Option("--app", help="Name of the application.")] = "default",
    route: Annotated[str, typer.Option(help="Path below which it answers.")] = "/",
    option: OptionOption = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of a replica. Default: what the options say.")] = None,
    cpus: Annotated[float | None, typer.Option(min=0, help="CPUs of a replica. Default: 1.")] = None,
) -> None:
    """Serve a model with several replicas, on a Ray cluster of this machine, until Ctrl-C."""
    with errors_for_the_reader():
        from djl_trtllm.cluster.driver import Task
        from djl_trtllm.cluster.machine import serve_here

        given: dict[str, Any] = {
            # Processes of Ray have a working directory of their own.
            "model": str(Path(model).absolute()) if model is not None and Path(model).exists() else model,
            "replicas": replicas,
            "autoscale": autoscale,
            "gpus": gpus,
            "cpus": cpus,
            "options": dict(_option(text) for text in option or ()),
        }
        arguments = {key: value for key, value in given.items() if value is not None}
        progress = progress_printer()
        shown = "127.0.0.1" if host == _ANY_ADDRESS else host
        url = f"http://{shown}:{port}{route}"
        serve_here(Task(arguments, name, route, host, port), lambda: progress(f"{name} runs at {url}"))


def _option(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--option {text}: expected NAME=VALUE")
    return key, value
