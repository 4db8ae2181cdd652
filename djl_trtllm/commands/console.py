"""Output on the console and arguments, which the commands share. Errors and progress are on standard error.

A terminal gets lines that are wrapped between words, a pipe or a file gets each message in one line.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from djl_trtllm.errors import DjlTrtllmError, clipped
from djl_trtllm.listing import columns, wrapped
from djl_trtllm.progress import TerminalDisplay, shown_on

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


@contextmanager
def errors_for_the_reader() -> Iterator[None]:
    """Print expected errors as a message and exit with status 1, without a traceback; on a terminal, show bars.

    Errors of the system about a file that the user named (too long a name, no permission) are expected, too.
    """
    console = Console(stderr=True)
    try:
        with shown_on(TerminalDisplay(console)) if console.is_terminal else nullcontext():
            yield
    except DjlTrtllmError as error:
        say(console, str(error), label="error:", style="bold red")
        raise typer.Exit(1) from None
    except OSError as error:
        if error.filename is None:
            raise
        say(console, f"{clipped(str(error.filename))}: {error.strerror}", label="error:", style="bold red")
        raise typer.Exit(1) from None


@contextmanager
def errors_of_stdout() -> Iterator[None]:
    """Surround a command: flush stdout at its end, and exit with status 1 and a message if stdout takes no more."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads it any more, which needs no message.
        drop_stdout()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        drop_stdout()
        say(Console(stderr=True), f"cannot write the output: {error.strerror}", label="error:", style="bold red")
        sys.exit(1)


def drop_stdout() -> None:
    """Send stdout to /dev/null: buffered output would fail once more when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def width_of(console: Console) -> int | None:
    """Return the width at which lines are wrapped; None if they are not wrapped."""
    return console.width if console.is_terminal else None


def show(console: Console, text: Text) -> None:
    """Print text that is wrapped already."""
    console.print(text, soft_wrap=True)


def say(console: Console, text: str, *, label: str = "", style: str = "") -> None:
    """Print a message after a label that stands out."""
    line = Text(wrapped(f"{label} {text}" if label else text, width_of(console), indent="  " if label else ""))
    line.stylize(style, 0, len(label))
    show(console, line)


def warn(*warnings: str) -> None:
    """Print warnings on standard error."""
    for warning in warnings:
        say(Console(stderr=True), warning, label="warning:", style="yellow")


def print_json(value: object) -> None:
    """Print a value as JSON, for programs."""
    print(json.dumps(value, indent=2))


def print_answer(value: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print an answer as JSON, or in lines for people."""
    if as_json:
        print_json(value)
        return
    console = Console()
    for line in lines:
        # The rows of a table stay as they are: a cell in the next line would be below another heading.
        if "  " in line.strip():
            show(console, Text(line))
        else:
            say(console, line)


def print_report(rows: Sequence[Sequence[str]], sentences: Iterable[str], *, right: Sequence[int] = ()) -> None:
    """Print a table and the sentences below it; `right` has the numbers of right-aligned columns."""
    for line in columns(rows, right=right):
        print(line)
    for text in sentences:
        say(Console(), text)


def progress_printer() -> Callable[[str], None]:
    console = Console(stderr=True)
    return lambda line: say(console, line)


# -- arguments of several commands -------------------------------------------------------------------------------------

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[DIR | FILE.tar.gz | OWNER/NAME | s3://...]",
        help="The model. Default: SageMaker's /opt/ml/model if it exists, else HF_MODEL_ID or OPTION_MODEL_ID.",
    ),
]

OptionOption = Annotated[
    list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option (docs/options.md).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Write a picture (SVG).")]
ClientsOption = Annotated[
    str | None, typer.Option(metavar="N[,N...]", help="Closed loop: clients that send one request after another.")
]
DurationOption = Annotated[float, typer.Option("--duration", help="Seconds that each load is measured.")]
WarmupOption = Annotated[float, typer.Option("--warmup", min=0, help="Seconds of each load that are not measured.")]
PromptTokensOption = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of synthetic prompts, about.")]
OutputTokensOption = Annotated[int, typer.Option("--output-tokens", min=1, help="Tokens to generate for a prompt.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds that a request may take.")]
ApiKeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="BENCH_API_KEY", show_envvar=True, help="API key of a server, as a bearer token."),
]
ServerModelOption = Annotated[
    str | None, typer.Option("--model", help="Name of the model on a server. Default: the server's first.")
]

SAGEMAKER_MODEL_DIR = Path("/opt/ml/model")


def find_model(model: str | None) -> str | None:
    """Return `model`, else SageMaker's model directory if it has files, else the model that the environment names."""
    if model is not None:
        return model
    if SAGEMAKER_MODEL_DIR.is_dir() and any(SAGEMAKER_MODEL_DIR.iterdir()):
        return str(SAGEMAKER_MODEL_DIR)
    return os.environ.get("HF_MODEL_ID") or os.environ.get("OPTION_MODEL_ID") or None


def check_seconds(**given: float) -> None:
    """Refuse the value of an option that is no number of seconds. Raises DjlTrtllmError."""
    for name, value in given.items():
        if not 0 < value < 1e6:
            raise DjlTrtllmError(f"--{name} {value:g}: expected seconds, above 0")


def bearer(api_key: str | None) -> dict[str, str]:
    """The header of a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def json_object(option: str, text: str) -> dict[str, Any]:
    """Parse the value of an option that is a JSON object. Raises DjlTrtllmError."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise DjlTrtllmError(f"{option} {text}: expected a JSON object: {error}") from None
    return value
