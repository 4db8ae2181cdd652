"""How fast a model generates: a roofline of prefill and decode, from its sizes and what the GPU's data sheet says."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from djl_trtllm.errors import SizingError
from djl_trtllm.files import read_table
from djl_trtllm.listing import number, seconds
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import Conditions, kv_bits, part_bytes
from djl_trtllm.sizing.machines import PRICES, GpuModel, usd_per_million
from djl_trtllm.sizing.points import Point
from djl_trtllm.sizing.tensors import Division, compute_format


@dataclass(frozen=True)
class Load:
    """Requests of `isl` prompt tokens and `osl` output tokens, `clients` of them at a time; each at least 1."""

    isl: int
    osl: int
    clients: int = 1

    def __str__(self) -> str:
        return f"{self.clients} client{'s' if self.clients > 1 else ''} of {self.isl} + {self.osl} tokens"


HINT = "An estimate: docs/sizing.md says how far to trust it. djl-trtllm bench --record writes what a server measures."
PROMPT_TOKENS = 8192
"""Prompt tokens of one step, by default of both engines."""
_BUSIEST = 0.95


Constants = Mapping[str, float]
"""The share of the data sheet's numbers that kernels reach, and the host's seconds, on one engine; see speed.toml."""
_TABLE = read_table("speed.toml", __package__)
CONSTANTS: Mapping[str, Constants] = {engine: _TABLE["gpu"] | host for engine, host in _TABLE["host"].items()}
"""The constants by engine, as `Conditions` names the backends."""


@dataclass
class _Matrices:
    """Matrices of one rank: bytes, and seconds of a token's multiplications at the data sheet's speed, by format."""

    bytes: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def multiply(self, constants: Constants) -> float:
        return sum(seconds / constants[kind] for kind, seconds in self.seconds.items())


class Rank:
    """The work of one GPU for a token: it has a part of each layer of one of the pipeline's stages.

    `experts` are the matrices of all experts together, and `chosen` is the part of them that a token goes to.
    """

    def __init__(self, sizes: CheckpointSizes, conditions: Conditions, gpu: GpuModel) -> None:
        stages, degree, shape = conditions.pipeline_parallel, conditions.tensor_parallel, sizes.shape
        self.gpu, self.ranks, self.stages = gpu, degree, stages
        self.layers, self.hidden = len(sizes.layers) / stages, shape.hidden or 0
        self.chosen = min(1.0, sizes.experts_per_token / sizes.experts) if sizes.experts else 0.0
        self.dense, self.experts, self.head = _Matrices(), _Matrices(), _Matrices()
        division = Division(degree, shape.num_heads, shape.num_kv_heads)
        narrow = compute_format(conditions.quantization or sizes.quantization)
        for part in sizes.parts:
            if part.group == "embedding" and not sizes.tied:
                continue  # a lookup reads a row for each token
            matrices = {"embedding": self.head, "head": self.head, "expert": self.experts}.get(part.group, self.dense)
            share, size = division.share(part.group) / stages, part_bytes(part, sizes, conditions)
            used = narrow if size < 2 * part.elements and narrow in gpu.flops else "bf16"
            matrices.bytes += size * share
            matrices.seconds[used] += 2 * part.elements * share / gpu.flops[used]
        pair = 4 * (shape.num_heads or 0) * (shape.head_dim or 0) / degree / stages
        kept = kv_bits(sizes, conditions) / 8 / stages
        attending = [layer for layer in sizes.layers if layer.kind in ("attention", "latent")]
        alike = Counter((layer.window, layer.per_token(degree)) for layer in attending)
        # Of the layers with a window: the operations for each pair of tokens, and bytes in the cache per token.
        self.windows = [(window, pair * count, kept * size * count) for (window, size), count in alike.items()]
        # Bytes of a sequence's state, whatever its length.
        self.state = sum(layer.per_sequence(degree) for layer in sizes.layers) / stages


@dataclass(frozen=True)
class Speed:
    """The speed that the clients of a load notice, in seconds and output tokens per second; the mean of all requests.

    `running` of the clients have a request that runs, the others wait for one to end. `limit` names the part that takes
    most of the time (parts may overlap); `corrected_by` is the measured point that corrected the prediction, if any.
    """

    load: Load
    running: int
    ttft_seconds: float
    """Seconds until the first token, where clients send whenever their last request has ended."""
    ttft_of_burst_seconds: float
    """Seconds until the first token of the last request, where all clients send at the same moment."""
    itl_seconds: float
    tokens_per_second: float
    """The tokens of all clients together."""
    limit: str
    corrected_by: str | None = None

    @property
    def per_stream(self) -> float:
        """Tokens per second of one stream once it has its first token."""
        return 1 / self.itl_seconds if self.itl_seconds else math.inf

    def lines(self, hourly_price: float | None) -> list[str]:
        """The speed of one copy of the model for people; `hourly_price` is of the machine, in USD."""
        dollars, waiting = usd_per_million(hourly_price, self.tokens_per_second), self.load.clients - self.running
        return [
            f"speed with {self.load}: {number(self.tokens_per_second)} output tokens per second in all, "
            f"{number(self.per_stream)} of each stream; the largest part of the time goes to {self.limit}",
            f"  first token after {seconds(self.ttft_seconds)}, or {seconds(self.ttft_of_burst_seconds)} for the last "
            f"one if all send at once; {seconds(self.itl_seconds)} between two tokens",
            *([f"  {self.running} run at a time, {waiting} wait for room in the KV cache or batch"] if waiting else []),
            *([f"  {dollars:.2f} USD per million output tokens ({PRICES})"] if dollars else []),
            f"  corrected: {self.corrected_by}" if self.corrected_by else f"  {HINT}",
        ]

    def as_json(self, hourly_price: float | None) -> dict[str, Any]:
        return {
            **vars(self.load),
            **{name: value for name, value in vars(self).items() if name != "load"},
            "tokens_per_second_per_stream": self.per_stream if self.itl_seconds else None,
            "usd_per_million_tokens": usd_per_million(hourly_price, self.tokens_per_second),
        }


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step and of a prompt on one rank, and from them the speed of a load.

    A decode step takes as long as the longest of three: reading weights and KV cache, multiplying, and the host's own
    work. `clients` requests of `isl` tokens in and `osl` out, which run at a time, take

        clients x prefill(isl) + osl x step(clients)        seconds for clients x osl tokens

    docs/sizing.md says how near it is to published measurements, and where it is off.
    """

    rank: Rank
    constants: Constants

    def speed(self, load: Load, room: int) -> Speed:
        """The speed of a load where `room` sequences of its length run at a time. Raises SizingError without room."""
        if room < 1:
            raise SizingError(f"{load}: no sequence of {load.isl + load.osl} tokens fits")
        running = min(load.clients, room)
        wave = self.wave(replace(load, clients=running))
        prompt = self.rank.stages * self.prefill(load.isl)
        reading = running * self.prefill(load.isl)
        step = (wave - reading) / load.osl
        busy = min(_BUSIEST, reading / wave)
        # Prompts that are read in the same steps have their first tokens together; others wait in a queue (M/D/1).
        together = max(1.0, min(running, PROMPT_TOKENS / load.isl))
        first = step + prompt * (together + 1) / 2 + busy / (2 * (1 - busy)) * prompt * together
        first = min(first, reading + step)
        waves = (load.clients - running) / running
        parts = self._step(running / self.rank.stages, load.isl + load.osl / 2)
        steps = self.rank.stages * load.osl
        spent = {"reading prompts": reading} | {name: steps * part for name, part in parts.items()}
        return Speed(
            load=load,
            running=running,
            ttft_seconds=first + waves * wave,
            ttft_of_burst_seconds=reading + step + math.ceil(waves) * wave,
            itl_seconds=(wave - first) / (load.osl - 1) if load.osl > 1 else 0.0,
            tokens_per_second=running * load.osl / wave,
            limit=max(spent, key=lambda name: spent[name]),
        )

    def wave(self, load: Load) -> float:
        """Seconds of `load.clients` requests that begin together and run at a time."""
        group = load.clients / self.rank.stages
        decode = self.rank.stages * load.osl * self.step(group, load.isl + load.osl / 2)
        return load.clients * self.prefill(load.isl) + decode

    def step(self, sequences: float, length: float) -> float:
        """Seconds in which each of `sequences` on a pipeline stage gets a token; they are `length` tokens long."""
        parts = self._step(sequences, length)
        matrices = _longest(parts["reading the weights"], parts["multiplying"])
        gpu = matrices + parts["reading the KV cache"] + parts["starting kernels and all-reduces"]
        return _longest(gpu, parts["the host's own work"])

    def _step(self, sequences: float, length: float) -> dict[str, float]:
        """Seconds of each part of a step. Some parts overlap, so a step takes less than their sum."""
        rank, constants = self.rank, self.constants
        bandwidth = rank.gpu.bandwidth * constants["bandwidth"]
        touched = 1 - (1 - rank.chosen) ** sequences
        weights = rank.dense.bytes + rank.head.bytes + rank.experts.bytes * touched / constants["experts"]
        kept = sum(size * min(length, window or length) for window, _, size in rank.windows) + 2 * rank.state
        host = constants["step"] + sequences * constants["sequence"]
        return {
            "reading the weights": weights / bandwidth,
            "multiplying": sequences * self._multiply(),
            "reading the KV cache": sequences * kept / bandwidth,
            "starting kernels and all-reduces": rank.layers * constants["layer"]
            + self._all_reduce(sequences, constants["all_reduce"]),
            "the host's own work": host * (constants["grace"] if rank.gpu.grace else 1.0),
        }

    def prefill(self, tokens: float) -> float:
        """Seconds that a prompt of `tokens` adds to the steps in which it is read, on one stage."""
        rank = self.rank
        pairs = sum(each * _pairs(tokens, window) for window, each, _ in rank.windows)
        attention = pairs / (rank.gpu.flops["bf16"] * self.constants["attention"])
        return tokens * self._multiply(head=False) + attention + self._all_reduce(tokens, 0.0)

    def _multiply(self, *, head: bool = True) -> float:
        """Seconds of all multiplications for one token."""
        rank, constants = self.rank, self.constants
        experts = rank.experts.multiply(constants) * rank.chosen / constants["experts"]
        return rank.dense.multiply(constants) + experts + (rank.head.multiply(constants) if head else 0.0)

    def _all_reduce(self, tokens: float, latency: float) -> float:
        """Seconds of two sums over the ranks in each layer."""
        rank = self.rank
        if rank.ranks == 1:
            return 0.0
        moved = 2 * (rank.ranks - 1) / rank.ranks * 2 * tokens * rank.hidden
        return 2 * rank.layers * (latency + moved / (rank.gpu.link * self.constants["link"]))


def corrected(roofline: Roofline, load: Load, room: int, points: Iterable[Point]) -> Speed:
    """The speed of a load, as much faster or slower than predicted as the nearest of the measured points was.

    `points` are of this model, engine, precision and GPUs; the first of equally near ones counts. A point with less
    than a fourth of the clients, prompt tokens or output tokens, or more than four times as many, says nothing about
    the load. Raises SizingError without room.
    """
    speed = roofline.speed(load, room)
    nearest = min(points, key=lambda point: _distance(load, point), default=None)
    if nearest is None or _distance(load, nearest) > _FAR:
        return speed
    there = roofline.speed(Load(nearest.isl, nearest.osl, nearest.clients), max(room, nearest.clients))
    factor = nearest.tokens_per_second / there.tokens_per_second
    first = 1 / factor if nearest.ttft_p50 is None else nearest.ttft_p50 / there.ttft_seconds
    return replace(
        speed,
        ttft_seconds=speed.ttft_seconds * first,
        ttft_of_burst_seconds=speed.ttft_of_burst_seconds * first,
        itl_seconds=speed.itl_seconds / factor,
        tokens_per_second=speed.tokens_per_second * factor,
        corrected_by=f"{nearest.tokens_per_second:,.0f} tokens per second measured with {nearest.clients} clients of "
        f"{nearest.isl} + {nearest.osl} tokens, {factor:.2f} times the estimate ({nearest.origin})",
    )


_FAR = math.log(4)


def _distance(load: Load, point: Point) -> float:
    """The largest ratio of the clients, prompt tokens or output tokens of both, as a logarithm."""
    return max(abs(math.log(getattr(load, name) / getattr(point, name))) for name in ("clients", "isl", "osl"))


def _pairs(tokens: float, window: int | None) -> float:
    seen = min(tokens, window or tokens)
    return seen * seen / 2 + (tokens - seen) * seen


def _longest(*parts: float) -> float:
    """The longest of these times, and more where others take nearly as long: they do not overlap wholly."""
    return math.hypot(*parts)
