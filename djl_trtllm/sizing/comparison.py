"""One model on several machines, with several degrees: which is the cheapest that holds what is asked for?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.machines import Machine
from djl_trtllm.sizing.recommendation import Recommendation

_DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Candidate:
    """One way to run the model. `sequences` of the length in question fit into the KV cache at a time."""

    machine: Machine
    tensor_parallel: int
    found: Recommendation
    sequences: int

    @property
    def price(self) -> float | None:
        return self.machine.hourly_price


def degrees_of(machine: Machine, sizes: CheckpointSizes, wanted: Sequence[int] = ()) -> list[int]:
    """Those that the machine has the GPUs for and that divide the model's heads; `wanted` limits them."""
    heads = sizes.shape.num_heads or 1
    return [
        degree
        for degree in (wanted or _DEGREES)
        if heads % degree == 0 and (machine.gpus is None or degree <= machine.gpus)
    ]


def candidates(
    sizes: CheckpointSizes,
    machines: Iterable[Machine],
    size: Callable[[Machine, int], Recommendation],
    *,
    length: int,
    degrees: Sequence[int] = (),
) -> list[Candidate]:
    """Every machine with every degree, cheapest first, then those without a price; of equals the most sequences."""
    found = []
    for machine in machines:
        for degree in degrees_of(machine, sizes, degrees):
            sized = size(machine, degree)
            sequences = sized.estimate.sequences_of(length, sized.max_num_tokens) if sized.fits else 0
            found.append(Candidate(machine, degree, sized, sequences))
    return sorted(found, key=_order)


def _order(one: Candidate) -> tuple[object, ...]:
    # Where nothing fits, the degree that comes nearest is shown.
    degree = one.tensor_parallel if one.found.fits else -one.tensor_parallel
    return one.price is None, one.price or 0, not one.found.fits, -one.sequences, degree


def can_load(candidate: Candidate, sizes: CheckpointSizes) -> bool:
    """Whether the host's memory holds the checkpoint, which is read into it before it is on the GPUs."""
    host = candidate.machine.host_memory
    return host is None or host > sizes.bytes


def cheapest(found: Sequence[Candidate], sizes: CheckpointSizes, sequences: int) -> Candidate | None:
    """The cheapest that holds N sequences; None if none with a price does. `found` is in order of price."""
    holding = (one for one in found if one.sequences >= max(1, sequences) and one.price is not None)
    return next((one for one in holding if can_load(one, sizes)), None)


def smallest(found: Sequence[Candidate], sequences: int) -> Candidate | None:
    """The one with the least GPU memory in all that holds N sequences; None if none does."""
    holding = [one for one in found if one.sequences >= max(1, sequences)]
    return min(holding, key=lambda one: one.machine.memory * one.tensor_parallel, default=None)


def best_of_each(found: Sequence[Candidate], sizes: CheckpointSizes) -> list[Candidate]:
    """Of machines with the same GPUs only the cheapest that loads the model, each with its best degree."""
    kept: dict[tuple[str, int | None], Candidate] = {}
    for one in found:
        key = (one.machine.gpu, one.machine.gpus)
        if can_load(one, sizes) and key not in kept:
            kept[key] = one
    return list(kept.values())
