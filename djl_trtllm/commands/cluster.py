"""`djl-trtllm cluster`: a model on a Ray cluster."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from djl_trtllm.commands.console import ModelArgument, errors_for_the_reader, progress_printer, say
from djl_trtllm.errors import ConfigError

app = typer.Typer(
    help="Serve a model with several replicas on a Ray cluster (docs/ray.md).",
    no_args_is_help=True,
    add_completion=False,
)

AddressOption = Annotated[
    str,
    typer.Option(envvar="RAY_ADDRESS", help="Address of the cluster. Default: the one that this machine belongs to."),
]
AppOption = Annotated[str, typer.Option("--app", help="Name of the application.")]

_ANY_ADDRESS = "0.0.0.0"  # noqa: S104  # clients on other machines reach it, as they do `serve`


@app.command()
def up(
    model: ModelArgument = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Number of replicas. Default: 1.")] = None,
    autoscale: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX[:CONCURRENCY]", help="Replicas, and sequences on each, instead of --replicas."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="A cluster that runs: deploy there and return. Default: one of this machine alone."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on, of a cluster of this machine.")] = _ANY_ADDRESS,
    port: Annotated[int, typer.Option(help="Port, of a cluster of this machine.")] = 8000,
    name: AppOption = "default",
    route: Annotated[str, typer.Option(help="Path below which it answers.")] = "/",
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option (docs/options.md).")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of a replica. Default: what the options say.")] = None,
    cpus: Annotated[float | None, typer.Option(min=0, help="CPUs of a replica. Default: 1.")] = None,
) -> None:
    """Serve a model with several replicas, on a cluster that runs, or on this machine until Ctrl-C or `down`."""
    with errors_for_the_reader():
        from djl_trtllm.cluster.control import Place, deploy
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
        place = Place(name, route)
        progress = progress_printer()
        if address is not None:
            deploy(arguments, place, address)
            progress(f"{name} runs on the cluster at {address}, at the route {route}")
        else:
            shown = "127.0.0.1" if host == _ANY_ADDRESS else host
            serve_here(arguments, place, host, port, lambda: progress(f"{name} runs at http://{shown}:{port}{route}"))


@app.command("status")
def show_status(address: AddressOption = "auto") -> None:
    """Show the applications of a cluster and the states of their replicas; exit with status 1 if one does not run."""
    with errors_for_the_reader():
        from djl_trtllm.cluster.control import status

        found = status(address)
        console = Console()
        if not found:
            say(console, "no applications")
        for application in found:
            replicas = ", ".join(f"{count} {state}" for state, count in application.replicas.items())
            text = f"{application.state}, replicas: {replicas or 'none'}"
            say(
                console,
                ": ".join(filter(None, [text, application.message])),
                label=f"{application.name}:",
                style="bold",
            )
    if any(application.state != "RUNNING" for application in found):
        raise typer.Exit(1)


@app.command()
def down(name: AppOption = "default", address: AddressOption = "auto") -> None:
    """Remove an application from a cluster. Running requests get `shutdown_timeout` seconds."""
    with errors_for_the_reader():
        from djl_trtllm.cluster.control import delete

        delete(name, address)
        progress_printer()(f"{name} is being removed")


def _option(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError([f"--option {text}: expected NAME=VALUE"])
    return key, value
