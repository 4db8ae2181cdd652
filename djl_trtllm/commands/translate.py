"""`djl-trtllm translate`: the configuration of one engine as that of another."""

from typing import Annotated

import typer
from rich.console import Console

from djl_trtllm.commands.console import JsonOption, errors_for_the_reader, print_json, say
from djl_trtllm.errors import DjlTrtllmError

app = typer.Typer(add_completion=False)
_LOST = 3


@app.command()
def translate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE | FLAGS",
            help="serving.properties, config.pbtxt, config.yaml, a YAML file of an engine, a script, or a command line "
            "in quotes or after --.",
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="lmi, vllm, trtllm-serve, sglang, triton, truss or dynamo.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="The engine of a YAML file, or of flags without a program.")
    ] = None,
    explain: Annotated[str | None, typer.Option(metavar="NAME", help="Show one option in every engine.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Translate a file or command line of one engine into that of another (docs/translate.md).

    The target's text is on standard output; what is near or lost is on standard error. Exit status: 0 if every setting
    has a line, 3 if some are lost, 1 if there is no translation.
    """
    with errors_for_the_reader():
        from djl_trtllm.translate.formats import read, rendered
        from djl_trtllm.translate.translation import engine_named, translate

        if explain is not None:
            show_option(explain, as_json=as_json)
            return
        if not words or to is None:
            raise DjlTrtllmError("expected a file or a command line, and --to ENGINE; or --explain NAME")
        found = translate(read(words, None if source is None else engine_named(source)), to)
        if as_json:
            print_json(vars(found) | {"lines": [line.as_json() for line in found.lines], "text": rendered(found)})
        else:
            print(rendered(found), end="")
            console = Console(stderr=True)
            for line in (line for line in found.lines if line.reason):
                say(console, str(line))
            for note in found.notes:
                say(console, note, label="note:", style="cyan")
    if found.lost:
        raise typer.Exit(_LOST)


def show_option(name: str, *, as_json: bool) -> None:
    """Print one option in every engine. Raises `DjlTrtllmError` for a name that none has."""
    from djl_trtllm.translate.translation import explained

    found = explained(name)
    if as_json:
        print_json(found)
        return
    for engine, row in found.items():
        detail = ": ".join(filter(None, (row["exactness"], row["reason"])))
        say(Console(), f"{' '.join(filter(None, (engine, row['version'])))}: {row['name'] or '-'} ({detail})")
