"""The question and the answer of `djl-trtllm advise`: which machines and settings hold a load, and why others do not.

An answer is one page: a row for each machine that holds the load, the lines to paste, a line for each that does not.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from djl_trtllm.commands.size_report import SizeReport, SizeRequest
from djl_trtllm.commands.speed_report import HINT, number, seconds, speed_json
from djl_trtllm.config.options.choices import Quantization
from djl_trtllm.config.sources import Origin
from djl_trtllm.listing import columns
from djl_trtllm.sizing.machines import PRICES, Machine, usd_per_million
from djl_trtllm.sizing.recommendation import Recommendation, degrees_of
from djl_trtllm.sizing.speed import Load, Speed

_SHOWN = 10


@dataclass(frozen=True)
class Goals:
    """What is to be held; None for what does not matter. `budget` is in USD per hour, of one machine."""

    load: Load
    ttft: float | None = None
    stream: float | None = None
    """Output tokens per second of each stream."""
    budget: float | None = None

    def __str__(self) -> str:
        parts = [
            str(self.load),
            "" if self.ttft is None else f"first token within {seconds(self.ttft)}",
            "" if self.stream is None else f"{number(self.stream)} tokens per second of each stream",
            "" if self.budget is None else f"at most {self.budget:,.2f} USD per hour",
        ]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Setting:
    """One way to run the model on a machine: as many copies as it has GPUs for, which share the clients evenly.

    `speed` is that of one copy; None if the model does not fit or the GPU's speed is unknown.
    """

    request: SizeRequest
    machine: Machine
    found: Recommendation
    copies: int
    speed: Speed | None

    @property
    def ttft(self) -> float:
        return math.inf if self.speed is None else self.speed.ttft

    @property
    def stream(self) -> float:
        """Output tokens per second of each stream."""
        return 0.0 if self.speed is None else self.speed.per_stream

    @property
    def price(self) -> float:
        """USD per hour; infinite without a price."""
        return self.machine.hourly_price or math.inf

    @property
    def tokens_per_second(self) -> float:
        return 0.0 if self.speed is None else self.copies * self.speed.tokens_per_second

    @property
    def dollars(self) -> float | None:
        """USD per million output tokens."""
        price = self.machine.hourly_price
        return None if price is None or self.speed is None else usd_per_million(price, self.tokens_per_second)

    @property
    def gpus(self) -> tuple[str, int | None]:
        """Machines with the same GPUs differ in what they cost and in the host's memory only."""
        return self.machine.gpu, self.machine.gpus

    @property
    def quantization(self) -> str:
        return self.found.estimate.conditions.quantization or "as stored"

    def __str__(self) -> str:
        copies = f"{self.copies} copies, " if self.copies > 1 else ""
        return f"{self.machine.name}, {copies}tp {self.found.estimate.conditions.tensor_parallel}, {self.quantization}"

    def misses(self, goals: Goals) -> dict[str, str]:
        """The goals that it does not hold, each with the reason: `memory`, `gpu`, `ttft`, `stream`, `budget`."""
        missed: dict[str, str] = {}
        if goals.budget is not None and self.price > goals.budget:
            priced = self.price < math.inf
            missed["budget"] = f"it costs {self.price:.2f} USD per hour" if priced else "it has no price"
        if self.machine.host_memory is not None and self.machine.host_memory <= self.request.sizes.bytes:
            gib = f"{self.machine.host_memory / 2**30:.0f} GiB"
            return {"memory": f"the host's memory of {gib} does not hold the checkpoint"} | missed
        if self.machine.gpu_model is None:
            return {"gpu": "the GPU is unknown, and so are its bandwidth and speed; name one with --gpu"} | missed
        if self.speed is None:
            return {"memory": self.found.refusal or "no sequence of this length fits into the KV cache"} | missed
        if goals.ttft is not None and self.ttft > goals.ttft:
            waiting = self.speed.load.clients - self.speed.running
            why = f", where {waiting} of {self.speed.load.clients} requests wait for room" if waiting else ""
            missed["ttft"] = f"the first token takes {seconds(self.ttft)}{why}"
        if goals.stream is not None and self.stream < goals.stream:
            missed["stream"] = f"a stream has {number(self.stream)} tokens per second"
        return missed


class Advice:
    """Every machine with every degree, and with fp8 where the GPU has it and the options leave it open."""

    def __init__(self, request: SizeRequest, machines: Sequence[Machine], goals: Goals, degrees: Sequence[int]) -> None:
        self.request, self.goals, self._degrees = request, goals, degrees
        self._machines = machines
        narrow = _in_fp8(request)
        self._settings = [
            setting
            for machine in machines
            for asked in (request, narrow)
            if asked is request or (asked is not None and machine.gpu_model and "fp8" in machine.gpu_model.flops)
            for setting in _settings_of(asked, machine, goals.load, degrees)
        ]

    @cached_property
    def holding(self) -> list[Setting]:
        """The best setting of each machine that holds all goals, cheapest machine first, then those without a price.

        Better is one that leaves the weights as they are stored, then one that generates more.
        """
        best: dict[object, Setting] = {}
        for setting in sorted(self._settings, key=_order):
            if not setting.misses(self.goals):
                best.setdefault(setting.gpus, setting)
        return list(best.values())

    @cached_property
    def failing(self) -> list[tuple[str, str, str]]:
        """The other machines in the same order: name, the setting that comes nearest, and what it misses."""
        holding = {setting.gpus for setting in self.holding}
        nearest: dict[object, Setting] = {}
        for setting in sorted(self._settings, key=self._distance):
            if setting.gpus not in holding:
                nearest.setdefault(setting.gpus, setting)
        tried = {setting.machine.name for setting in self._settings}
        return [
            *(
                (one.machine.name, str(one), "; ".join(one.misses(self.goals).values()))
                for one in sorted(nearest.values(), key=_order)
            ),
            *(
                (one.name, one.name, f"its {one.gpus} GPU{'s' if one.gpus != 1 else ''} cannot divide the model so")
                for one in self._machines
                if one.name not in tried
            ),
        ]

    def _distance(self, setting: Setting) -> tuple[object, ...]:
        missed = setting.misses(self.goals)
        return "memory" in missed, len(missed), setting.ttft, _order(setting)

    @property
    def nearest(self) -> list[str]:
        """What would be held if one goal were another, where none holds all."""
        lines = [
            *self._other("ttft", lambda one: one.ttft, lambda value: f"{math.ceil(100 * value) / 100:g}s"),
            *self._other("stream", lambda one: -one.stream, lambda value: f"{math.floor(-10 * value) / 10:g}"),
            *self._other("budget", lambda one: one.price, lambda value: f"{math.ceil(100 * value) / 100:.2f}"),
            *self._fewer_clients(),
        ]
        return lines or ["no machine misses a single goal only: relax several of them, or name more machines"]

    def _other(self, goal: str, value: Callable[[Setting], float], write: Callable[[float], str]) -> Iterator[str]:
        near = [one for one in self._settings if set(one.misses(self.goals)) == {goal} and value(one) < math.inf]
        if near:
            best = min(near, key=value)
            yield f"--{goal} {write(value(best))} is held by {best}"

    def _fewer_clients(self) -> Iterator[str]:
        """The most clients, of halves of the number, that one of the machines holds with the other goals."""
        clients = self.goals.load.clients // 2
        while clients:
            goals = replace(self.goals, load=replace(self.goals.load, clients=clients))
            fewer = Advice(self.request, self._machines, goals, self._degrees)
            if fewer.holding:
                yield f"--clients {clients} is held by {fewer.holding[0]}"
                return
            clients //= 2

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.request.sizes.source,
            "goals": {
                "clients": self.goals.load.clients,
                "isl": self.goals.load.isl,
                "osl": self.goals.load.osl,
                "ttft_seconds": self.goals.ttft,
                "tokens_per_second_per_stream": self.goals.stream,
                "usd_per_hour": self.goals.budget,
            },
            "prices": str(PRICES),
            "holding": [_as_json(setting) for setting in self.holding],
            "not_holding": [
                {"machine": name, "setting": setting, "reason": reason} for name, setting, reason in self.failing
            ],
            "nearest": [] if self.holding else self.nearest,
        }

    def lines(self) -> list[str]:
        """One page: what holds the load, the lines to paste for the first, why the others do not."""
        lines = [f"{self.request.sizes.source}: {self.goals}", ""]
        if self.holding:
            lines += [*self._table(), "", *self._paste(self.holding[0]), ""]
        else:
            lines += ["None of these machines holds it. What would be held:", *(f"  {one}" for one in self.nearest), ""]
        if self.failing:
            lines += ["Not held by:", *(f"  {setting}: {reason}" for _, setting, reason in self.failing), ""]
        return [*lines, f"Prices: {PRICES}. {HINT}"]

    def _table(self) -> list[str]:
        head = ("machine", "GPUs", "copies", "tp", "weights", "tok/s", "a stream", "TTFT", "at once", "USD/h", "USD/M")
        rows = [_row(setting) for setting in self.holding[:_SHOWN]]
        more = len(self.holding) - _SHOWN
        return [*columns([head, *rows], right=(2, 3, 5, 6, 7, 8, 9, 10)), *([f"and {more} more"] if more > 0 else [])]

    def _paste(self, setting: Setting) -> list[str]:
        options = SizeReport(setting.request, setting.machine, setting.found).settings
        count = setting.copies
        copies = f", {count} copies: djl-trtllm cluster up MODEL --replicas {count}" if count > 1 else ""
        return [
            f"# For serving.properties on {setting.machine.name}{copies}",
            *(f"option.{name}={value}" for name, value in options.items()),
        ]


def _settings_of(request: SizeRequest, machine: Machine, load: Load, degrees: Sequence[int]) -> Iterator[Setting]:
    for degree in degrees_of(machine, request.sizes, degrees):
        found = request.on(machine, degree)
        ranks = found.estimate.conditions.ranks
        if machine.gpus is not None and ranks > machine.gpus:
            continue
        # More copies than clients have nothing to do.
        copies = min(load.clients, (machine.gpus or ranks) // ranks)
        share = replace(load, clients=-(-load.clients // copies))
        room = found.estimate.sequences_of(load.isl + load.osl, found.max_num_tokens) if found.fits else 0
        known = room and machine.gpu_model is not None
        yield Setting(request, machine, found, copies, request.speed_on(machine, found, share) if known else None)


def _in_fp8(request: SizeRequest) -> SizeRequest | None:
    """The request with weights in fp8; None if they are quantised already, or the engine does not quantise them."""
    options = request.config.options
    if request.sizes.quantization or options.quantize or options.quant_algo or request.engine == "pytorch":
        return None
    config = request.config.replace(Origin.derived("djl-trtllm advise"), quantize=Quantization.FP8)
    return replace(request, config=config, settings={**request.settings, "quantize": "fp8"})


def _order(setting: Setting) -> tuple[object, ...]:
    conditions = setting.found.estimate.conditions
    # GPUs without a number cost each.
    gpus = conditions.ranks if setting.machine.gpus is None else 0
    return setting.price, gpus, conditions.quantization is not None, -setting.tokens_per_second


def _row(setting: Setting) -> tuple[str, ...]:
    speed, machine, price = setting.speed, setting.machine, setting.machine.hourly_price
    assert speed is not None  # of what holds a load
    ranks = setting.found.estimate.conditions.ranks
    return (
        machine.name if machine.name != machine.gpu else "GPU",
        f"{machine.gpus or ranks} x {machine.gpu}",
        str(setting.copies),
        str(setting.found.estimate.conditions.tensor_parallel),
        setting.quantization,
        number(setting.tokens_per_second),
        number(speed.per_stream),
        seconds(speed.ttft),
        seconds(speed.ttft_of_burst),
        "" if price is None else f"{price:.2f}",
        "" if setting.dollars is None else f"{setting.dollars:.2f}",
    )


def _as_json(setting: Setting) -> dict[str, Any]:
    assert setting.speed is not None  # of what holds a load
    options = SizeReport(setting.request, setting.machine, setting.found).settings
    return {
        "machine": setting.machine.name,
        "gpu": setting.machine.gpu,
        "gpus": setting.machine.gpus,
        "usd_per_hour": setting.machine.hourly_price,
        "copies": setting.copies,
        "tokens_per_second": setting.tokens_per_second,
        "usd_per_million_tokens": setting.dollars,
        "speed_of_a_copy": speed_json(setting.speed, None),
        "options": {f"option.{name}": value for name, value in options.items()},
    }
