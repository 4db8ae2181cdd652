"""How fast a model generates: a roofline of prefill and decode, from its sizes and what the GPU's data sheet says.

A decode step takes as long as the longest of three: reading weights and KV cache, multiplying, and the host's own work.
`clients` requests of `isl` tokens in and `osl` out, which run at a time, take

    clients x prefill(isl) + osl x step(clients)        seconds for clients x osl tokens
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import Conditions, part_bytes, stage_caches
from djl_trtllm.sizing.machines import GpuModel
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
        return f"{self.clients} clients of {self.isl} + {self.osl} tokens"


_MOST = 10_000_000


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
    bf16=0.669,
    fp8=0.559,
    fp4=0.411,
    attention=0.718,
    experts=0.888,
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
        # much where the host is the limit (vLLM's announcement of Model Runner V2: Qwen3-0.6B on GB200).
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
        return sum(seconds / getattr(shares, number_format) for number_format, seconds in self.seconds.items())


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
        cache = max(stage_caches(sizes, conditions), key=lambda stage: (stage.per_token, stage.state))
        windows: dict[int | None, float] = {}
        for layer in sizes.layers:
            if layer.kind in ("attention", "latent"):
                width = (shape.num_heads or 0) * (shape.head_dim or 0) / conditions.tensor_parallel
                windows[layer.window] = windows.get(layer.window, 0.0) + 4 * width / stages
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
            attention=tuple(windows.items()),
            cache=tuple((window, float(size)) for size, window in cache.windows),
            state=float(cache.state),
        )


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step and of a prompt on one rank."""

    rank: Rank
    host: HostTimes
    shares: GpuShares = SHARES

    @property
    def _bandwidth(self) -> float:
        return self.rank.gpu.bandwidth * self.shares.bandwidth

    def step(self, sequences: float, length: float) -> float:
        """Seconds in which each of `sequences` on a stage of the pipeline gets a token; they are `length` tokens long."""
        rank = self.rank
        touched = 1 - (1 - rank.chosen) ** sequences
        weights = rank.dense.bytes + rank.head.bytes + rank.experts.bytes * touched / self.shares.experts
        matrices = _longest(weights / self._bandwidth, sequences * self._multiply())
        kept = sum(size * min(length, window or length) for window, size in rank.cache) + 2 * rank.state
        cache = sequences * kept / self._bandwidth
        gpu = matrices + cache + rank.layers * self.shares.layer + self._all_reduce(sequences, self.shares.all_reduce)
        host = self.host.step + sequences * self.host.sequence
        return _longest(gpu, host * (self.shares.grace if rank.gpu.grace else 1.0))

    def prefill(self, tokens: float) -> float:
        """Seconds that a prompt of `tokens` adds to the steps in which it is read."""
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

    def wave(self, load: Load) -> float:
        """Seconds of `load.clients` requests that begin together and run at a time."""
        stages = self.rank.stages
        group = load.clients / stages
        decode = load.osl * self.step(group, load.isl + load.osl / 2)
        return stages * (group * self.prefill(load.isl) + decode)


def _pairs(tokens: float, window: int | None) -> float:
    seen = min(tokens, window or tokens)
    return seen * seen / 2 + (tokens - seen) * seen


def _longest(*seconds: float) -> float:
    """The longest of these, and more where others take nearly as long: they do not overlap wholly."""
    return math.hypot(*seconds)
