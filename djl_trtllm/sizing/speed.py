"""How fast a model generates: a roofline of prefill and decode, from its sizes and what the GPU's data sheet says.

A decode step takes as long as the longest of three: reading weights and KV cache, multiplying, and the host's own work.
`clients` requests of `isl` tokens in and `osl` out, which run at a time, take

    clients x prefill(isl) + osl x step(clients)        seconds for clients x osl tokens

docs/sizing.md says how near it is to published measurements, and where it is off.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import Conditions, kv_bits, part_bytes
from djl_trtllm.sizing.machines import GpuModel
from djl_trtllm.sizing.points import Point
from djl_trtllm.sizing.tensors import Division, compute_format


@dataclass(frozen=True)
class Load:
    """Requests of `isl` prompt tokens and `osl` output tokens, `clients` of them at a time. Raises SizingError."""

    isl: int
    osl: int
    clients: int = 1

    def __post_init__(self) -> None:
        for name in ("isl", "osl", "clients"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise SizingError(f"{name} {getattr(self, name)}: expected a number from 1 to {_MOST:,}")

    def __str__(self) -> str:
        return f"{self.clients} client{'s' if self.clients > 1 else ''} of {self.isl} + {self.osl} tokens"


_MOST = 10_000_000
PROMPT_TOKENS = 8192
"""Prompt tokens of one step, by default of both engines."""
_BUSIEST = 0.95


@dataclass(frozen=True)
class GpuShares:
    """Which part of the data sheet's numbers kernels reach, and seconds that are in no data sheet."""

    bandwidth: float
    bf16: float
    fp8: float
    fp4: float
    attention: float
    """Part of the 16-bit operations that attention in a prompt reaches."""
    experts: float
    """Part of the others' speed that matrices of experts reach: each has only some of a step's tokens."""
    link: float
    all_reduce: float
    """Seconds of one all-reduce, however little it sums."""
    layer: float
    """Seconds of each layer of a step, however little it does."""
    grace: float
    """How many times as long the host's part of a step takes on NVIDIA's Grace."""


@dataclass(frozen=True)
class HostTimes:
    """Seconds that an engine's own code takes of a step: in all, and for each sequence. The GPU works meanwhile."""

    step: float
    sequence: float


SHARES = GpuShares(
    bandwidth=0.793,
    bf16=0.66,
    fp8=0.559,
    fp4=0.411,
    attention=0.67,
    experts=0.9,
    link=0.447,
    all_reduce=1.5e-05,
    layer=5.14e-05,
    grace=2.26,
)
"""By `python -m tools.sizing.fit_speed`."""
_STEP, _NEW_RUNNER = 0.00237, 1.56
_PYTHON = HostTimes(_STEP, 2e-05)
HOSTS: Mapping[str, HostTimes] = MappingProxyType(
    {
        "tensorrt": HostTimes(_STEP, 1.83e-05),
        "pytorch": _PYTHON,
        # Nothing is fitted to vLLM. Its code is Python like TensorRT-LLM's, and since 0.20 it generates 1.56 times as
        # much where the host is the limit (vllm.ai/blog, 2026-03-24, Model Runner V2: Qwen3-0.6B on GB200).
        "vllm": HostTimes(_PYTHON.step / _NEW_RUNNER, _PYTHON.sequence / _NEW_RUNNER),
    }
)
"""The first two by `python -m tools.sizing.fit_speed`."""


@dataclass(frozen=True)
class _Matrices:
    """Matrices of one rank: bytes, and seconds of a token's multiplications at the data sheet's speed, by format."""

    bytes: float
    seconds: Mapping[str, float]

    def multiply(self, shares: GpuShares) -> float:
        return sum(seconds / float(getattr(shares, number_format)) for number_format, seconds in self.seconds.items())


@dataclass(frozen=True)
class Rank:
    """What one of the GPUs does for a token: it is its part of each layer, and one of the pipeline's stages."""

    gpu: GpuModel
    ranks: int
    stages: int
    layers: float
    hidden: int
    dense: _Matrices
    experts: _Matrices
    """Of all experts together."""
    head: _Matrices
    chosen: float
    """The part of the experts that a token goes to."""
    attention: tuple[tuple[int | None, float], ...]
    """Windows, and the operations for each pair of tokens of all layers with that window."""
    cache: tuple[tuple[int | None, float], ...]
    """Windows, and bytes per token of all layers with that window."""
    state: float
    """Bytes of a sequence's state, whatever its length."""

    @classmethod
    def of(cls, sizes: CheckpointSizes, conditions: Conditions, gpu: GpuModel) -> "Rank":
        stages, shape = conditions.pipeline_parallel, sizes.shape
        division = Division(conditions.tensor_parallel, shape.num_heads or 0, shape.num_kv_heads or 0)
        narrow = compute_format(conditions.quantization or sizes.quantization)
        bytes_ = dict.fromkeys(("dense", "experts", "head"), 0.0)
        seconds: dict[str, dict[str, float]] = {name: {} for name in bytes_}
        for part in sizes.parts:
            if part.group == "embedding" and not sizes.tied:
                continue  # a lookup reads a row for each token
            kind = {"embedding": "head", "head": "head", "expert": "experts"}.get(part.group, "dense")
            share, size = division.share(part.group) / stages, part_bytes(part, sizes, conditions)
            bytes_[kind] += size * share
            used = narrow if size < 1.5 * part.elements and narrow in gpu.flops else "bf16"
            operations = seconds[kind]
            operations[used] = operations.get(used, 0.0) + 2 * part.elements * share / gpu.flops[used]
        attention: dict[int | None, float] = {}
        cache: dict[int | None, float] = {}
        width = (shape.num_heads or 0) * (shape.head_dim or 0) / conditions.tensor_parallel
        bits = kv_bits(sizes, conditions)
        for layer in sizes.layers:
            if layer.kind in ("attention", "latent"):
                kept = layer.per_token(conditions.tensor_parallel) * bits / 8
                attention[layer.window] = attention.get(layer.window, 0.0) + 4 * width / stages
                cache[layer.window] = cache.get(layer.window, 0.0) + kept / stages
        return cls(
            gpu=gpu,
            ranks=conditions.tensor_parallel,
            stages=stages,
            layers=len(sizes.layers) / stages,
            hidden=shape.hidden or 0,
            dense=_Matrices(bytes_["dense"], seconds["dense"]),
            experts=_Matrices(bytes_["experts"], seconds["experts"]),
            head=_Matrices(bytes_["head"], seconds["head"]),
            chosen=min(1.0, sizes.experts_per_token / sizes.experts) if sizes.experts else 0.0,
            attention=tuple(attention.items()),
            cache=tuple(cache.items()),
            state=sum(layer.per_sequence(conditions.tensor_parallel) for layer in sizes.layers) / stages,
        )


@dataclass(frozen=True)
class Speed:
    """What the clients of a load notice, in seconds and output tokens per second; the mean of all requests.

    `running` of the clients have a request that runs, the others wait for one to end. `limit` is what the
    largest part of the time goes to, of parts that may overlap; `origin` is the measured point that corrected the
    prediction, if any.
    """

    load: Load
    running: int
    ttft: float
    """Until the first token, where clients send whenever their last request has ended."""
    ttft_of_burst: float
    """Until the first token of the last request, where all clients send at the same moment."""
    itl: float
    tokens_per_second: float
    """Of all clients together."""
    limit: str
    origin: str | None = None

    @property
    def per_stream(self) -> float:
        """Tokens per second of one stream once it has its first token."""
        return 1 / self.itl if self.itl else math.inf


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step and of a prompt on one rank, and from them the speed of a load."""

    rank: Rank
    host: HostTimes
    shares: GpuShares = SHARES

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
            ttft=first + waves * wave,
            ttft_of_burst=reading + step + math.ceil(waves) * wave,
            itl=(wave - first) / (load.osl - 1) if load.osl > 1 else 0.0,
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
        rank, shares = self.rank, self.shares
        bandwidth = rank.gpu.bandwidth * shares.bandwidth
        touched = 1 - (1 - rank.chosen) ** sequences
        weights = rank.dense.bytes + rank.head.bytes + rank.experts.bytes * touched / shares.experts
        kept = sum(size * min(length, window or length) for window, size in rank.cache) + 2 * rank.state
        host = self.host.step + sequences * self.host.sequence
        return {
            "reading the weights": weights / bandwidth,
            "multiplying": sequences * self._multiply(),
            "reading the KV cache": sequences * kept / bandwidth,
            "starting kernels and all-reduces": rank.layers * shares.layer
            + self._all_reduce(sequences, shares.all_reduce),
            "the host's own work": host * (shares.grace if rank.gpu.grace else 1.0),
        }

    def prefill(self, tokens: float) -> float:
        """Seconds that a prompt of `tokens` adds to the steps in which it is read, on one stage."""
        rank = self.rank
        pairs = sum(each * _pairs(tokens, window) for window, each in rank.attention)
        attention = pairs / (rank.gpu.flops["bf16"] * self.shares.attention)
        return tokens * self._multiply(head=False) + attention + self._all_reduce(tokens, 0.0)

    def _multiply(self, *, head: bool = True) -> float:
        """Seconds of all multiplications for one token."""
        rank, shares = self.rank, self.shares
        experts = rank.experts.multiply(shares) * rank.chosen / shares.experts
        return rank.dense.multiply(shares) + experts + (rank.head.multiply(shares) if head else 0.0)

    def _all_reduce(self, tokens: float, latency: float) -> float:
        """Seconds of two sums over the ranks in each layer."""
        rank = self.rank
        if rank.ranks == 1:
            return 0.0
        moved = 2 * (rank.ranks - 1) / rank.ranks * 2 * tokens * rank.hidden
        return 2 * rank.layers * (latency + moved / (rank.gpu.link * self.shares.link))


def corrected(roofline: Roofline, load: Load, room: int, points: Iterable[Point]) -> Speed:
    """The speed of a load, as much faster or slower than predicted as the nearest of the measured points was.

    `points` are of this model, engine, precision and GPUs. One with less than a fourth of the clients, prompt tokens
    or output tokens, or more than four times as many, says nothing about the load. Raises SizingError without room.
    """
    speed = roofline.speed(load, room)
    nearest = min(points, key=lambda point: _distance(load, point), default=None)
    if nearest is None or _distance(load, nearest) > _FAR:
        return speed
    there = roofline.speed(Load(nearest.isl, nearest.osl, nearest.clients), max(room, nearest.clients))
    factor = nearest.tokens_per_second / there.tokens_per_second
    first = 1 / factor if nearest.ttft_p50 is None else nearest.ttft_p50 / there.ttft
    return replace(
        speed,
        ttft=speed.ttft * first,
        ttft_of_burst=speed.ttft_of_burst * first,
        itl=speed.itl / factor,
        tokens_per_second=speed.tokens_per_second * factor,
        origin=f"{nearest.tokens_per_second:,.0f} tokens per second measured with {nearest.clients} clients of "
        f"{nearest.isl} + {nearest.osl} tokens, {factor:.2f} times the estimate ({nearest.origin})",
    )


_FAR = math.log(4)


def _distance(load: Load, point: Point) -> float:
    """How many times as many clients, prompt tokens or output tokens one has as the other, as a logarithm."""
    return max(abs(math.log(getattr(load, name) / getattr(point, name))) for name in ("clients", "isl", "osl"))


def _pairs(tokens: float, window: int | None) -> float:
    seen = min(tokens, window or tokens)
    return seen * seen / 2 + (tokens - seen) * seen


def _longest(*seconds: float) -> float:
    """The longest of these, and more where others take nearly as long: they do not overlap wholly."""
    return math.hypot(*seconds)
