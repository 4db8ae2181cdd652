"""One model on many machines: the machines that hold a number of sequences, or a load, cheapest first."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from djl_trtllm.commands.size_report import SizeReport, degrees_of
from djl_trtllm.commands.size_request import SizeRequest
from djl_trtllm.config.options.choices import Quantization
from djl_trtllm.config.sources import Origin
from djl_trtllm.listing import columns, dollars, number, seconds
from djl_trtllm.sizing.machines import PRICES, Machine, aws_machines, usd_per_million
from djl_trtllm.sizing.speed import HINT, Load

_GIB = 1 << 30
_SHOWN = 10


def sized(request: SizeRequest, machines: Iterable[Machine], degrees: Sequence[int] = ()) -> list[SizeReport]:
    """Every machine with every degree, cheapest first, then those without a price; of equals the most sequences."""
    asked = [(machine, degree) for machine in machines for degree in degrees_of(machine, request, degrees)]
    return sorted((SizeReport(request, machine, request.on(machine, degree)) for machine, degree in asked), key=_order)


def _order(one: SizeReport) -> tuple[object, ...]:
    # Where nothing fits, the degree that comes nearest is shown.
    degree = one.tensor_parallel if one.found.fits else -one.tensor_parallel
    return one.price is None, one.price or 0, not one.found.fits, -one.sequences, degree


def first_of_each(found: Iterable[SizeReport]) -> list[SizeReport]:
    """Keep, of machines with the same GPUs, the first."""
    kept: dict[object, SizeReport] = {}
    for one in found:
        kept.setdefault(one.machine.kind, one)
    return list(kept.values())


class Comparison:
    """The answer about a number of sequences at a time; None is one.

    Without `machines`: all AWS instance types, and of types with the same GPUs the cheapest that loads the model.
    `cheapest` is the cheapest machine that holds the sequences, None if none with a price does; `answered`, whether any
    does; `warnings` are those about the cheapest.
    """

    def __init__(
        self, request: SizeRequest, machines: Sequence[Machine], degrees: Sequence[int], sequences: int | None
    ) -> None:
        self._request, self._sequences = request, sequences
        self.all = sized(request, machines or aws_machines(), degrees)
        self.shown = self.all if machines else first_of_each(one for one in self.all if one.loads)
        self._holding = [one for one in self.all if one.sequences >= (sequences or 1)]
        self._priced = any(one.price is not None for one in self.all)
        self.cheapest = next((one for one in self._holding if one.price is not None and one.loads), None)
        self.answered = bool(self._holding)
        self.warnings = () if self.cheapest is None else self.cheapest.warnings

    def as_json(self) -> dict[str, Any]:
        def entry(one: SizeReport) -> dict[str, Any]:
            return one.summary() | {"sequences": one.sequences}

        return {
            "model": self._request.sizes.source,
            "length": self._request.length,
            "sequences_wanted": self._sequences,
            "prices": str(PRICES),
            "cheapest": None if self.cheapest is None else entry(self.cheapest),
            "candidates": [entry(one) for one in self.shown],
        }

    def lines(self) -> list[str]:
        sizes = self._request.sizes
        head = ("machine", "GPUs", "tp", "weights/GPU", "max_num_tokens", "", "KV tokens", "sequences", "USD/h")
        prices = f"Prices: {PRICES}. Only types whose host memory holds the checkpoint are named; one copy of the model"
        return [
            f"{sizes.source}: {sizes.bytes / _GIB:.1f} GiB of weights; sequences of {self._request}",
            "",
            *columns([head, *map(_cells, self.shown)], right=(2, 3, 4, 6, 7, 8)),
            "",
            self.answer,
            *([f"{prices} is counted."] if self._priced else []),
        ]

    @property
    def answer(self) -> str:
        wanted = f"{self._sequences} sequences of {self._request.length} tokens" if self._sequences else "the model"
        if (best := self.cheapest) is not None:
            return (
                f"cheapest for {wanted}: {best.machine.name} ({best.machine.gpus} x {best.machine.gpu}), tp "
                f"{best.tensor_parallel}, {best.price:.2f} USD per hour: {best.sequences} sequences"
            )
        if self._holding:
            least = min(self._holding, key=lambda one: one.machine.memory * one.tensor_parallel)
            dearer = "; none of these machines with a price holds as much" if self._priced else ""
            degree = least.tensor_parallel
            return (
                f"smallest for {wanted}: {degree} x {least.machine.gpu}, tp {degree}: {least.sequences} "
                f"sequences{dearer}"
            )
        if not self.all:
            return f"{wanted}: none of these machines has GPUs for a tensor parallel degree that divides its heads"
        most = max(self.all, key=lambda one: one.sequences)
        if most.sequences == 0:
            return f"{wanted}: none of these machines holds it; quantise (--quantize fp8), or spread it over more GPUs"
        return f"{wanted}: none of these machines holds them; the most is {most.sequences} on {most.machine.name}"


def _cells(one: SizeReport) -> tuple[str, ...]:
    found = one.found
    estimated = "estimate" if found.row is None else "measured"
    holds = (str(found.max_num_tokens), estimated, f"{one.kv_tokens:,}", str(one.sequences))
    return (
        *one.machine.cells(one.tensor_parallel),
        str(one.tensor_parallel),
        f"{found.estimate.weights / _GIB:.1f} GiB",
        *(holds if found.fits else ("out of memory", "", "", "")),
        dollars(one.price),
    )


# -- the machines that hold a load -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goals:
    """The goals that a machine has to hold; None is no goal. `budget` is the price of one machine in USD per hour."""

    load: Load
    ttft: float | None = None
    stream: float | None = None
    """Output tokens per second of each stream."""
    budget: float | None = None

    def missed_by(self, one: SizeReport) -> Iterator[str]:
        """Why a setting does not hold the load, a reason for each goal; none if it does."""
        price, speed = one.price, one.speed
        if not one.loads:
            yield f"the host's memory of {(one.machine.host_memory or 0) / _GIB:.0f} GiB does not hold the checkpoint"
        elif one.machine.gpu_model is None:
            yield "the GPU is unknown, and so are its bandwidth and speed; name one with --gpu"
        elif speed is None:
            yield one.found.refusal or "no sequence of this length fits into the KV cache"
        else:
            if self.ttft is not None and speed.ttft_seconds > self.ttft:
                waiting = speed.load.clients - speed.running
                why = f", where {waiting} of {speed.load.clients} requests wait for room" if waiting else ""
                yield f"the first token takes {seconds(speed.ttft_seconds)}{why}"
            if self.stream is not None and speed.per_stream < self.stream:
                yield f"a stream has {number(speed.per_stream)} tokens per second"
        if self.budget is not None and (price is None or price > self.budget):
            yield "it has no price" if price is None else f"it costs {price:.2f} USD per hour"

    def as_json(self) -> dict[str, Any]:
        wanted = {"ttft_seconds": self.ttft, "tokens_per_second_per_stream": self.stream, "usd_per_hour": self.budget}
        return vars(self.load) | wanted

    def __str__(self) -> str:
        wanted = {
            f"first token within {seconds(self.ttft or 0)}": self.ttft,
            f"{number(self.stream or 0)} tokens per second of each stream": self.stream,
            f"at most {self.budget or 0:,.2f} USD per hour": self.budget,
        }
        return ", ".join([str(self.load), *(text for text, goal in wanted.items() if goal is not None)])


class Advice:
    """Every machine with every degree, and with fp8 where the GPU has it and the options leave it open.

    A machine has as many copies of the model as it has GPUs for. `holding` has the best setting of each machine that
    holds all goals, cheapest first; `failing` the other machines in that order, each with the setting that comes
    nearest, and what it misses. `warnings` are those about the first that holds them.
    """

    def __init__(self, request: SizeRequest, machines: Sequence[Machine], goals: Goals, degrees: Sequence[int]) -> None:
        self.request, self.goals = request, goals
        fast = [one for one in machines if one.gpu_model is not None and "fp8" in one.gpu_model.flops]
        asked = [(request, machines), *((each, fast) for each in _in_fp8(request))]
        settings = [_under(goals.load, one) for each, able in asked for one in sized(each, able, degrees)]
        settings = [one for one in settings if one.copies]
        missed = {id(one): list(goals.missed_by(one)) for one in settings}

        def distance(one: SizeReport) -> tuple[object, ...]:
            reasons = missed[id(one)]
            return one.speed is None, len(reasons), one.speed.ttft_seconds if one.speed and reasons else 0, _best(one)

        chosen = sorted(first_of_each(sorted(settings, key=distance)), key=_best)
        self.holding = [one for one in chosen if not missed[id(one)]]
        failing = [(one.machine.name, _setting(one), missed[id(one)]) for one in chosen if missed[id(one)]]
        kinds = {one.machine.kind for one in chosen}
        for one in (one for one in machines if one.kind not in kinds):
            kinds.add(one.kind)
            gpus = f"{one.gpus or ''} GPU{'s' * (one.gpus != 1)}".strip()
            failing.append((one.name, "", [f"its {gpus} cannot divide the model so"]))
        self.failing = [{"machine": name, "setting": how, "reason": "; ".join(why)} for name, how, why in failing]
        self.warnings = self.holding[0].warnings if self.holding else ()

    def lines(self) -> list[str]:
        """One page: what holds the load, the lines to paste for the first, why the others do not."""
        holding = self.holding
        lines = [f"{self.request.sizes.source}: {self.goals}", ""]
        if holding:
            head = ("machine", "GPUs", "setting", "tok/s", "stream", "TTFT", "USD/h", "USD/M")
            lines += columns([head, *map(_row, holding[:_SHOWN])], right=range(3, len(head)))
            lines += [f"and {len(holding) - _SHOWN} more"] if len(holding) > _SHOWN else []
            best = holding[0]
            # Each comment has a line of its own: what a terminal of 80 columns wraps would be pasted as an option.
            lines += ["", f"# For serving.properties on {best.machine.name}"]
            if best.copies > 1:
                lines.append(f"# {best.copies} copies: djl-trtllm cluster up MODEL --replicas {best.copies}")
            lines += [*(f"option.{name}={value}" for name, value in best.settings.items()), ""]
        else:
            lines += ["None of these machines holds it.", ""]
        if self.failing:
            lines += ["Not held by:", *columns([["", *each.values()] for each in self.failing]), ""]
        return [*lines, f"Prices: {PRICES}. {HINT}"]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.request.sizes.source,
            "goals": self.goals.as_json(),
            "prices": str(PRICES),
            "holding": [
                {
                    "machine": one.machine.name,
                    "gpu": one.machine.gpu,
                    "gpus": one.machine.gpus,
                    "usd_per_hour": one.price,
                    "copies": one.copies,
                    "tokens_per_second": one.throughput,
                    "usd_per_million_tokens": usd_per_million(one.price, one.throughput),
                    "speed_of_a_copy": one.speed and one.speed.as_json(None),
                    "options": {f"option.{name}": value for name, value in one.settings.items()},
                }
                for one in self.holding
            ],
            "not_holding": self.failing,
        }


def _in_fp8(request: SizeRequest) -> Iterator[SizeRequest]:
    """The request with weights in fp8, unless they are quantised already or the engine does not quantise them."""
    options = request.config.options
    if not (request.sizes.quantization or options.quantize or options.quant_algo or request.engine == "pytorch"):
        config = request.config.replace(Origin.derived("djl-trtllm advise"), quantize=Quantization.FP8)
        yield replace(request, config=config, settings={**request.settings, "quantize": "fp8"})


def _under(load: Load, one: SizeReport) -> SizeReport:
    """A machine with copies of the model that share the clients evenly; none if it has too few GPUs."""
    ranks = one.conditions.ranks
    # More copies than clients have nothing to do.
    copies = min(load.clients, (one.machine.gpus or ranks) // ranks)
    if not (copies and one.sequences and one.machine.gpu_model):
        return replace(one, copies=copies)
    share = replace(load, clients=-(-load.clients // copies))
    return replace(one, copies=copies, speed=one.request.speed_on(one.machine, one.found, share))


def _best(one: SizeReport) -> tuple[object, ...]:
    """The cheapest machine first, then settings that leave the weights as they are, then the fastest."""
    # GPUs without a number cost each.
    gpus = one.conditions.ranks if one.machine.gpus is None else 0
    return one.price or math.inf, gpus, one.conditions.quantization is not None, -one.throughput


def _row(one: SizeReport) -> tuple[str, ...]:
    assert one.speed is not None  # of what holds a load
    return (
        *one.machine.cells(one.conditions.ranks),
        _setting(one),
        number(one.throughput),
        number(one.speed.per_stream),
        seconds(one.speed.ttft_seconds),
        dollars(one.price),
        dollars(usd_per_million(one.price, one.throughput)),
    )


def _setting(one: SizeReport) -> str:
    """The copies, the degree and what quantises the weights: `2 x tp 1 fp8`."""
    copies = f"{one.copies} x " if one.copies > 1 else ""
    return f"{copies}tp {one.tensor_parallel} {one.conditions.quantization or ''}".rstrip()
