"""`djl-trtllm generate`: text for the prompts in a file, without a server."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from djl_trtllm.commands.console import (
    SAGEMAKER_MODEL_DIR,
    ModelArgument,
    drop_stdout,
    errors_for_the_reader,
    find_model,
    json_object,
)
from djl_trtllm.config.options.choices import LogLevel
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.logs import configure

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    prompts: Annotated[
        Path, typer.Option(metavar="FILE", help="The prompts, one per line: JSON lines or text; - is stdin.")
    ],
    model: ModelArgument = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file for the JSON lines; - is stdout.")] = Path("-"),
    text: Annotated[
        bool, typer.Option("--text", help="Read the prompts as text, even if they look like JSON.")
    ] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum number of generated tokens. Default: 30.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this total share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this number of the likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for every prompt. Default: a new one for each.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A stop string; may be repeated.")] = None,
    n: Annotated[int | None, typer.Option("--n", "-n", help="Sequences per prompt, best first.")] = None,
    parameters: Annotated[
        str, typer.Option(metavar="JSON", help="Other request parameters, as /invocations accepts them.")
    ] = "{}",
    log_level: Annotated[
        LogLevel, typer.Option(case_sensitive=False, help="Least level of the log on stderr.")
    ] = LogLevel.WARNING,
) -> None:
    """Generate text for the prompts in a file and write JSON lines in the same order (docs/offline.md).

    Exit status: 0 if every prompt succeeded, 3 if some failed (their lines have an `error`), 1 if nothing ran,
    130 after Ctrl-C. A line's own parameters override those of the command.
    """
    console = Console(stderr=True, soft_wrap=True)
    configure(log_level.value, console=console)
    flags = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop or None,
        "n": n,
    }
    with errors_for_the_reader():
        # Imported here so that other commands start faster, as in `serve`.
        from djl_trtllm.offline import command

        given = json_object("--parameters", parameters) | {k: value for k, value in flags.items() if value is not None}
        source = find_model(model)
        if source is None:
            raise DjlTrtllmError(
                f"no model given, and {SAGEMAKER_MODEL_DIR} is empty or missing: name a model directory, a "
                "model.tar.gz, a model of the Hugging Face hub or an s3:// address"
            )
        try:
            failed = command.generate_file(source, prompts, out, given, console, text=text)
        except KeyboardInterrupt:
            console.print("interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            drop_stdout()
            raise typer.Exit(141) from None
    raise typer.Exit(3 if failed else 0)
