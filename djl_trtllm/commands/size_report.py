"""The question and the answer of `djl-trtllm size`: one model on one machine, with its picture, or on many by price."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from djl_trtllm.commands.speed_report import speed_json, speed_lines
from djl_trtllm.config import Config, Task, load
from djl_trtllm.config.options.choices import Backend
from djl_trtllm.config.speculation import speculation_of
from djl_trtllm.engines.hardware import GpuState, read_states
from djl_trtllm.errors import LayoutError, SizingError
from djl_trtllm.listing import columns, dollars
from djl_trtllm.model import ModelKind, inspect
from djl_trtllm.model.pooling import task_of
from djl_trtllm.model.remote.fetch import is_remote
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import Conditions, usual_vllm_tokens, warnings_of
from djl_trtllm.sizing.machines import PRICES, Machine, aws_machines, gpu_found, of_gpu, of_instance, of_memory
from djl_trtllm.sizing.points import ENGINES, Point, fingerprint, precision_of, read_points
from djl_trtllm.sizing.recommendation import (
    DEFAULT_LMI,
    Candidate,
    Recommendation,
    best_of_each,
    candidates,
    cheapest,
    conditions_of,
    degrees_of,
    recommend,
    smallest,
)
from djl_trtllm.sizing.speed import CONSTANTS, Load, Rank, Roofline, Speed, corrected

_WIDENED, _WIDENED_BATCH = 4096, 256
"""The lengths and the batch to which a max_num_tokens that a user sets raises them."""
_GIB = 1 << 30
_DRIVERS = 2 * _GIB
"""Memory in use that is no warning: the driver keeps half a GiB of a large GPU, and a program's context as much."""
_FP8_SINCE = (8, 9)
_ENGINES = {"tensorrt": "TensorRT engine", "pytorch": "PyTorch", "vllm": "vLLM"}


@dataclass(frozen=True)
class SizeRequest:
    """A model to size, and its options. `settings` are the options that flags set, as in serving.properties."""

    sizes: CheckpointSizes
    config: Config
    settings: Mapping[str, str]
    lmi: str = DEFAULT_LMI
    draft: CheckpointSizes | None = None

    @property
    def context(self) -> int | None:
        """Tokens of the longest sequence: of the model's positions and option.max_seq_len, the smaller one."""
        known = (self.sizes.shape.max_position_embeddings, self.config.options.max_seq_len)
        return min((length for length in known if length), default=None)

    def _asked(self, name: str) -> int:
        """The length that a flag sets; else the option's, which max_num_tokens may have raised."""
        return int(self.settings.get(name) or getattr(self.config.options, name))

    @property
    def input_len(self) -> int:
        """Prompt tokens of a sequence: a token less than the context at most, two thirds of it if no length is set."""
        asked, context = self._asked("max_input_len"), self.context
        if context is None:
            return asked
        return min(asked, context - 1 if self.config.is_set("max_input_len") else max(1, context * 2 // 3))

    @property
    def output_len(self) -> int:
        """Output tokens of a sequence: at most the rest of the context after the prompt."""
        asked, context = self._asked("max_output_len"), self.context
        return asked if context is None else min(asked, context - self.input_len)

    @property
    def shortened(self) -> str | None:
        """Return the warning about lengths beyond the context, None if they are within it."""
        set_by_user = self.config.is_set("max_input_len") or self.config.is_set("max_output_len")
        inputs, outputs = self._asked("max_input_len"), self._asked("max_output_len")
        if not set_by_user or inputs + outputs == self.length:
            return None
        whose = "option.max_seq_len" if self.context == self.config.options.max_seq_len else "the model's context"
        return (
            f"sequences of {inputs} + {outputs} tokens are longer than {whose} of {self.context}: counted are "
            f"{self.input_len} + {self.output_len}"
        )

    @property
    def length(self) -> int:
        """Tokens of the sequences that are counted."""
        return self.input_len + self.output_len

    def __str__(self) -> str:
        return f"{self.length} tokens ({self.input_len} in, {self.output_len} out)"

    @property
    def compiled(self) -> bool:
        return self.config.options.backend in (Backend.AUTO, Backend.TENSORRT)

    def _tokens(self, conditions: Conditions) -> int | None:
        """The tokens of an iteration that are sized as they are: the options', or vLLM's own."""
        options = self.config.options
        if conditions.backend != "vllm":
            return options.max_num_tokens
        return options.max_num_tokens or options.max_num_batched_tokens or usual_vllm_tokens(conditions.gpu_memory)

    def degree_on(self, machine: Machine) -> int:
        """Return the options' tensor parallel degree; `max` is the number of GPUs. Raises SizingError."""
        degree = self.config.options.tensor_parallel_degree
        groups = self.config.options.pipeline_parallel_degree
        if degree == "max":
            degree = max(1, (machine.gpus or 1) // groups)
        if machine.gpus is not None and int(degree) * groups > machine.gpus:
            raise SizingError(
                f"tensor parallel degree {degree}{f' x {groups} groups' if groups > 1 else ''}: {machine.name} has "
                f"{machine.gpus} GPU{'s' if machine.gpus > 1 else ''}"
            )
        return int(degree)

    def on(self, machine: Machine, degree: int) -> Recommendation:
        """The recommendation with the limits that the lines to paste have: max_num_tokens raises the batch to 256."""
        conditions = conditions_of(
            self.config,
            self.sizes.shape,
            gpu_memory=machine.memory,
            compute_capability=machine.compute_capability,
            tensor_parallel=degree,
            pipeline_parallel=self.config.options.pipeline_parallel_degree,
            compiled=self.compiled,
            draft=self.draft,
        )
        conditions = replace(conditions, max_batch_size=max(_WIDENED_BATCH, conditions.max_batch_size))
        found = recommend(self.sizes, conditions, machine.known, gpu=machine.gpu, lmi=self.lmi)
        return replace(found, wanted=self._tokens(conditions))

    @property
    def engine(self) -> str:
        """The engine whose speed is predicted: one of `CONSTANTS`. Raises SizingError for another one."""
        backend = self.config.options.backend
        engine = "tensorrt" if self.compiled else str(backend.value)
        if engine not in CONSTANTS:
            raise SizingError(
                f"option.backend={engine}: speed is predicted for {', '.join(CONSTANTS)}: choose one by --backend"
            )
        return engine

    @cached_property
    def points(self) -> list[Point]:
        """The measured points of this model and engine, on any GPUs. Raises SizingError for a broken file."""
        known = (fingerprint(self.sizes), ENGINES[self.engine])
        return [each for each in read_points(self.config.engine_cache_dir) if (each.model, each.engine) == known]

    def speed_on(self, machine: Machine, found: Recommendation, load: Load) -> Speed:
        """The speed of one copy of the model, where it fits.

        Raises SizingError for GPUs that are not in the table, and for models that do not generate.
        """
        if (task := task_of(self.sizes.shape)) is not Task.GENERATE:
            raise SizingError(
                f"{self.sizes.source} has the task {task.value}: speeds are predicted for models that generate"
            )
        gpu, conditions = machine.gpu_model, found.estimate.conditions
        if gpu is None:
            raise SizingError(f"{machine.name}: its bandwidth is unknown, so no speed is predicted; name it with --gpu")
        room = found.estimate.sequences_of(load.isl + load.osl, found.max_num_tokens) if found.fits else 0
        roofline = Roofline(Rank.of(self.sizes, conditions, gpu), CONSTANTS[self.engine])
        precision = precision_of(self.sizes, conditions.quantization, conditions.kv_dtype)
        known = (gpu.name, conditions.ranks, precision)
        near = [point for point in self.points if (point.gpu, point.gpus, point.precision) == known]
        return corrected(roofline, load, min(room, conditions.max_batch_size), near)


def read_request(
    model: str, settings: Mapping[str, str], lmi: str = DEFAULT_LMI, images: str | None = None
) -> SizeRequest:
    """Read a model's options and the headers of its weights. `images` are added to its prompts.

    Raises ModelError, ConfigError and SizingError.
    """
    config, checkpoint = _read_options(model, settings)
    _refuse_engine(checkpoint)
    hub: dict[str, Any] = {
        "hub_cache": None if config.options.download_dir is None else config.options.download_dir / "hub",
        "hub_token": config.options.hf_access_token,
    }
    sizes = CheckpointSizes.read(checkpoint, revision=config.options.revision, **hub)
    if not sizes.layers or not sizes.parts:
        raise SizingError(
            f"{checkpoint}/config.json does not give the layers, the heads and the hidden size of the model as numbers "
            "above 0, so nothing can be estimated; --measure finds what fits"
        )
    if images is not None:
        text = int(settings.get("max_input_len") or config.options.max_input_len)
        settings = {**settings, "max_input_len": str(text + sizes.image_tokens(images))}
        config, _ = _read_options(model, settings)
    draft, speculation = None, speculation_of(config)
    if speculation is not None and speculation.model is not None:
        beside = (config.model_dir or Path()) / speculation.model
        named = str(beside) if beside.is_dir() else speculation.model
        draft = CheckpointSizes.read(named, **hub)
    return SizeRequest(sizes, config, settings, lmi, draft)


def _read_options(model: str, settings: Mapping[str, str]) -> tuple[Config, str]:
    """A model's options, and its checkpoint."""
    arguments = [f"option.{name}={value}" for name, value in settings.items()]
    environ = {name: value for name, value in os.environ.items() if name != "HF_MODEL_ID"}
    if is_remote(model):
        config, checkpoint = load(None, environ, arguments=arguments), model
    else:
        # Importing the service takes a quarter of a second.
        from djl_trtllm.service.model import open_source

        source = open_source(Path(model), environ, arguments)
        config, named = source.config, source.config.options.model_id
        inside = source.directory / (named or "")
        checkpoint = str(inside) if named is None or inside.is_dir() else named
    return config, checkpoint


def _refuse_engine(checkpoint: str) -> None:
    if is_remote(checkpoint):
        return
    try:
        layout = inspect(Path(checkpoint))
    except LayoutError:
        return  # a config.json alone is enough
    if layout.kind is not ModelKind.HF_CHECKPOINT:
        keeps = "keeps what it was compiled for (djl-trtllm config shows it)"
        raise SizingError(
            f"{checkpoint} is a {layout.kind.value}, which {keeps if layout.kind.is_engine else 'is not read'}; name "
            "the Hugging Face checkpoint it was made from"
        )


def machines_of(gpu: Sequence[str], memory: str | None, instance: Sequence[str], *, here: bool) -> list[Machine]:
    """The machines that flags name, else, with `here`, this one. Raises SizingError."""
    asked = [("--gpu", of_gpu, name) for name in gpu] + [("--instance", of_instance, name) for name in instance]
    if memory is not None:
        asked.append(("--gpu-memory", of_memory, memory))
    named = []
    for flag, read, text in asked:
        try:
            named.append(read(text))
        except SizingError as error:
            raise SizingError(f"{flag} {error}") from None
    return named or ([_this_machine()] if here else [])


def degrees_to_compare(degrees: Sequence[str]) -> list[int]:
    """The tensor parallel degrees that --tp lists. Raises SizingError."""
    if not all(degree.isdigit() and int(degree) for degree in degrees):
        raise SizingError(f"--tp {','.join(degrees)}: expected numbers of at least 1")
    return [int(degree) for degree in degrees]


def _this_machine() -> Machine:
    from djl_trtllm.engines.hardware import visible_gpus

    gpus, _ = visible_gpus(os.environ)
    known = [gpu for gpu in gpus if gpu.memory is not None]
    if not known:
        what = "the memory of this machine's GPUs is unknown" if gpus else "this machine has no NVIDIA GPU"
        raise SizingError(
            f"{what}: name one with --gpu h200, an AWS instance type with --instance g5.12xlarge, or --gpu-memory 80GB"
        )
    smallest = min(known, key=lambda gpu: gpu.memory or 0)
    assert smallest.memory is not None
    name = smallest.name or "NVIDIA GPU"
    model = gpu_found(smallest.name, smallest.memory)
    states = read_states()
    # If CUDA shows a part of the GPUs only, nothing says which ones they are.
    remarks = remarks_on(states) if len(states) == len(gpus) else ()
    return Machine("this machine", name, smallest.memory, len(gpus), smallest.compute_capability, model, remarks)


def remarks_on(states: Sequence[GpuState]) -> tuple[str, ...]:
    """Return warnings about memory in use, and about GPUs that do not reach each other."""
    found = [
        f"other programs use {(gpu.total - gpu.free) / _GIB:.1f} of the {gpu.total / _GIB:.1f} GiB of GPU {index}, "
        "which is not counted here, and missing when the model is loaded"
        for index, gpu in enumerate(states)
        if gpu.total - gpu.free > _DRIVERS
    ]
    if len(states) > 1 and any(len(gpu.peers) < len(states) - 1 for gpu in states):
        found.append(
            "the GPUs do not reach each other's memory: tensor parallelism goes through the host's, which is slow"
        )
    return tuple(found)


@dataclass(frozen=True)
class SizeReport:
    """The answer about one model on one machine."""

    request: SizeRequest
    machine: Machine
    found: Recommendation
    speed: Speed | None = None

    @property
    def tokens(self) -> int:
        return self.found.max_num_tokens

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes of each GPU by part; they add up to its memory, or to more where it does not fit."""
        estimate = self.found.estimate
        parts = {
            "weights": estimate.weights,
            "activations": estimate.activations(self.tokens) + estimate.logits,
            "communication": estimate.communication,
            "overhead": estimate.overhead,
            "kv_cache": estimate.kv_bytes(self.tokens) if self.found.fits else 0,
        }
        return parts | {"unused": max(0, estimate.conditions.gpu_memory - sum(parts.values()))}

    @property
    def kv_tokens(self) -> int:
        return _kv_tokens(self.found)

    @property
    def sequences(self) -> int:
        return self.found.estimate.sequences_of(self.request.length, self.tokens) if self.found.fits else 0

    @cached_property
    def settings(self) -> dict[str, str]:
        """The options to paste, with the limits that max_num_tokens raises."""
        if not self.found.fits:
            return {}
        request, conditions = self.request, self.found.estimate.conditions
        degrees = {"tensor_parallel_degree": str(conditions.tensor_parallel)}
        if conditions.pipeline_parallel > 1:
            degrees["pipeline_parallel_degree"] = str(conditions.pipeline_parallel)
        known = (*degrees, "max_input_len", "max_output_len")
        floor = min(_WIDENED, self.tokens)
        return {
            **degrees,
            **{name: value for name, value in request.settings.items() if name not in known},
            "max_num_tokens": str(self.tokens),
            "max_input_len": str(max(floor, request.input_len)),
            "max_output_len": str(max(floor, request.output_len)),
            "max_rolling_batch_size": str(max(_WIDENED_BATCH, request.config.options.max_rolling_batch_size)),
            **({"enable_chunked_prefill": "true"} if self.tokens < request.input_len else {}),
        }

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings with numbers and what to do; those about the machine come last."""
        conditions, capability = self.found.estimate.conditions, self.machine.compute_capability
        shortened = () if self.request.shortened is None else (self.request.shortened,)
        old = conditions.quantization == "fp8" and capability is not None and capability < _FP8_SINCE
        without = f"{self.machine.gpu} does not compute in FP8: option.quantize=fp8 needs an L4, an H100 or later"
        return (*shortened, *self._of_estimate, *([without] if old else ()), *self.machine.remarks)

    @property
    def _of_estimate(self) -> tuple[str, ...]:
        if self.found.refusal is not None:
            return (f"{self.request.sizes.source} does not fit: {self.found.refusal}", *self._remedies)
        if self.found.row is not None and self.found.estimate.max_num_tokens == 0:
            return ("the estimate says out of memory where the table has a measurement; the measurement is used",)
        return warnings_of(self.found.estimate, self.tokens)

    @property
    def _remedies(self) -> list[str]:
        """Return changes with which the model fits, tried out."""
        degree = self.found.estimate.conditions.tensor_parallel
        for more in degrees_of(self.machine, self.request.sizes):
            if more > degree and self.request.on(self.machine, more).fits:
                return [f"it fits with --tp {more}"]
        compare = "use a machine with more memory: djl-trtllm size MODEL --compare shows which ones hold it"
        return [] if self.machine.gpus is None else [compare]

    def as_json(self) -> dict[str, Any]:
        request, found = self.request, self.found
        sizes, estimate, row = request.sizes, found.estimate, found.row
        shape = sizes.shape
        return {
            "model": {
                "source": sizes.source,
                "parameters": sizes.parameters,
                "bytes": sizes.bytes,
                "exact": sizes.exact,
                "quantization": sizes.quantization,
                "layers": shape.num_layers,
                "hidden_size": shape.hidden,
                "heads": shape.num_heads,
                "kv_heads": shape.num_kv_heads,
                "vocabulary": shape.vocab_size,
                "experts": sizes.experts,
            },
            **_as_json(self.machine, found),
            "pipeline_parallel": estimate.conditions.pipeline_parallel,
            "largest_max_num_tokens": found.maximum,
            "estimated_largest_max_num_tokens": estimate.max_num_tokens,
            "measured": None if row is None else {"row": str(row), "max_num_tokens": row.max_num_tokens},
            "memory_per_gpu": self.memory,
            "kv_bytes_per_token": estimate.kv_bytes_per_token,
            "sequences": {"input": request.input_len, "output": request.output_len, "count": self.sequences},
            "speed": None if self.speed is None else speed_json(self.speed, self.machine.hourly_price),
            "options": {f"option.{name}": value for name, value in self.settings.items()},
            "warnings": list(self.warnings),
        }

    def lines(self) -> list[str]:
        """The report for people, without warnings; the lines to paste are its end."""
        speed = [] if self.speed is None else speed_lines(self.speed, self.machine.hourly_price)
        parts = [self._model_lines(), self._memory_lines(), self._capacity_lines(), speed, self._option_lines()]
        return [line for part in parts if part for line in ("", *part)][1:]

    def _model_lines(self) -> list[str]:
        sizes, conditions, price = self.request.sizes, self.found.estimate.conditions, self.machine.hourly_price
        shape, count = sizes.shape, sizes.parameters
        number = f"{count / 1e9:.2f} billion" if count >= 10**9 else f"{count / 1e6:.1f} million"
        stored = sizes.quantization or shape.dtype
        first = [
            f"{sizes.source}: {number} parameters{f' in {stored}' if stored else ''}",
            f"{_gib(sizes.bytes)} GiB",
            *([] if sizes.exact else ["counted from config.json"]),
            *([f"quantised with {conditions.quantization}"] if conditions.quantization else []),
        ]
        second = [
            f"  {shape.num_layers} layers",
            f"hidden size {shape.hidden}",
            f"{shape.num_heads} heads of which {shape.num_kv_heads} in the KV cache",
            f"vocabulary {shape.vocab_size}",
            *([f"{sizes.experts} experts"] if sizes.experts else []),
        ]
        cost = "" if price is None else f", {price:.2f} USD per hour"
        third = [
            f"on {self.machine}{cost}; tensor parallel {conditions.tensor_parallel}",
            *([f"pipeline parallel {conditions.pipeline_parallel}"] if conditions.pipeline_parallel > 1 else []),
            _ENGINES[conditions.backend],
        ]
        return [", ".join(first), ", ".join(second), ", ".join(third)]

    def _memory_lines(self) -> list[str]:
        conditions = self.found.estimate.conditions
        total, needed = conditions.gpu_memory, sum(self.memory.values())
        notes = {
            "activations": f"for max_num_tokens {self.tokens}" if self.tokens else "",
            "kv_cache": f"in {conditions.utilization:g} of the GPU"
            if conditions.backend == "vllm"
            else f"{conditions.fraction:g} of what the others leave",
        }
        rows = [("memory of each GPU", "GiB", "share", "")]
        for part, size in self.memory.items():
            name = "KV cache" if part == "kv_cache" else part
            rows.append((name, _gib(size), f"{100 * size / total:.1f} %", notes.get(part, "")))
        if needed > total:
            rows.append(("needed", _gib(needed), "", ""))
        rows.append(("the GPU has", _gib(total), "", ""))
        return columns(rows, right=(1, 2))

    def _capacity_lines(self) -> list[str]:
        estimate, request, found = self.found.estimate, self.request, self.found
        if not found.fits:
            return [f"max_num_tokens: none fits; the KV cache takes {estimate.kv_bytes_per_token:,} bytes per token"]
        lines = [
            f"KV cache: {estimate.kv_bytes_per_token:,} bytes per token and GPU, {self.kv_tokens:,} tokens: "
            f"{self.sequences} sequences of {request}",
            f"max_num_tokens: {self.tokens}, from {found.origin}",
        ]
        if found.row is not None:
            lines.append(
                f"  the estimate of the largest one is {estimate.max_num_tokens}, the table has {found.maximum}"
            )
        return lines

    def _option_lines(self) -> list[str]:
        if not self.settings:
            return []
        return [
            "# For serving.properties. max_num_tokens raises the lengths to 4096 and the batch to 256, at least.",
            "# Without it the server finds the number itself, and raises nothing.",
            *(f"option.{name}={value}" for name, value in self.settings.items()),
        ]


def _as_json(machine: Machine, found: Recommendation) -> dict[str, Any]:
    price = machine.hourly_price
    return {
        "machine": {
            "name": machine.name,
            "gpu": machine.gpu,
            "gpus": machine.gpus,
            "gpu_memory": machine.memory,
            "usd_per_hour": price,
            "price": None if price is None else str(PRICES),
        },
        "tensor_parallel": found.estimate.conditions.tensor_parallel,
        "fits": found.fits,
        "max_num_tokens": found.max_num_tokens or None,
        "origin": found.origin if found.fits else None,
        "kv_tokens": _kv_tokens(found),
    }


def _kv_tokens(found: Recommendation) -> int:
    return found.estimate.kv_tokens(found.max_num_tokens) if found.fits else 0


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"


class Comparison:
    """The answer about one model on many machines.

    Without `machines`: all AWS instance types, and of types with the same GPUs the cheapest that loads the model.
    """

    def __init__(
        self, request: SizeRequest, machines: Sequence[Machine], degrees: Sequence[int], sequences: int | None
    ) -> None:
        self._request, self._sequences, self._least = request, sequences, sequences or 1
        sized: dict[tuple[str, int, int], Recommendation] = {}

        def size(machine: Machine, degree: int) -> Recommendation:
            # Machines with the same GPUs differ in nothing else.
            key = (machine.gpu, machine.memory, degree)
            if key not in sized:
                sized[key] = request.on(machine, degree)
            return sized[key]

        self.all = candidates(request.sizes, machines or aws_machines(), size, length=request.length, degrees=degrees)
        self.shown = self.all if machines else best_of_each(self.all, request.sizes)
        self.cheapest = cheapest(self.all, request.sizes, self._least)
        self._priced = any(one.price is not None for one in self.all)

    @property
    def answered(self) -> bool:
        """Return whether any machine holds what is asked for."""
        return any(one.sequences >= self._least for one in self.all)

    def as_json(self) -> dict[str, Any]:
        def entry(one: Candidate) -> dict[str, Any]:
            return _as_json(one.machine, one.found) | {"sequences": one.sequences}

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
            *columns([head, *(_row(one) for one in self.shown)], right=(2, 3, 4, 6, 7, 8)),
            "",
            self.answer,
            *([f"{prices} is counted."] if self._priced else []),
        ]

    @property
    def answer(self) -> str:
        best = self.cheapest
        wanted = f"{self._sequences} sequences of {self._request.length} tokens" if self._sequences else "the model"
        if best is not None:
            return (
                f"cheapest for {wanted}: {best.machine.name} ({best.machine.gpus} x {best.machine.gpu}), tp "
                f"{best.tensor_parallel}, {best.price:.2f} USD per hour: {best.sequences} sequences"
            )
        if (least := smallest(self.all, self._least)) is not None:
            degree = least.tensor_parallel
            dearer = "; none of these machines with a price holds as much" if self._priced else ""
            return (
                f"smallest for {wanted}: {degree} x {least.machine.gpu}, tp {degree}: {least.sequences} "
                f"sequences{dearer}"
            )
        most = max(self.all, key=lambda one: one.sequences, default=None)
        if most is None or most.sequences == 0:
            return f"{wanted}: none of these machines holds it; quantise (--quantize fp8), or spread it over more GPUs"
        return f"{wanted}: none of these machines holds them; the most is {most.sequences} on {most.machine.name}"


def _row(one: Candidate) -> tuple[str, ...]:
    found, machine = one.found, one.machine
    estimated = "estimate" if found.row is None else "measured"
    holds = (str(found.max_num_tokens), estimated, f"{_kv_tokens(found):,}", str(one.sequences))
    return (
        *machine.cells(one.tensor_parallel),
        str(one.tensor_parallel),
        f"{found.estimate.weights / _GIB:.1f} GiB",
        *(holds if found.fits else ("out of memory", "", "", "")),
        dollars(one.price),
    )


# -- the picture -------------------------------------------------------------------------------------------------------

_FORMATS = (".png", ".svg")
_POINTS = 96
_LEAST = 256
_COLOURS = {
    "weights": "#4477aa",
    "activations": "#ee6677",
    "communication": "#aa3377",
    "overhead": "#ccbb44",
    "kv_cache": "#228833",
    "unused": "#d5d5d5",
}
"""Colours of the parts of the memory: Paul Tol's "bright", which the colour-blind can distinguish."""


def draw(path: Path, report: SizeReport) -> None:
    """Write the picture. Raises SizingError if matplotlib is missing, or for another kind of file."""
    if path.suffix.lower() not in _FORMATS:
        raise SizingError(f"--plot {path}: expected a name that ends with {' or '.join(_FORMATS)}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SizingError("--plot needs matplotlib: pip install 'djl-trtllm[plot]'") from None
    fits, conditions = report.found.fits, report.found.estimate.conditions
    figure = Figure(figsize=(12 if fits else 7.5, 5.6), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    name = Path(report.request.sizes.source).name or report.request.sizes.source
    quantised = f", {conditions.quantization}" if conditions.quantization else ""
    figure.suptitle(f"{name}{quantised} on {report.machine}, tensor parallel {conditions.tensor_parallel}")
    memory, *capacity = figure.subplots(1, 2 if fits else 1, squeeze=False, width_ratios=(1, 2.5) if fits else None)[0]
    _draw_memory(memory, report)
    for axes in capacity:
        _draw_capacity(axes, report)
    try:
        figure.savefig(path, dpi=144)
    except OSError as error:
        raise SizingError(f"--plot {path}: cannot write it: {error.strerror or error}") from error


def _draw_memory(axes: Any, report: SizeReport) -> None:
    """Draw one bar: the memory of each GPU by part."""
    total = report.found.estimate.conditions.gpu_memory
    bottom = 0.0
    for part, size in report.memory.items():
        if size:
            label = f"{'KV cache' if part == 'kv_cache' else part}  {size / _GIB:.2f} GiB  ({100 * size / total:.1f} %)"
            axes.bar(0, size / _GIB, bottom=bottom, color=_COLOURS[part], edgecolor="white", label=label)
            bottom += size / _GIB
    axes.axhline(total / _GIB, color="black", linestyle="--", label=f"GPU  {total / _GIB:.1f} GiB")
    axes.set(xticks=[], ylabel="GiB of each GPU")
    axes.set_title(f"memory at max_num_tokens {report.tokens:,}" if report.tokens else "out of memory")
    axes.legend(reverse=True, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False)


def _draw_capacity(axes: Any, report: SizeReport) -> None:
    """Draw the tokens and sequences that the KV cache holds, by max_num_tokens."""
    estimate, chosen, largest, length = (
        report.found.estimate,
        report.tokens,
        report.found.maximum,
        report.request.length,
    )
    most = max(largest, estimate.max_num_tokens, 2 * _LEAST, chosen)
    tokens = sorted({round(_LEAST * (most / _LEAST) ** (step / (_POINTS - 1))) for step in range(_POINTS)})
    held = [estimate.kv_tokens(count) for count in tokens]
    source = "measured" if report.found.row is not None else "estimated"
    here = f"max_num_tokens {chosen:,}\n{report.kv_tokens:,} tokens in the KV cache\n{report.sequences:,} sequences"
    axes.fill_between(tokens, held, color=_COLOURS["kv_cache"], alpha=0.3)
    axes.axvline(chosen, color="black", label=f"{here} of {length:,}")
    axes.axvline(largest, color=_COLOURS["activations"], linestyle="--", label=f"largest, {source}: {largest:,}")
    axes.set_xscale("log", base=2)
    axes.set(xlim=(tokens[0], most * 1.15), ylim=(0, max(held) * 1.15 or 1))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="max_num_tokens", ylabel="tokens in the KV cache", title="capacity by max_num_tokens")
    second = axes.secondary_yaxis("right", functions=(lambda held: held / length, lambda count: count * length))
    second.set_ylabel(f"sequences of {length:,} tokens")
    axes.grid(alpha=0.4)
    axes.legend(loc="lower left")
