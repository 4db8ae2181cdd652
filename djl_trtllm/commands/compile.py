"""`djl-trtllm compile`, which takes the flags of trtllm-build that are options too, and `djl-trtllm package`.

trtllm-build writes `--gemm_plugin=float16`, `--gemm_plugin float16`, and `--strongly_typed` without a value.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from djl_trtllm.commands.console import errors_for_the_reader, progress_printer
from djl_trtllm.config import Config
from djl_trtllm.config.options import DeclaredOption, find, suggest
from djl_trtllm.config.options.option import Scope
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.logs import configure

_CHECKPOINT, _OUT, _LOG_LEVEL = "checkpoint_dir", "output_dir", "log_level"
_TRUTHS = ("enable", "disable", "true", "false")


class CompileArguments(NamedTuple):
    """The command line of `compile`: `settings` are KEY=VALUE pairs, `notes` name the flags without effect."""

    checkpoint: str | None
    out: str | None
    settings: tuple[str, ...]
    notes: tuple[str, ...]


def read_arguments(words: Sequence[str]) -> CompileArguments:
    """Read CHECKPOINT and OUT, as places or flags, and all other flags as options. Raises DjlTrtllmError."""
    places: list[str] = []
    named: dict[str, str] = {}
    settings, notes = [], []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            places.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        option = None if name in (_CHECKPOINT, _OUT, _LOG_LEVEL) else _option(word, name)
        if not equals:
            value = _next_value(rest, word, is_switch=option is not None and option.type.base is bool)
        if option is None:
            named[name] = value
            continue
        # By the name that the user wrote: messages show it, and two names of one option may differ in what they set.
        settings.append(f"option.{name}={value}")
        if option.option.legacy:
            notes.append(f"--{name}: {option.option.effect_everywhere}")
    if _LOG_LEVEL in named:
        notes.append(f"--{_LOG_LEVEL}: no effect: the compiler's whole log is written")
    checkpoint = named.get(_CHECKPOINT) or (places.pop(0) if places else None)
    out = named.get(_OUT) or (places.pop(0) if places else None)
    if places:
        raise DjlTrtllmError(f"{' '.join(places)}: expected one CHECKPOINT and one OUT, in their places or as flags")
    return CompileArguments(checkpoint, out, tuple(settings), tuple(notes))


def _option(word: str, name: str) -> DeclaredOption:
    option = find(f"option.{name}")
    if option is None or option.option.scope is Scope.OPERATOR:
        near = suggest(f"option.{name}")
        hint = "" if near is None else f", did you mean --{near.removeprefix('option.')}?"
        raise DjlTrtllmError(f"{word}: no option has this name{hint} (all options: docs/options.md)")
    return option


def _next_value(rest: list[str], word: str, *, is_switch: bool) -> str:
    """The value that follows a flag without `=`."""
    if is_switch:
        return rest.pop(0) if rest and rest[0].lower() in _TRUTHS else "true"
    if not rest or rest[0].startswith("--"):
        raise DjlTrtllmError(f"{word} needs a value: {word}=VALUE")
    return rest.pop(0)


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
    check: Annotated[
        str | None,
        typer.Option(
            metavar="REFERENCE",
            help="Compare the engine's answers with those of this model or server, as `quality` does; status 3 if they "
            "differ.",
        ),
    ] = None,
) -> None:
    """Compile a checkpoint into an engine directory that `serve` loads without a compiler.

    Without arguments, in a container started by SageMaker Neo, the paths come from Neo's variables.
    """
    configure("info")
    with errors_for_the_reader():
        from djl_trtllm.service.model import compile_model, compile_with_neo

        progress = progress_printer()
        if not arguments and "SM_NEO_EXECUTION_CONTEXT" in os.environ:
            compile_with_neo(os.environ, progress)
            return
        checkpoint, out, settings, notes = read_arguments(arguments or ())
        if checkpoint is None or out is None:
            raise DjlTrtllmError("name a checkpoint and an output: djl-trtllm compile CHECKPOINT OUT")
        for note in notes:
            progress(note)
        engine = compile_model(checkpoint, out, os.environ, progress, settings)
        progress(f"compiled {engine}")
    if check is not None:
        from djl_trtllm.commands.quality import quality

        quality(check, engine)


package_app = typer.Typer(add_completion=False)


@package_app.command()
def package(
    model: Annotated[str, typer.Argument(metavar="DIR", help="A model directory: serving.properties, model files.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The archive.")] = Path("model.tar.gz"),
) -> None:
    """Pack a model directory into a model.tar.gz for `serve` and SageMaker. The same files give the same bytes.

    A file beside it has the parameters for the template of a SageMaker endpoint that follow from the model.
    """
    with errors_for_the_reader():
        from djl_trtllm.config import load
        from djl_trtllm.errors import ModelError
        from djl_trtllm.model.archive import package as pack
        from djl_trtllm.model.remote.fetch import HUB_SCHEME
        from djl_trtllm.model.remote.s3 import is_s3
        from djl_trtllm.progress import format_bytes

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
        file = write_parameters(out, config, progress)
        progress(f"{file}: parameters of serving/sagemaker/endpoint.yaml")


def write_parameters(archive: Path, config: Config, progress: Callable[[str], None]) -> Path:
    """Write the parameters of SageMaker's template that follow from an archive into `parameters_file`; return its path.

    `aws cloudformation deploy --parameter-overrides` reads the file. Other parameters in it stay. Raises ModelError.
    """
    from djl_trtllm.backends.planning import batch_size
    from djl_trtllm.errors import ModelError
    from djl_trtllm.files import file_sha256
    from djl_trtllm.model.archive import parameters_file
    from djl_trtllm.routing.scaling import target_concurrency

    file = parameters_file(archive)
    document: dict[str, Any] = {"Parameters": {}}
    if file.exists():
        try:
            document = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
            msgspec.convert(document, _ParametersFile)
        except msgspec.DecodeError as error:
            raise ModelError(f'{file}: {error}; expected {{"Parameters": {{"NAME": "VALUE"}}}}, or remove it') from None
    parameters: dict[str, str] = document["Parameters"]
    parameters |= {
        "ModelVersion": file_sha256(archive)[:16],
        "TargetConcurrency": str(target_concurrency(batch_size(config))),
    }
    if config.options.ranks is not None:
        parameters["Accelerators"] = str(config.options.ranks)
    elif (former := parameters.pop("Accelerators", None)) is not None:
        progress(
            f"note: Accelerators={former} is no longer in {file}: option.tensor_parallel_degree=max does not say how "
            "many GPUs a copy has; for an inference component give a number"
        )
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return file


class _ParametersFile(msgspec.Struct):
    Parameters: dict[str, str]
