"""`djl-trtllm config`: the resolved configuration, and whether the model can be served with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from djl_trtllm.commands.console import errors_for_the_reader, say, show, width_of
from djl_trtllm.commands.find_model import ModelArgument, find_model

if TYPE_CHECKING:
    from djl_trtllm.config import Backend
    from djl_trtllm.config.options.registry import DeclaredOption
    from djl_trtllm.service.preview import Preview

app = typer.Typer(add_completion=False)
_CANNOT = "cannot be served:"


@app.command()
def config(
    model: ModelArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Include options that have their default.")] = False,
    backend: Annotated[
        str | None,
        typer.Option(help="Plan for this backend (tensorrt, pytorch, openvino), also where it is not installed."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME[:COUNT]", help="Plan for a machine with these GPUs, such as h100:8.")
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--diff", metavar="A B", help="Show the differences between two models or configuration files."),
    ] = None,
) -> None:
    """Show the resolved configuration: each value, where it came from and what it does.

    Exit status: 0 if the model can be served, 1 if it cannot or does not exist.
    """
    if diff is not None:
        show_differences(*diff, as_json=as_json)
    else:
        show_configuration(find_model(model), as_json=as_json, show_all=show_all, backend=backend, gpu=gpu)


def show_configuration(
    model: str | None, *, as_json: bool, show_all: bool, backend: str | None, gpu: str | None
) -> None:
    """Print the configuration of a model. Exits with status 1 if there is no such model or it cannot be served."""
    with errors_for_the_reader():
        from djl_trtllm.backends.options import with_effects
        from djl_trtllm.backends.select import likely_backend
        from djl_trtllm.config import explain
        from djl_trtllm.engines.gpu_models import gpus_named
        from djl_trtllm.service.preview import preview

        found = preview(model, os.environ, backend, () if gpu is None else gpus_named(gpu))
        chosen = likely_backend(found.config, found.hardware) if found.plan is None else found.plan.backend
        if found.plan is None:
            found = replace(found, config=with_effects(found.config, chosen, under_djl=found.under_djl))
        describe = _describe(found)
        if as_json:
            told = explain.as_json(found.config, chosen, describe=describe)
            told |= {"served": found.refusal is None, "summary": _summary(found)}
            print(json.dumps(told, indent=2))
        else:
            console = Console()
            render = partial(explain.render, describe=describe, width=width_of(console))
            show(console, render(found.config, chosen, only_set=not show_all))
            _conclude(_without_what_is_listed(found, chosen), console, show_all=show_all)
    if found.refusal is not None:
        raise typer.Exit(1)


def show_differences(first: Path, second: Path, *, as_json: bool) -> None:
    """Print what differs between two configurations."""
    with errors_for_the_reader():
        from djl_trtllm.config.diff import diff_as_json, render_diff
        from djl_trtllm.service import open_source

        one, other = (open_source(path, os.environ).config for path in (first, second))
        if as_json:
            differences = diff_as_json(one, other)
            print(json.dumps({"sources": [str(first), str(second)], "differences": differences}, indent=2))
            return
        console = Console()
        show(console, render_diff(one, other, (str(first), str(second)), width_of(console)))


def _describe(found: Preview) -> Callable[[DeclaredOption, Backend], str]:
    """What options do: as the worker inside DJL Serving, if that is where the model is served."""
    from djl_trtllm.backends.options import describe

    return partial(describe, under_djl=found.under_djl)


def _without_what_is_listed(found: Preview, chosen: Backend) -> Preview:
    """Without the notes that repeat the effect which the list has for an option."""
    from djl_trtllm.backends.effects import setting_line
    from djl_trtllm.config.options.registry import OPTIONS

    config, describe = found.config, _describe(found)
    listed = {setting_line(config, declared, describe(declared, chosen)) for declared in OPTIONS.values()}
    return replace(found, config=replace(config, notes=tuple(note for note in config.notes if note not in listed)))


def _summary(found: Preview) -> list[str]:
    if found.refusal is not None:
        return [*found.remarks, f"{_CANNOT} {found.refusal}"]
    if found.plan is None:
        return [*found.remarks]
    return [found.plan.describe(), *found.plan.details(), *found.plan.notes, *found.remarks]


def _conclude(found: Preview, console: Console, *, show_all: bool) -> None:
    """What follows from the options; warnings and notes on standard error."""
    say(console, "")
    if not show_all:
        say(console, "Other options have their default; --all shows them.")
    for line in _summary(found):
        if line.startswith(_CANNOT):
            say(console, line.removeprefix(_CANNOT).lstrip(), label=_CANNOT, style="bold red")
        else:
            say(console, line)
    remarks = Console(stderr=True)
    for note in found.config.notes:
        say(remarks, note, label="note:", style="cyan")
    for warning in found.config.warnings:
        say(remarks, warning, label="warning:", style="yellow")
