"""The question and the answer of `djl-trtllm advise`: which machines hold a load, and why the others do not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from djl_trtllm.commands.size_report import SizeReport, SizeRequest
from djl_trtllm.commands.speed_report import HINT, speed_json
from djl_trtllm.config.options.choices import Quantization
from djl_trtllm.config.sources import Origin
from djl_trtllm.listing import columns, dollars, number, seconds
from djl_trtllm.sizing.estimate import Conditions
from djl_trtllm.sizing.machines import PRICES, Machine, usd_per_million
from djl_trtllm.sizing.recommendation import Candidate, can_load, candidates, first_of_each
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

    def missed_by(self, one: Setting) -> Iterator[str]:
        """Why a setting does not hold the load, a reason for each goal; none if it does."""
        price, speed = one.price, one.speed
        if not can_load(one, one.request.sizes):
            yield f"the host's memory of {(one.machine.host_memory or 0) / 2**30:.0f} GiB does not hold the checkpoint"
        elif one.machine.gpu_model is None:
            yield "the GPU is unknown, and so are its bandwidth and speed; name one with --gpu"
        elif speed is None:
            yield one.found.refusal or "no sequence of this length fits into the KV cache"
        else:
            if self.ttft is not None and speed.ttft > self.ttft:
                waiting = speed.load.clients - speed.running
                why = f", where {waiting} of {speed.load.clients} requests wait for room" if waiting else ""
                yield f"the first token takes {seconds(speed.ttft)}{why}"
            if self.stream is not None and speed.per_stream < self.stream:
                yield f"a stream has {number(speed.per_stream)} tokens per second"
        if self.budget is not None and (price is None or price > self.budget):
            yield "it has no price" if price is None else f"it costs {price:.2f} USD per hour"


@dataclass(frozen=True)
class Setting(Candidate):
    """A candidate with as many copies of the model as it has GPUs for, which share the clients evenly.

    `speed` is that of one copy; None if the model does not fit or the GPU's speed is unknown.
    """

    request: SizeRequest
    copies: int
    speed: Speed | None

    @classmethod
    def of(cls, request: SizeRequest, candidate: Candidate, load: Load) -> Setting | None:
        """The setting of a candidate under a load; None if the machine has too few GPUs."""
        machine, found = candidate.machine, candidate.found
        ranks = found.estimate.conditions.ranks
        # More copies than clients have nothing to do.
        copies = min(load.clients, (machine.gpus or ranks) // ranks)
        if not copies:
            return None
        share = replace(load, clients=-(-load.clients // copies))
        known = candidate.sequences and machine.gpu_model is not None
        speed = request.speed_on(machine, found, share) if known else None
        return cls(**vars(candidate), request=request, copies=copies, speed=speed)

    @property
    def conditions(self) -> Conditions:
        return self.found.estimate.conditions

    @property
    def tokens_per_second(self) -> float:
        return 0.0 if self.speed is None else self.copies * self.speed.tokens_per_second

    @property
    def usd_per_million(self) -> float | None:
        return usd_per_million(self.price, self.tokens_per_second)

    @property
    def weights(self) -> str:
        return self.conditions.quantization or "as stored"

    @property
    def order(self) -> tuple[object, ...]:
        """The cheapest machine first, then settings that leave the weights as they are, then the fastest."""
        # GPUs without a number cost each.
        gpus = self.conditions.ranks if self.machine.gpus is None else 0
        return self.price or math.inf, gpus, self.conditions.quantization is not None, -self.tokens_per_second

    @property
    def options(self) -> dict[str, str]:
        """The options to paste."""
        found = SizeReport(self.request, self.machine, self.found).settings
        return {f"option.{name}": value for name, value in found.items()}

    def __str__(self) -> str:
        copies = f"{self.copies} copies, " if self.copies > 1 else ""
        return f"{self.machine.name}, {copies}tp {self.tensor_parallel}, {self.weights}"


class Advice:
    """Every machine with every degree, and with fp8 where the GPU has it and the options leave it open.

    `holding` has the best setting of each machine that holds all goals, cheapest first; `failing` the other machines in
    that order, each with the setting that comes nearest, and what it misses.
    """

    def __init__(self, request: SizeRequest, machines: Sequence[Machine], goals: Goals, degrees: Sequence[int]) -> None:
        self.request, self.goals = request, goals
        fast = [one for one in machines if one.gpu_model is not None and "fp8" in one.gpu_model.flops]
        length = goals.load.isl + goals.load.osl
        settings = [
            setting
            for asked, able in ((request, machines), (_in_fp8(request), fast))
            if asked is not None
            for one in candidates(asked.sizes, able, asked.on, length=length, degrees=degrees)
            if (setting := Setting.of(asked, one, goals.load)) is not None
        ]
        missed = {id(setting): list(goals.missed_by(setting)) for setting in settings}

        def distance(one: Setting) -> tuple[object, ...]:
            ttft = math.inf if one.speed is None else one.speed.ttft
            return one.speed is None, len(missed[id(one)]), ttft, one.order

        settings.sort(key=lambda one: one.order)
        self.holding = first_of_each([one for one in settings if not missed[id(one)]])
        held, tried = {one.machine.kind for one in self.holding}, {one.machine.name for one in settings}
        nearest = first_of_each([one for one in sorted(settings, key=distance) if one.machine.kind not in held])
        self.failing = [
            (one.machine.name, str(one), "; ".join(missed[id(one)]))
            for one in sorted(nearest, key=lambda one: one.order)
        ]
        self.failing += [
            (one.name, one.name, f"its {one.gpus} GPU{'s' if one.gpus != 1 else ''} cannot divide the model so")
            for one in machines
            if one.name not in tried
        ]

    def lines(self) -> list[str]:
        """One page: what holds the load, the lines to paste for the first, why the others do not."""
        goals, holding = self.goals, self.holding
        wanted = [
            str(goals.load),
            "" if goals.ttft is None else f"first token within {seconds(goals.ttft)}",
            "" if goals.stream is None else f"{number(goals.stream)} tokens per second of each stream",
            "" if goals.budget is None else f"at most {goals.budget:,.2f} USD per hour",
        ]
        lines = [f"{self.request.sizes.source}: {', '.join(filter(None, wanted))}", ""]
        if holding:
            rows = [_row(one) for one in holding[:_SHOWN]]
            right = [place for place, name in enumerate(rows[0]) if name not in ("machine", "GPUs", "weights")]
            lines += columns([[*rows[0]], *([*row.values()] for row in rows)], right=right)
            lines += [f"and {len(holding) - _SHOWN} more"] if len(holding) > _SHOWN else []
            best = holding[0]
            run = f", {best.copies} copies: djl-trtllm cluster up MODEL --replicas {best.copies}" * (best.copies > 1)
            pasted = [f"{key}={value}" for key, value in best.options.items()]
            lines += ["", f"# For serving.properties on {best.machine.name}{run}", *pasted, ""]
        else:
            lines += ["None of these machines holds it.", ""]
        if self.failing:
            lines += ["Not held by:", *(f"  {setting}: {reason}" for _, setting, reason in self.failing), ""]
        return [*lines, f"Prices: {PRICES}. {HINT}"]

    def as_json(self) -> dict[str, Any]:
        goals = self.goals
        return {
            "model": self.request.sizes.source,
            "goals": {
                **vars(goals.load),
                "ttft_seconds": goals.ttft,
                "tokens_per_second_per_stream": goals.stream,
                "usd_per_hour": goals.budget,
            },
            "prices": str(PRICES),
            "holding": [_as_json(one) for one in self.holding],
            "not_holding": [dict(zip(("machine", "setting", "reason"), each, strict=True)) for each in self.failing],
        }


def _in_fp8(request: SizeRequest) -> SizeRequest | None:
    """The request with weights in fp8; None if they are quantised already, or the engine does not quantise them."""
    options = request.config.options
    if request.sizes.quantization or options.quantize or options.quant_algo or request.engine == "pytorch":
        return None
    config = request.config.replace(Origin.derived("djl-trtllm advise"), quantize=Quantization.FP8)
    return replace(request, config=config, settings={**request.settings, "quantize": "fp8"})


def _row(one: Setting) -> dict[str, str]:
    """The cells of a setting by the names of their columns."""
    speed, machine = one.speed, one.machine
    assert speed is not None  # of what holds a load
    name, gpus = machine.cells(one.conditions.ranks)
    return {
        "machine": name,
        "GPUs": gpus,
        "copies": str(one.copies),
        "tp": str(one.tensor_parallel),
        "weights": one.weights,
        "tok/s": number(one.tokens_per_second),
        "a stream": number(speed.per_stream),
        "TTFT": seconds(speed.ttft),
        "at once": seconds(speed.ttft_of_burst),
        "USD/h": dollars(one.price),
        "USD/M": dollars(one.usd_per_million),
    }


def _as_json(one: Setting) -> dict[str, Any]:
    assert one.speed is not None  # of what holds a load
    machine = one.machine
    return {
        "machine": machine.name,
        "gpu": machine.gpu,
        "gpus": machine.gpus,
        "usd_per_hour": one.price,
        "copies": one.copies,
        "tokens_per_second": one.tokens_per_second,
        "usd_per_million_tokens": one.usd_per_million,
        "speed_of_a_copy": speed_json(one.speed, None),
        "options": one.options,
    }
