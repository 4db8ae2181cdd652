"""What `djl-trtllm size --compare` prints: one model on many machines, and the cheapest that holds what is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from djl_trtllm.commands.columns import columns
from djl_trtllm.commands.size_report import machine_as_json
from djl_trtllm.commands.size_request import SizeRequest
from djl_trtllm.sizing.comparison import Candidate, best_of_each, candidates, cheapest, smallest
from djl_trtllm.sizing.gpus import PRICES
from djl_trtllm.sizing.machines import Machine, aws_machines
from djl_trtllm.sizing.recommendation import Recommendation

_GIB = 1 << 30


class Comparison:
    """`machines` empty: all AWS instance types, of those with the same GPUs the cheapest that loads the model."""

    def __init__(
        self, request: SizeRequest, machines: Sequence[Machine], degrees: Sequence[int], sequences: int | None
    ) -> None:
        self._request, self._sequences = request, sequences
        sized: dict[tuple[str, int, int], Recommendation] = {}

        def size(machine: Machine, degree: int) -> Recommendation:
            # Machines with the same GPUs differ in nothing else.
            key = (machine.gpu, machine.memory, degree)
            if key not in sized:
                sized[key] = request.on(machine, degree)
            return sized[key]

        self.all = candidates(request.sizes, machines or aws_machines(), size, length=request.length, degrees=degrees)
        self.shown = self.all if machines else best_of_each(self.all, request.sizes)

    @property
    def cheapest(self) -> Candidate | None:
        return cheapest(self.all, self._request.sizes, self._sequences or 1)

    @property
    def answered(self) -> bool:
        """Whether any machine holds what is asked for."""
        return any(one.sequences >= (self._sequences or 1) for one in self.all)

    def as_json(self) -> dict[str, Any]:
        best = self.cheapest
        return {
            "model": self._request.sizes.source,
            "length": self._request.length,
            "sequences_wanted": self._sequences,
            "prices": str(PRICES),
            "cheapest": None if best is None else _as_json(best),
            "candidates": [_as_json(one) for one in self.shown],
        }

    def lines(self) -> list[str]:
        request = self._request
        head = ("machine", "GPUs", "tp", "weights/GPU", "max_num_tokens", "", "KV tokens", "sequences", "USD/h")
        rows = [head, *(_row(one) for one in self.shown)]
        return [
            f"{request.sizes.source}: {request.sizes.bytes / _GIB:.1f} GiB of weights; sequences of {request.length} "
            f"tokens ({request.input_len} in, {request.output_len} out)",
            "",
            *columns(rows, right=(2, 3, 4, 6, 7, 8)),
            "",
            self.answer,
            *self._footnote,
        ]

    @property
    def _without_prices(self) -> bool:
        return all(one.price is None for one in self.all)

    @property
    def _footnote(self) -> list[str]:
        if self._without_prices:
            return []
        return [
            f"Prices: {PRICES}. Only types whose host memory holds the checkpoint are named; one copy of the model is "
            "counted.",
        ]

    @property
    def answer(self) -> str:
        request, best = self._request, self.cheapest
        wanted = f"{self._sequences} sequences of {request.length} tokens" if self._sequences else "the model"
        if best is None:
            least = smallest(self.all, self._sequences or 1)
            if least is not None:
                dearer = "" if self._without_prices else "; none of these machines with a price holds as much"
                degree = least.tensor_parallel
                return (
                    f"smallest for {wanted}: {degree} x {least.machine.gpu}, tp {degree}: {least.sequences} "
                    f"sequences{dearer}"
                )
            most = max(self.all, key=lambda one: one.sequences, default=None)
            if most is None or most.sequences == 0:
                return (
                    f"{wanted}: none of these machines holds it; quantise (--quantize fp8), or spread it over more GPUs"
                )
            return f"{wanted}: none of these machines holds them; the most is {most.sequences} on {most.machine.name}"
        return (
            f"cheapest for {wanted}: {best.machine.name} ({best.machine.gpus} x {best.machine.gpu}), tp "
            f"{best.tensor_parallel}, {best.price:.2f} USD per hour: {best.sequences} sequences"
        )


def _row(one: Candidate) -> tuple[str, ...]:
    found, machine = one.found, one.machine
    fits = found.fits
    origin = "" if not fits else "measured" if found.row is not None else "estimate"
    name = machine.name if machine.name != machine.gpu else "GPU"
    count = machine.gpus if machine.gpus is not None else one.tensor_parallel
    return (
        name,
        f"{count} x {machine.gpu}",
        str(one.tensor_parallel),
        f"{found.estimate.weights / _GIB:.1f} GiB",
        str(found.max_num_tokens) if fits else "out of memory",
        origin,
        f"{found.estimate.kv_tokens(found.max_num_tokens):,}" if fits else "",
        str(one.sequences) if fits else "",
        "" if one.price is None else f"{one.price:.2f}",
    )


def _as_json(one: Candidate) -> dict[str, Any]:
    found = one.found
    return {
        "machine": machine_as_json(one.machine),
        "tensor_parallel": one.tensor_parallel,
        "fits": found.fits,
        "max_num_tokens": found.max_num_tokens or None,
        "origin": found.origin if found.fits else None,
        "kv_tokens": found.estimate.kv_tokens(found.max_num_tokens) if found.fits else 0,
        "sequences": one.sequences,
    }
