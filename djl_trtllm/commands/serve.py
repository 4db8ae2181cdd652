"""`djl-trtllm serve`: the HTTP server with its models."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from djl_trtllm.commands.console import ModelArgument, OptionOption, errors_for_the_reader, find_model
from djl_trtllm.config import Options, load
from djl_trtllm.config.options.choices import LogFormat, LogLevel
from djl_trtllm.errors import ConfigError, DjlTrtllmError, ModelError
from djl_trtllm.logs import configure

_NAME = "tiny-stories"
_PACKAGE = Path(__file__).parents[1]


def demo_model(package: Path = _PACKAGE) -> Path:
    """Return the directory of the model of `--demo`: beside the package in a clone, else in the installed package.

    Raises ModelError for an installation without it, such as that of an image.
    """
    for directory in (package.parent / "serving" / "models" / _NAME, package / "demo" / _NAME):
        if directory.is_dir():
            return directory
    raise ModelError(
        "--demo: this installation has no demonstration model, because it was built without serving/models; install "
        "'djl-trtllm[cpu]' from a wheel or a clone, or name a model"
    )


app = typer.Typer(add_completion=False)


@app.command()
def serve(
    model: ModelArgument = None,
    option: OptionOption = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port. Default: that of inference_address, 8080.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    model_store: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Folder of models that clients may register (docs/http-api.md).",
        ),
    ] = None,
    strict_memory: Annotated[
        bool, typer.Option("--strict-memory", help="Refuse models that do not fit the GPUs' memory (docs/sizing.md).")
    ] = False,
    demo: Annotated[
        bool, typer.Option("--demo", help="Serve a little model that writes stories, on the embedded engine.")
    ] = False,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(case_sensitive=False, help="Least level of the log on stderr. Default: log_level."),
    ] = None,
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
        flags = {
            "SERVING_LOG_LEVEL": log_level and log_level.value,
            "SERVING_LOG_FORMAT": log_format and log_format.value,
            "SERVING_INFERENCE_PORT": port,
            "SERVING_INFERENCE_HOST": host,
            "SERVING_MODEL_STORE": model_store,
            "OPTION_STRICT_MEMORY": "true" if strict_memory else None,
        }
        environ = os.environ | {name: str(value) for name, value in flags.items() if value is not None}
        _log_as_set(environ)
        # After what is wrong with the command line or the log has been said: importing the server takes a while.
        from djl_trtllm.server.app import run
        from djl_trtllm.server.application import plan_startup

        # Programs that the server starts, and code of models, have no use for it.
        for name in [name for name in os.environ if name.upper() == "SERVING_API_KEY"]:
            del os.environ[name]
        options, startup, store = plan_startup(model, environ, option or (), found=find_model(None))
        # The model's files may set the log too.
        configure(options.log_level, json=options.log_format is LogFormat.JSON)
        status = run(options, startup, store)
    raise typer.Exit(status)


def _log_as_set(environ: Mapping[str, str]) -> None:
    """Set up the log as the environment says; errors there are reported later, together with all others."""
    try:
        options = load(None, environ).options
    except ConfigError:
        options = Options()
    configure(options.log_level, json=options.log_format is LogFormat.JSON)
