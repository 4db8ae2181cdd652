"""`djl-trtllm translate`: the configuration of one engine as that of another."""

from typing import Annotated, Any

import typer
from rich.console import Console

from djl_trtllm.commands.console import errors_for_the_reader, print_json, say
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Translate a file or command line of one engine into that of another (docs/translate.md).

    The target's text is on standard output; what is near or lost is on standard error. Exit status: 0 if every setting
    has a line, 3 if some are lost, 1 if there is no translation.
    """
    with errors_for_the_reader():
        if explain is not None:
            show_option(explain, as_json=as_json)
        elif not words or to is None:
            raise DjlTrtllmError("expected a file or a command line, and --to ENGINE; or --explain NAME")
        else:
            show_translation(words, to, source, as_json=as_json)


def show_translation(words: list[str], to: str, source: str | None, *, as_json: bool) -> None:
    """Print a translation. Exits with status 3 if something is lost."""
    from djl_trtllm.translate.reading import read
    from djl_trtllm.translate.translation import Exactness, engine_named, translate
    from djl_trtllm.translate.writing import rendered, summary

    engine_named(to)
    found = translate(read(words, None if source is None else engine_named(source)), to)
    if as_json:
        lines = [
            {
                "written": line.written,
                "origin": str(line.origin),
                "exactness": line.exactness.value,
                "reason": line.reason,
                "name": line.name,
                "value": line.value,
            }
            for line in found.lines
        ]
        shown = {"source": found.source, "target": found.target, "lines": lines, "notes": list(found.notes)}
        print_json(shown | {"text": rendered(found)})
    else:
        print(rendered(found), end="")
        console = Console(stderr=True)
        for line in found.lines:
            if line.exactness is not Exactness.SAME:
                say(console, summary(line))
        for note in found.notes:
            say(console, note, label="note:", style="cyan")
    if found.lost:
        raise typer.Exit(_LOST)


def show_option(name: str, *, as_json: bool) -> None:
    """Print one option in every engine. Raises `DjlTrtllmError` for a name that none has."""
    from djl_trtllm.translate.names import names_of
    from djl_trtllm.translate.rows import explained, nearest

    found = explained(name)
    if found is None:
        raise DjlTrtllmError(f"{name} is a name of no engine that is known here{nearest(name)}")
    rows: dict[str, Any] = {}
    for engine, own in found.items():
        version = names_of(engine).version
        if isinstance(own, str):
            rows[engine] = {"version": version, "name": None, "exactness": "lost", "reason": own}
        else:
            near = "near" if own.near else "same"
            written = f"!{own.name}" if own.negated else own.name
            rows[engine] = {"version": version, "name": written, "exactness": near, "reason": own.near}
            rows[engine] |= {"values": dict(own.values)} if own.values else {}
    if as_json:
        print_json(rows)
        return
    for engine, row in rows.items():
        text = " ".join(filter(None, (engine, row["version"])))
        detail = f"{row['exactness']}: {row['reason']}" if row["reason"] else row["exactness"]
        say(Console(), f"{text}: {row['name'] or '-'} ({detail})")
