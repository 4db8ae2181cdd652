"""The `djl-trtllm` command."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from djl_trtllm import __version__
from djl_trtllm.commands.bench import bench
from djl_trtllm.commands.cache import app as cache
from djl_trtllm.commands.config import show_configuration, show_differences
from djl_trtllm.commands.console import drop_stdout, errors_for_the_reader, errors_of_stdout, progress_printer
from djl_trtllm.commands.demo import demo_model
from djl_trtllm.commands.deploy import deploy
from djl_trtllm.commands.find_model import SAGEMAKER_MODEL_DIR, find_model
from djl_trtllm.commands.json_option import json_object
from djl_trtllm.commands.package import package
from djl_trtllm.commands.size import size
from djl_trtllm.config import Options, load
from djl_trtllm.config.options.choices import LogFormat, LogLevel
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.logs import configure

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


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
    """Serve large language models as DJL Serving and SageMaker do, on TensorRT-LLM or OpenVINO."""


app.command()(package)
app.command()(deploy)
app.command()(size)
app.command()(bench)
app.add_typer(cache, name="cache")

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[DIR | FILE.tar.gz | OWNER/NAME | s3://...]",
        help="The model. Default: SageMaker's /opt/ml/model if it exists, else HF_MODEL_ID or OPTION_MODEL_ID.",
    ),
]

LevelOption = Annotated[
    LogLevel | None, typer.Option(case_sensitive=False, help="Least level of the log on stderr. Default: log_level.")
]


@app.command()
def serve(
    model: ModelArgument = None,
    port: Annotated[int | None, typer.Option(help="Port. Default: that of inference_address, 8080.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    model_store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of models that clients may register (docs/http-api.md).")
    ] = None,
    strict_memory: Annotated[
        bool, typer.Option("--strict-memory", help="Refuse models that do not fit the GPUs' memory (docs/sizing.md).")
    ] = False,
    demo: Annotated[
        bool, typer.Option("--demo", help="Serve a little model that writes stories, on the embedded engine.")
    ] = False,
    log_level: LevelOption = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(case_sensitive=False, help="Format of the log on stderr. Default: log_format.")
    ] = None,
) -> None:
    """Serve models over HTTP: /ping, /invocations, /predictions/NAME, /models, /metrics."""
    with errors_for_the_reader():
        if demo and model is not None:
            raise DjlTrtllmError(f"--demo serves a model of its own: leave out {model}, or --demo")
        if demo:
            model = str(demo_model())
        environ = dict(os.environ)
        if log_level is not None:
            environ["SERVING_LOG_LEVEL"] = log_level.value
        if log_format is not None:
            environ["SERVING_LOG_FORMAT"] = log_format.value
        _log_as_set(environ)
        # Importing the server takes half a second; `config` and `--help` do without.
        from djl_trtllm.server.app import run
        from djl_trtllm.server.startup import plan_startup

        if port is not None:
            environ["SERVING_INFERENCE_PORT"] = str(port)
        if host is not None:
            environ["SERVING_INFERENCE_HOST"] = host
        if model_store is not None:
            environ["SERVING_MODEL_STORE"] = str(model_store)
        if strict_memory:
            environ["OPTION_STRICT_MEMORY"] = "true"
        # Programs that the server starts, and code of models, have no use for it.
        for name in [name for name in os.environ if name.upper() in ("SERVING_API_KEY", "ARGS_API_KEY")]:
            del os.environ[name]
        options, startup, store = plan_startup(model, environ, found=find_model(None))
        # The model's files may set the log too.
        configure(options.log_level, json=options.log_format is LogFormat.JSON)
        status = run(options, startup, store)
    raise typer.Exit(status)


def _log_as_set(environ: Mapping[str, str]) -> None:
    """Set up the log as the environment says; what is wrong there is reported with what else is."""
    try:
        options = load(None, environ).options
    except ConfigError:
        options = Options()
    configure(options.log_level, json=options.log_format is LogFormat.JSON)


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
    log_level: LevelOption = LogLevel.WARNING,
) -> None:
    """Generate text for the prompts in a file and write JSON lines in the same order (docs/offline.md).

    Exit status: 0 if every prompt succeeded, 3 if some failed (their lines have an `error`), 1 if nothing ran,
    130 after Ctrl-C. A line's own parameters override those of the command.
    """
    console = Console(stderr=True, soft_wrap=True)
    configure((log_level or LogLevel.WARNING).value, console=console)
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
        from djl_trtllm.commands.build_flags import read_arguments
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


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(True)


def main() -> None:
    # As Ctrl-C does it, so that what is half done is removed. `serve` drains instead, once it serves.
    signal.signal(signal.SIGTERM, _end)
    with errors_of_stdout():
        app()


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
