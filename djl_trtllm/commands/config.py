"""`djl-trtllm config`: the resolved configuration, and whether the model can be served with it."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from djl_trtllm.commands.console import (
    JsonOption,
    ModelArgument,
    OptionOption,
    errors_for_the_reader,
    find_model,
    print_json,
    say,
    show,
    warn,
    width_of,
)
from djl_trtllm.errors import DjlTrtllmError

app = typer.Typer(add_completion=False)
_CANNOT = "cannot be served:"
_IN_ORDER = "the configuration is in order; whether the model can be served is not known without its files"
_NOT_LOOKED_AT = 3


@app.command()
def config(
    model: ModelArgument = None,
    option: OptionOption = None,
    as_json: JsonOption = False,
    show_all: Annotated[bool, typer.Option("--all", help="Include options that have their default.")] = False,
    backend: Annotated[
        str | None,
        typer.Option(help="Plan for this backend (tensorrt, pytorch, vllm, openvino), also where it is not installed."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME[:COUNT]", help="Plan for a machine with these GPUs, such as h100:8.")
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Check the configuration alone, without the hub and S3.")
    ] = False,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--diff", metavar="A B", help="Show the differences between two models or configuration files."),
    ] = None,
) -> None:
    """Show the resolved configuration: each value, where it came from and what it does.

    Exit status: 0 if the model can be served, 1 if it cannot or does not exist, 3 if with --offline the configuration
    is in order and the model is on the hub or in S3.
    """
    if diff is not None:
        unused = {
            "MODEL": model,
            "--option": option,
            "--all": show_all,
            "--backend": backend,
            "--gpu": gpu,
            "--offline": offline,
        }
        show_differences(*diff, [name for name, given in unused.items() if given], as_json=as_json)
        return
    with errors_for_the_reader():
        from djl_trtllm.backends.planning import describe as describe_effect, likely_backend, setting_line, with_effects
        from djl_trtllm.config import Backend, explain
        from djl_trtllm.config.options import OPTIONS, DeclaredOption
        from djl_trtllm.engines.hardware import gpus_named
        from djl_trtllm.service.model import preview

        gpus = () if gpu is None else gpus_named(gpu)
        found = preview(find_model(model), os.environ, backend, gpus, arguments=option or (), offline=offline)
        config, plan, refusal = found.config, found.plan, found.refusal
        chosen = likely_backend(config, found.hardware) if plan is None else plan.backend
        if plan is None:
            config = with_effects(config, chosen, under_djl=found.under_djl)
        # Inside DJL Serving some options have another effect.
        on_backend = partial(describe_effect, under_djl=found.under_djl)

        def describe(declared: DeclaredOption, backend: Backend) -> str:
            known = {} if plan is None else plan.effects
            return known.get(declared.name) or on_backend(declared, backend)

        planned = [] if plan is None or refusal is not None else [plan.describe(), *plan.details(), *plan.notes]
        summary = [*planned, *found.remarks, *[_IN_ORDER] * found.offline]
        if as_json:
            shown = explain.as_json(config, chosen, describe=describe)
            told = summary if refusal is None else [*summary, f"{_CANNOT} {refusal}"]
            print_json(shown | {"served": None if found.offline else refusal is None, "summary": told})
        else:
            console = Console()
            show(
                console,
                explain.render(config, chosen, only_set=not show_all, describe=describe, width=width_of(console)),
            )
            for line in ("", *([] if show_all else ["Other options have their default; --all shows them."]), *summary):
                say(console, line)
            if refusal is not None:
                say(console, refusal, label=_CANNOT, style="bold red")
            # The list has the effect of each option: notes and warnings do not repeat it.
            listed = {setting_line(config, declared, describe(declared, chosen)) for declared in OPTIONS.values()}
            for note in config.notes:
                if note not in listed:
                    say(Console(stderr=True), note, label="note:", style="cyan")
            warn(*(warning for warning in config.warnings if warning not in listed))
    if refusal is not None or found.offline:
        raise typer.Exit(1 if refusal is not None else _NOT_LOOKED_AT)


def show_differences(first: Path, second: Path, unused: Sequence[str] = (), *, as_json: bool) -> None:
    """Print what differs between two configurations; refuse `unused` arguments, which --diff does not take."""
    with errors_for_the_reader():
        if unused:
            raise DjlTrtllmError(f"--diff compares its two configurations as they are: leave out {', '.join(unused)}")
        from djl_trtllm.config.explain import diff_as_json, render_diff
        from djl_trtllm.service.model import open_source

        one, other = (open_source(path, os.environ).config for path in (first, second))
        if as_json:
            print_json({"sources": [str(first), str(second)], "differences": diff_as_json(one, other)})
            return
        console = Console()
        show(console, render_diff(one, other, (str(first), str(second)), width_of(console)))
