"""`djl-trtllm size`: how much memory a model takes and how many tokens fit, estimated, or measured here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from djl_trtllm.commands.console import errors_for_the_reader, find_model, print_answer, say, warn
from djl_trtllm.errors import SizingError

if TYPE_CHECKING:
    from djl_trtllm.commands.comparison import Comparison
    from djl_trtllm.commands.size_report import SizeReport
    from djl_trtllm.commands.size_request import SizeRequest
    from djl_trtllm.finder.measure import Measured
    from djl_trtllm.sizing.machines import Machine


app = typer.Typer(add_completion=False)
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A checkpoint: a directory (with or without a serving.properties), OWNER/NAME or s3://... No weights are "
        "downloaded.",
    ),
]
_machine = partial(typer.Option, rich_help_panel="Machine")
_model = partial(typer.Option, rich_help_panel="Model")
GpuOption = Annotated[list[str] | None, _machine("--gpu", metavar="NAME[:COUNT]", help="GPU, such as h200.")]
GpuMemoryOption = Annotated[
    str | None, _machine("--gpu-memory", metavar="BYTES", help="Memory of each GPU, in bytes or as 80GB.")
]
InstanceOption = Annotated[
    list[str] | None, _machine("--instance", metavar="TYPE", help="AWS instance type, such as g5.12xlarge.")
]
DegreesOption = Annotated[
    list[str] | None, _machine("--tp", metavar="N", help="Tensor parallel degree; max where one machine is sized.")
]
QuantizeOption = Annotated[str | None, _model("--quantize", metavar="METHOD", help="As option.quantize, such as fp8.")]
KvCacheOption = Annotated[
    str | None, _model("--kv-cache-dtype", metavar="TYPE", help="As option.kv_cache_dtype, such as fp8.")
]
BackendOption = Annotated[str | None, _model("--backend", help="tensorrt (an engine, the default), pytorch or vllm.")]
_output = partial(typer.Option, rich_help_panel="Output")
_formula = partial(typer.Option, rich_help_panel="Other ways to a number")
_measure = partial(typer.Option, rich_help_panel="Measure on this machine")
_COMPARE = "Compare AWS instance types by price, or the machines and degrees that are given several times."
_FIND = "Find max_num_tokens by building, loading and serving the model here; goes on after an interrupt."

MOST = 10_000_000
"""The most clients and tokens of a load."""
_OF_FORMULA = {"max_batch", "max_input", "alpha"}
_OF_MEASURE = {"memory", "requests", "request_tokens", "precision", "fresh"}
_OF_ESTIMATE = {"gpu", "gpu_memory", "instance", "compare", "plot", "sequences", "clients", "strict", "images"}


@app.command()
def size(
    context: typer.Context,
    model: ModelArgument = None,
    gpu: GpuOption = None,
    gpu_memory: GpuMemoryOption = None,
    instance: InstanceOption = None,
    tp: DegreesOption = None,
    pp: Annotated[int | None, _machine("--pp", help="Pipeline parallel degree.")] = None,
    quantize: QuantizeOption = None,
    kv_cache_dtype: KvCacheOption = None,
    backend: BackendOption = None,
    isl: Annotated[int | None, _model("--isl", help="Prompt tokens of a sequence.")] = None,
    images: Annotated[
        str | None, _model(metavar="N[:WxH]", help="Images of a prompt, beside its --isl tokens: 2, or 2:1024x768.")
    ] = None,
    osl: Annotated[int | None, _model("--osl", help="Output tokens of a sequence.")] = None,
    max_num_tokens: Annotated[
        int | None, _model(metavar="N", help="Size this number instead of finding one; as option.max_num_tokens.")
    ] = None,
    max_seq_len: Annotated[int | None, _model(metavar="N", help="As option.max_seq_len.")] = None,
    sequences: Annotated[int | None, _model(min=1, help="Sequences that are to fit at a time.")] = None,
    clients: Annotated[int | None, _model(min=1, max=MOST, help="Clients at a time: predict the speed too.")] = None,
    lmi: Annotated[str, _model(metavar="VERSION", help="Measured table: 0.28 or 0.27.")] = "0.28",
    compare: Annotated[bool, _output("--compare", help=_COMPARE)] = False,
    as_json: Annotated[bool, _output("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, _output(metavar="FILE.png|svg", help="Draw a picture.")] = None,
    strict: Annotated[bool, _output("--strict", help="Exit status 1 if it does not fit.")] = False,
    formula: Annotated[bool, _formula("--formula", help="max batch * max input * alpha, without a model.")] = False,
    max_batch: Annotated[int | None, _formula(metavar="N", help="With --formula.")] = None,
    max_input: Annotated[int | None, _formula(metavar="N", help="With --formula.")] = None,
    alpha: Annotated[float, _formula(help="With --formula; above 0, at most 1.")] = 0.2,
    measure: Annotated[bool, _measure("--measure", help=_FIND)] = False,
    memory: Annotated[str | None, _measure(metavar="BYTES", help="Bound of an engine on the CPU, as 8GB.")] = None,
    requests: Annotated[int | None, _measure(min=1, help="Requests at a time. Default: 128.")] = None,
    request_tokens: Annotated[int | None, _measure(min=1, help="Tokens of each prompt. Default: 3700.")] = None,
    precision: Annotated[
        float | None, _measure(min=0, max=1, metavar="SHARE", help="0: to the token. Default: 0.01.")
    ] = None,
    fresh: Annotated[bool, _measure("--fresh", help="Forget what an earlier run has measured.")] = False,
) -> None:
    """Estimate what fits into GPU memory: max_num_tokens, KV cache, sequences (docs/sizing.md).

    Without a machine: the GPUs of this one. Exit status: 0, or 1 if the model does not exist or, with --strict, if it
    does not fit, or fewer than --sequences do. With --measure: 1 if it does not fit, 130 after Ctrl-C.
    """
    with errors_for_the_reader():
        if formula:
            others = set(context.params) - _OF_FORMULA - {"formula", "as_json"}
            _refuse(context, others, "--formula does not use {}: leave out the one or the other")
            _print_formula(max_batch, max_input, alpha, as_json=as_json)
            return
        _refuse(context, _OF_FORMULA, "{}: only with --formula; add that, or use --isl, --osl and --sequences")
        from djl_trtllm.commands.size_request import degrees_to_compare, machines_of, read_request
        from djl_trtllm.sizing.machines import split

        degrees = split(tp or ())
        flags = {
            "backend": backend,
            "tensor_parallel_degree": degrees[0] if len(degrees) == 1 else None,
            "pipeline_parallel_degree": pp,
            "quantize": quantize,
            "kv_cache_dtype": kv_cache_dtype,
            "max_input_len": isl,
            "max_output_len": osl,
            "max_num_tokens": max_num_tokens,
            "max_seq_len": max_seq_len,
        }
        if measure:
            unused = _OF_ESTIMATE | ({"tp"} if len(degrees) > 1 else set())
            _refuse(context, unused, "--measure measures this machine, with one degree: leave out {}")
            settings = {name: str(value) for name, value in flags.items() if value is not None}
            _measure_here(named_model(model), settings, memory, (requests, request_tokens), precision, fresh, as_json)
            return
        _refuse(context, _OF_MEASURE, "{}: only with --measure; add that, or leave out what needs it")
        request = read_request(named_model(model), flags, lmi, images)
        named = machines_of(split(gpu or ()), gpu_memory, split(instance or ()), here=not compare)
        if compare or len(named) != 1 or len(degrees) > 1:
            _refuse(context, {"clients"}, "{}: the speed is of one machine and degree; djl-trtllm advise compares many")
            _refuse(
                context,
                {"plot"},
                "{} draws one model on one machine: leave out --compare and name one --gpu or --instance",
            )
            from djl_trtllm.commands.comparison import Comparison

            found: Comparison | SizeReport = Comparison(request, named, degrees_to_compare(degrees), sequences)
        else:
            found = report = _report(request, named[0], sequences, clients)
            if plot is not None:
                from djl_trtllm.commands.size_report import draw

                draw(plot, report)
                say(Console(stderr=True), f"wrote {plot}")
        print_answer(found.as_json(), found.lines(), as_json=as_json)
        warn(*found.warnings)
    if strict and not found.answered:
        raise typer.Exit(1)


def _refuse(context: typer.Context, unused: set[str], message: str) -> None:
    """Refuse flags without effect, which a reader would believe the answer to be about; `message` has a place for them.

    Raises SizingError.
    """
    given = [
        "MODEL" if parameter.name == "model" else parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in unused
        and (source := context.get_parameter_source(parameter.name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if given:
        raise SizingError(message.format(", ".join(given)))


def named_model(model: str | None) -> str:
    """Return the model that the arguments or the environment name. Raises SizingError without one."""
    found = find_model(model)
    if found is None:
        raise SizingError("no model given: name a checkpoint directory, a model of the Hugging Face hub or s3://...")
    return found


def _print_formula(max_batch: int | None, max_input: int | None, alpha: float, *, as_json: bool) -> None:
    from djl_trtllm.sizing.recommendation import guess_max_num_tokens, halvings

    if max_batch is None or max_input is None:
        raise SizingError("--formula needs --max-batch N and --max-input N; --alpha is 0.2 unless it is given")
    guess = guess_max_num_tokens(max_batch, max_input, alpha)
    tries = list(halvings(guess))
    if tries[1:]:
        then = f"reduce by half until it does: {', '.join(map(str, tries[1:]))}."
    else:
        then = "a smaller number hardly helps: quantise it, or use more GPUs."
    then += " djl-trtllm size MODEL estimates what fits, and --measure finds it."
    lines = [
        f"max_num_tokens = {max_batch} * {max_input} * {alpha:g} = {guess}",
        f"Try it. If the model does not load, {then}",
        "",
        f"option.max_num_tokens={guess}",
    ]
    print_answer({"max_num_tokens": guess, "alpha": alpha, "halvings": tries}, lines, as_json=as_json)


def _report(request: SizeRequest, machine: Machine, sequences: int | None, clients: int | None) -> SizeReport:
    from djl_trtllm.commands.size_report import SizeReport
    from djl_trtllm.sizing.speed import Load

    found, speed = request.on(machine, request.degree_on(machine)), None
    if clients is not None and found.fits:
        speed = request.speed_on(machine, found, Load(request.input_len, request.output_len, clients))
    return SizeReport(request, machine, found, speed, wanted=sequences)


def _measure_here(
    model: str,
    options: Mapping[str, Any],
    memory: str | None,
    load: tuple[int | None, int | None],
    precision: float | None,
    fresh: bool,
    as_json: bool,
) -> None:
    """Measure and print the result; progress is on standard error. `load` is requests and their tokens.

    Exit status: 0 with a result, 1 if nothing fits or a trial fails otherwise, 130 after Ctrl-C.
    """
    # Importing the service takes half a second; other commands do without.
    from djl_trtllm.finder.measure import Settings, load_of, measure, memory_bound
    from djl_trtllm.progress import display_on

    bound = memory_bound("--memory", memory)
    console = Console(stderr=True)
    try:
        found = measure(model, options, load_of(*load), Settings(bound, precision, fresh), display_on(console))
    except KeyboardInterrupt:
        say(console, "interrupted: run the same command again to go on; finished trials are kept")
        raise typer.Exit(130) from None
    print_answer(found.as_json(), _result_lines(found), as_json=as_json)
    if found.max_num_tokens is None:
        raise typer.Exit(1)


def _result_lines(found: Measured) -> list[str]:
    """The result for people; the last line is the option to paste."""
    from djl_trtllm.finder.trial import doing

    if found.max_num_tokens is None:
        last = found.attempts[-1]
        return [
            f"Out of memory with every max_num_tokens down to {last.tokens:,}, while {doing(last.phase)}: "
            f"{last.reason}",
            "Quantise the model (option.quantize), use more GPUs (option.tensor_parallel_degree) or more memory.",
        ]
    seconds = sum(attempt.seconds for attempt in found.attempts)
    top = ", the largest that makes a difference" if found.unbounded else ""
    return [
        f"Maximum: max_num_tokens={found.max_num_tokens:,}{top} ({len(found.attempts)} trials, {seconds:.0f} s)",
        "Recommended, half of it, so that the KV cache has room:",
        f"option.max_num_tokens={found.recommended}",
    ]
