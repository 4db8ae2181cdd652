"""`djl-trtllm version`."""

from __future__ import annotations

import typer

from djl_trtllm import __version__

app = typer.Typer(add_completion=False)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)
