"""The `djl-trtllm` command."""

from __future__ import annotations

import gc
import re
import signal
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from djl_trtllm import __version__
from djl_trtllm.commands.console import errors_of_stdout

if TYPE_CHECKING:
    import click

SUMMARIES = {
    "serve": "Serve models over HTTP: /ping, /invocations, /predictions/NAME, /models, /metrics.",
    "config": "Show the resolved configuration: each value, where it came from and what it does.",
    "generate": "Generate text for the prompts in a file and write JSON lines in the same order (docs/offline.md).",
    "bench": "Measure a server under load: throughput, time to first token, inter-token latency "
    "(docs/benchmarking.md).",
    "quality": "Compare the greedy answers of two models or servers to the same prompts (docs/quality.md).",
    "versus": "Measure one model on several engines behind this server, in turns (docs/versus.md).",
    "size": "Estimate what fits into GPU memory: max_num_tokens, KV cache, sequences (docs/sizing.md).",
    "advise": "Name the machines and settings that hold a load, cheapest first, and why the others do not "
    "(docs/advise.md).",
    "translate": "Translate a file or command line of one engine into that of another (docs/translate.md).",
    "compile": "Compile a checkpoint into an engine directory that `serve` loads without a compiler.",
    "package": "Pack a model directory into a model.tar.gz for `serve` and SageMaker. The same files give the same "
    "bytes.",
    "cache": "List, verify and prune the engine cache.",
    "cluster": "Serve a model with several replicas on a Ray cluster (docs/ray.md).",
    "version": "Print the version.",
}
"""The first lines of the commands' help, in the order in which a newcomer meets them.

A command is `app` in the module of its name, except those in `_ELSEWHERE`.
"""

_ELSEWHERE = {"package": ("djl_trtllm.commands.compile", "package_app"), "version": (__name__, "version_app")}


def find_command(name: str) -> click.Command:
    """Import the module of a command, and return the command."""
    module, attribute = _ELSEWHERE.get(name, (f"djl_trtllm.commands.{name}", "app"))
    command = typer.main.get_command(getattr(import_module(module), attribute))
    for each in (command, *getattr(command, "commands", {}).values()):
        _complete_help(each)
    return command


def _complete_help(command: click.Command) -> None:
    """Join the lines of each paragraph, which Typer shows as they are, and restore the help of arguments.

    Click 8.5 has a help of arguments itself, which hides that of Typer up to 0.25.
    """
    command.help = re.sub(r"(?<=\S)\n(?=\S)", " ", command.help or "")
    hints = get_type_hints(command.callback, include_extras=True) if command.callback else {}
    for parameter in command.params:
        if isinstance(parameter, TyperArgument):
            infos = getattr(hints[str(parameter.name)], "__metadata__", ())
            parameter.help = next((info.help for info in infos if isinstance(info, ArgumentInfo)), None)


class Commands(TyperGroup):
    """Imports the module of a command when that runs, so that `--help` and completion need none of them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=summary) for name, summary in SUMMARIES.items()}
        # Click does it too, and the message would have it twice. From 0.26 on Typer does without it.
        self.suggest_commands = not any(base.__module__.startswith("click.") for base in TyperGroup.__mro__)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            command = find_command(str(name))
            if isinstance(command, TyperGroup):
                command.suggest_commands = self.suggest_commands
        return name, command, rest


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


version_app = typer.Typer(add_completion=False)


@version_app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve large language models as DJL Serving and SageMaker do, on TensorRT-LLM, vLLM or OpenVINO."""


_OBJECTS_BETWEEN_COLLECTIONS = 50_000


def main() -> None:
    # What is imported at the start stays: to look for garbage in it again and again takes a tenth of the start.
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    # As Ctrl-C does it, so that what is half done is removed. `serve` drains instead, once it serves.
    signal.signal(signal.SIGTERM, _end)
    with errors_of_stdout():
        app()


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
