"""`djl-trtllm size`: how much memory a model takes and how many tokens fit, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from djl_trtllm.commands.console import errors_for_the_reader, say
from djl_trtllm.commands.find_model import find_model

if TYPE_CHECKING:
    from djl_trtllm.commands.size_request import SizeRequest
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
_MACHINE, _MODEL, _OUTPUT, _OTHER = "Machine", "Model", "Output", "Other ways to a number"
_MEASURE = "Measure on this machine"
_FORMULA = ("max_batch", "max_input", "alpha")


@app.command()
def size(
    context: typer.Context,
    model: ModelArgument = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:COUNT]", help="GPU, such as h200.", rich_help_panel=_MACHINE),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Memory of each GPU, in bytes or as 80GB.", rich_help_panel=_MACHINE),
    ] = None,
    instance: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="AWS instance type, such as g5.12xlarge.", rich_help_panel=_MACHINE),
    ] = None,
    tp: Annotated[
        list[str] | None,
        typer.Option("--tp", metavar="N", help="Tensor parallel degree, or max.", rich_help_panel=_MACHINE),
    ] = None,
    pp: Annotated[int | None, typer.Option("--pp", help="Pipeline parallel degree.", rich_help_panel=_MACHINE)] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="METHOD", help="As option.quantize, such as fp8.", rich_help_panel=_MODEL)
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="As option.kv_cache_dtype, such as fp8.", rich_help_panel=_MODEL)
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="tensorrt (an engine, the default) or pytorch.", rich_help_panel=_MODEL)
    ] = None,
    isl: Annotated[
        int | None, typer.Option("--isl", help="Prompt tokens of a sequence.", rich_help_panel=_MODEL)
    ] = None,
    osl: Annotated[
        int | None, typer.Option("--osl", help="Output tokens of a sequence.", rich_help_panel=_MODEL)
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Sequences that are to fit at a time.", rich_help_panel=_MODEL)
    ] = None,
    lmi: Annotated[
        str, typer.Option(metavar="VERSION", help="Measured table: 0.28 or 0.27.", rich_help_panel=_MODEL)
    ] = "0.28",
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Compare AWS instance types by price, or the machines and degrees that are given several times.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_OUTPUT)] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="Draw a picture.", rich_help_panel=_OUTPUT)
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit status 1 if it does not fit.", rich_help_panel=_OUTPUT)
    ] = False,
    like: Annotated[
        str | None,
        typer.Option(metavar="trtllm-bench", help="Use the heuristic of trtllm-bench.", rich_help_panel=_OTHER),
    ] = None,
    formula: Annotated[
        bool,
        typer.Option("--formula", help="max batch * max input * alpha, without a model.", rich_help_panel=_OTHER),
    ] = False,
    max_batch: Annotated[int | None, typer.Option(metavar="N", help="With --formula.", rich_help_panel=_OTHER)] = None,
    max_input: Annotated[int | None, typer.Option(metavar="N", help="With --formula.", rich_help_panel=_OTHER)] = None,
    alpha: Annotated[float, typer.Option(help="With --formula; above 0, at most 1.", rich_help_panel=_OTHER)] = 0.2,
    check_tables: Annotated[
        bool,
        typer.Option("--check-tables", help="Compare the estimate with the measured tables.", rich_help_panel=_OTHER),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Find max_num_tokens by building, loading and serving the model here; goes on after an interrupt.",
            rich_help_panel=_MEASURE,
        ),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Bound of an engine on the CPU, as 8GB.", rich_help_panel=_MEASURE),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time. Default: 128.", rich_help_panel=_MEASURE)
    ] = None,
    request_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each prompt. Default: 3700.", rich_help_panel=_MEASURE)
    ] = None,
    precision: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="SHARE", help="0: to the token. Default: 0.01.", rich_help_panel=_MEASURE),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget what an earlier run has measured.", rich_help_panel=_MEASURE)
    ] = False,
) -> None:
    """Estimate what fits into GPU memory: max_num_tokens, KV cache, sequences (docs/sizing.md).

    Without a machine: the GPUs of this one. Exit status: 0, or 1 if the model does not exist or, with --strict, if it
    does not fit, or fewer than --sequences do. With --measure: 1 if it does not fit, 130 after Ctrl-C.
    """
    with errors_for_the_reader():
        if formula:
            _refuse_others(context, "--formula", *_FORMULA, "formula", "as_json")
            _print_formula(max_batch, max_input, alpha, as_json=as_json)
            return
        if check_tables:
            _refuse_others(context, "--check-tables", "check_tables")
            _print_tables()
            return
        from djl_trtllm.commands.size_request import machines_of, read_request
        from djl_trtllm.errors import SizingError
        from djl_trtllm.sizing.machines import split

        degrees = split(tp or ())
        if like not in (None, "trtllm-bench"):
            raise SizingError(f"--like {like}: expected trtllm-bench")
        _refuse_what_only_a_formula_uses(context)
        flags = {
            "backend": backend,
            "tensor_parallel_degree": degrees[0] if len(degrees) == 1 else None,
            "pipeline_parallel_degree": pp,
            "quantize": quantize,
            "kv_cache_dtype": kv_cache_dtype,
            "max_input_len": isl,
            "max_output_len": osl,
        }
        settings = {name: str(value) for name, value in flags.items() if value is not None}
        if not measure and (memory, requests, request_tokens, precision, fresh) != (None, None, None, None, False):
            raise SizingError("--memory, --requests, --request-tokens, --precision and --fresh are flags of --measure")
        if measure:
            others = (gpu, gpu_memory, instance, compare, plot, like, sequences, strict, len(degrees) > 1)
            if any(others):
                raise SizingError(
                    "--measure measures this machine: leave out --gpu, --gpu-memory, --instance, --compare, --plot, "
                    "--like, --sequences, --strict and further degrees"
                )
            from djl_trtllm.commands.size_measure import Asked, measure_command

            asked = Asked(memory, requests, request_tokens, precision, fresh, as_json)
            measure_command(_named(model), settings, asked)
            return
        request = read_request(_named(model), settings, lmi)
        named = machines_of(split(gpu or ()), gpu_memory, split(instance or ()), here=not compare)
        single = len(named) == 1 and len(degrees) < 2
        if like is not None and (not single or compare or plot or sequences or strict):
            raise SizingError(
                "--like prints one heuristic for one machine: leave out --compare, --plot, --sequences, --strict and "
                "further machines and degrees"
            )
        if compare or not single:
            fits = _print_comparison(request, named, degrees, sequences, as_json=as_json, plot=plot)
        elif like is not None:
            fits = _print_bench(request, named[0], as_json=as_json)
        else:
            fits = _print_report(request, named[0], sequences, as_json=as_json, plot=plot)
    if strict and not fits:
        raise typer.Exit(1)


def _given(context: typer.Context) -> set[str]:
    """Parameters that the command line names."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _flags(context: typer.Context, names: set[str]) -> str:
    written = (parameter for parameter in context.command.params if parameter.name in names)
    return ", ".join("MODEL" if one.name == "model" else one.opts[0] for one in written)


def _refuse_others(context: typer.Context, flag: str, *used: str) -> None:
    """What would have no effect is refused: the reader would take the answer for one about it."""
    from djl_trtllm.errors import SizingError

    if others := _given(context) - set(used):
        raise SizingError(f"{flag} does not use {_flags(context, others)}: leave out the one or the other")


def _refuse_what_only_a_formula_uses(context: typer.Context) -> None:
    from djl_trtllm.errors import SizingError

    if lost := _given(context) & set(_FORMULA):
        raise SizingError(f"{_flags(context, lost)}: a flag of --formula; add it, or use --isl, --osl and --sequences")


def _named(model: str | None) -> str:
    from djl_trtllm.errors import SizingError

    found = find_model(model)
    if found is None:
        raise SizingError("no model given: name a checkpoint directory, a model of the Hugging Face hub or s3://...")
    return found


def _print_formula(max_batch: int | None, max_input: int | None, alpha: float, *, as_json: bool) -> None:
    from djl_trtllm.errors import SizingError
    from djl_trtllm.sizing.formula import guess_max_num_tokens, halvings

    if max_batch is None or max_input is None:
        raise SizingError("--formula needs --max-batch N and --max-input N; --alpha is 0.2 unless it is given")
    guess = guess_max_num_tokens(max_batch, max_input, alpha)
    tries = list(halvings(guess))
    if as_json:
        print(json.dumps({"max_num_tokens": guess, "alpha": alpha, "halvings": tries}, indent=2))
        return
    console = Console()
    say(console, f"max_num_tokens = {max_batch} * {max_input} * {alpha:g} = {guess}")
    if tries[1:]:
        then = f"reduce by half until it does: {', '.join(map(str, tries[1:]))}."
    else:
        then = "a smaller number hardly helps: quantise it, or use more GPUs."
    then += " djl-trtllm size MODEL estimates what fits, and --measure finds it."
    say(console, f"Try it. If the model does not load, {then}")
    say(console, f"\noption.max_num_tokens={guess}")


def _print_tables() -> None:
    from djl_trtllm.sizing import check_tables

    print(check_tables.render(check_tables.rows()))


def _print_report(
    request: SizeRequest, machine: Machine, sequences: int | None, *, as_json: bool, plot: Path | None
) -> bool:
    from djl_trtllm.commands.size_report import Report

    report = Report(request, machine, request.on(machine, request.degree_on(machine)))
    if plot is not None:
        from djl_trtllm.commands.size_plot import draw

        draw(plot, report)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        _print(report.lines())
        remarks = Console(stderr=True)
        for warning in report.warnings:
            say(remarks, warning, label="warning:", style="yellow")
        if sequences is not None and report.sequences < sequences:
            missing = f"{sequences} sequences of {request.length} tokens do not fit, {report.sequences} do"
            say(remarks, missing, label="warning:", style="yellow")
        if plot is not None:
            say(remarks, f"wrote {plot}")
    return report.found.fits and report.sequences >= (sequences or 0)


def _print_comparison(
    request: SizeRequest,
    machines: list[Machine],
    degrees: list[str],
    sequences: int | None,
    *,
    as_json: bool,
    plot: Path | None,
) -> bool:
    from djl_trtllm.commands.size_comparison import Comparison
    from djl_trtllm.errors import SizingError

    if plot is not None:
        raise SizingError("--plot draws one model on one machine: leave out --compare and name one --gpu or --instance")
    if not all(degree.isdigit() and int(degree) for degree in degrees):
        raise SizingError(f"--tp {','.join(degrees)}: expected numbers of at least 1 to compare")
    found = Comparison(request, machines, [int(degree) for degree in degrees], sequences)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        _print(found.lines())
    return found.answered


def _print_bench(request: SizeRequest, machine: Machine, *, as_json: bool) -> bool:
    from djl_trtllm.sizing.trtllm_bench import BenchModel, bench_settings

    options = request.config.options
    degree = request.degree_on(machine)
    quantization = (options.quantize.value.upper() if options.quantize else None) or request.sizes.quantization
    kv_dtype = options.kv_cache_dtype.value.upper()
    model = BenchModel.of(request.sizes, quantization, None if kv_dtype == "AUTO" else kv_dtype)
    found = bench_settings(
        model, machine.memory, request.input_len, request.output_len, degree, options.pipeline_parallel_degree
    )
    told: dict[str, Any] = {
        "max_batch_size": found.max_batch_size,
        "max_num_tokens": found.max_num_tokens,
        "requests": found.kv_requests,
        "warnings": list(found.warnings),
    }
    if as_json:
        print(json.dumps(told, indent=2))
        return True
    _print(
        [
            f"trtllm-bench's heuristic for {request.sizes.source} on {machine}, tensor parallel {degree}: "
            f"{found.kv_requests:.1f} requests of {request.input_len} + {request.output_len} tokens fit",
            "",
            f"option.tensor_parallel_degree={degree}",
            f"option.max_num_tokens={found.max_num_tokens}",
            f"option.max_rolling_batch_size={found.max_batch_size}",
        ]
    )
    for warning in found.warnings:
        say(Console(stderr=True), warning, label="warning:", style="yellow")
    return True


def _print(lines: list[str]) -> None:
    """Lines whose columns have their place: they are not wrapped."""
    print("\n".join(lines))
