"""`djl-trtllm package`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from djl_trtllm.commands.console import errors_for_the_reader, progress_printer

app = typer.Typer(add_completion=False)


@app.command()
def package(
    model: Annotated[str, typer.Argument(metavar="DIR", help="A model directory: serving.properties, model files.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The archive.")] = Path("model.tar.gz"),
) -> None:
    """Pack a model directory into a model.tar.gz for `serve` and SageMaker. The same files give the same bytes."""
    with errors_for_the_reader():
        from djl_trtllm.config import load
        from djl_trtllm.errors import ModelError
        from djl_trtllm.model.package import package as pack
        from djl_trtllm.model.remote.hub import HUB_SCHEME
        from djl_trtllm.model.remote.progress import format_bytes
        from djl_trtllm.model.remote.s3 import is_s3

        directory = Path(model)
        if is_s3(model) or model.startswith(HUB_SCHEME):
            raise ModelError(
                f"{model} is an address, and only a directory on this machine can be packed: a model that is elsewhere "
                f"needs no archive (`djl-trtllm serve {model}`). For an archive that names it, pack a directory whose "
                f"serving.properties has option.model_id={model}; for one with its files, download them first"
            )
        if not directory.is_dir():
            raise ModelError(f"{model} is not a directory: name the model directory to pack")
        # Report now what serving would refuse later.
        config = load(directory, {})
        progress = progress_printer()
        for warning in config.warnings:
            progress(f"warning: {warning}")
        names = pack(directory, out, progress)
        if "serving.properties" not in names and config.options.model_id is None:
            progress("note: there is no serving.properties; the model is served with the defaults and its own files")
        progress(f"{out}: {len(names)} files, {format_bytes(out.stat().st_size)}")
