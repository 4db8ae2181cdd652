"""`djl-trtllm compile`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from djl_trtllm.commands.build_flags import read_arguments
from djl_trtllm.commands.console import errors_for_the_reader, progress_printer
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.logs import configure

app = typer.Typer(add_completion=False)


@app.command(context_settings={"ignore_unknown_options": True})
def compile(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT] [OUT] [--OPTION=VALUE]...",
            help="Checkpoint: a directory (with or without a serving.properties), OWNER/NAME or s3://... Where to "
            "write the engine: a directory, s3://... or hf://OWNER/NAME. Options, also with trtllm-build's names "
            "(--checkpoint_dir, --output_dir, --max_batch_size=256, --gemm_plugin=float16).",
        ),
    ] = None,
) -> None:
    """Compile a checkpoint into an engine directory that `serve` loads without a compiler.

    Without arguments, in a container started by SageMaker Neo, the paths come from Neo's variables.
    """
    configure("info")
    with errors_for_the_reader():
        from djl_trtllm.service.compiling import compile_model, compile_with_neo

        progress = progress_printer()
        if not arguments and "SM_NEO_EXECUTION_CONTEXT" in os.environ:
            compile_with_neo(os.environ, progress)
            return
        checkpoint, out, settings, notes = read_arguments(arguments or ())
        if checkpoint is None or out is None:
            raise DjlTrtllmError("name a checkpoint and an output: djl-trtllm compile CHECKPOINT OUT")
        for note in notes:
            progress(note)
        progress(f"compiled {compile_model(checkpoint, out, os.environ, progress, settings)}")
