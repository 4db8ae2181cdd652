"""The question of `djl-trtllm size`, `advise` and `bench --record`: a model with its options, and the machines."""

import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from djl_trtllm.commands.console import say, warn
from djl_trtllm.config import Config, Task, load
from djl_trtllm.config.options.choices import Backend
from djl_trtllm.config.speculation import speculation_of
from djl_trtllm.engines.hardware import GpuState, read_states, visible_gpus
from djl_trtllm.errors import BenchmarkError, LayoutError, SizingError
from djl_trtllm.model import ModelKind, inspect
from djl_trtllm.model.pooling import task_of
from djl_trtllm.model.remote.fetch import is_remote
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import Conditions, usual_vllm_tokens
from djl_trtllm.sizing.machines import Machine, gpu_found, of_gpu, of_instance, of_memory
from djl_trtllm.sizing.points import ENGINES, FILE_NAME, Point, fingerprint, precision_of, read_points, write_point
from djl_trtllm.sizing.recommendation import DEFAULT_LMI, Recommendation, conditions_of, recommend
from djl_trtllm.sizing.speed import CONSTANTS, Load, Rank, Roofline, Speed, corrected

WIDENED, WIDENED_BATCH = 4096, 256
"""The lengths and the batch to which a max_num_tokens that a user sets raises them."""
_GIB = 1 << 30
_DRIVERS = 2 * _GIB
"""Memory in use that is no warning: the driver keeps half a GiB of a large GPU, and a program's context as much."""


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
        conditions = replace(conditions, max_batch_size=max(WIDENED_BATCH, conditions.max_batch_size))
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
        """The measured points of all models. Raises SizingError for a broken file."""
        return read_points(self.config.engine_cache_dir)

    def subject(self, machine: Machine, conditions: Conditions) -> dict[str, Any]:
        """The fields of a measured point that say what was measured: the model, its engine and its GPUs."""
        return {
            "model": fingerprint(self.sizes),
            "engine": ENGINES.get(self.config.options.backend.value, ENGINES["tensorrt"]),
            "gpu": machine.gpu if machine.gpu_model is None else machine.gpu_model.name,
            "gpus": conditions.ranks,
            "precision": precision_of(self.sizes, conditions.quantization, conditions.kv_dtype),
        }

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
        roofline = Roofline(Rank(self.sizes, conditions, gpu), CONSTANTS[self.engine])
        subject = self.subject(machine, conditions).items()
        same = [point for point in self.points if all(getattr(point, name) == value for name, value in subject)]
        return corrected(roofline, load, min(room, conditions.max_batch_size), same)


def read_request(
    model: str, flags: Mapping[str, object], lmi: str = DEFAULT_LMI, images: str | None = None
) -> SizeRequest:
    """Read a model's options and the headers of its weights. `images` are added to its prompts.

    `flags` are options by name, None where a flag is not given. Raises ModelError, ConfigError and SizingError.
    """
    settings = {name: str(value) for name, value in flags.items() if value is not None}
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
class Recorder:
    """Keeps what a bench measures as points, with what it cannot see: the model's sizes, the engine and the GPUs.

    `measured` are fields of the points: what `SizeRequest.subject` has, `name` and `version`.
    """

    folder: Path
    measured: Mapping[str, Any]

    @classmethod
    def of(cls, model: str, engine: str | None, gpu: str | None) -> "Recorder":
        """Read the model, before anything is measured. Raises BenchmarkError, SizingError, ModelError, ConfigError."""
        request = read_request(model, {})
        backend = request.config.options.backend.value
        name, _, version = (engine or backend).partition("==")
        name = ENGINES.get(name, name)
        if name not in ENGINES.values():
            given = f"--engine {engine}" if engine else f"--record {model}: its options have backend={backend}"
            known = ", ".join(dict.fromkeys(ENGINES.values()))
            raise BenchmarkError(f"{given}: expected --engine with the server's engine, one of {known}")
        machine = machines_of([] if gpu is None else [gpu], None, [], here=True)[0]
        conditions = request.on(machine, request.degree_on(machine)).estimate.conditions
        named: dict[str, Any] = {"engine": name, "version": version, "name": request.sizes.source}
        if gpu is not None and machine.gpus:
            named["gpus"] = machine.gpus
        read_points(request.config.engine_cache_dir)  # one that cannot be read is an error now, not after the loads
        return cls(request.config.engine_cache_dir, request.subject(machine, conditions) | named)

    def write(self, loads: Iterable[Mapping[str, Any]], prompt_tokens: int, command: str) -> None:
        """Keep a point for each load (`Figures.as_json`) of clients whose requests all succeeded. Raises SizingError.

        `prompt_tokens` is the length of prompts that the server did not count, `command` what measured them.
        """
        whole = [each for each in loads if "concurrency" in each and each["complete"]]
        kept = [each for each in whole if each["requests"]["succeeded"] and not each["requests"]["failed"]]
        for each in kept:
            point = Point(
                **self.measured,
                isl=max(1, round(each["prompt_tokens_mean"] or prompt_tokens)),
                osl=max(1, round(each["output_tokens_mean"])),
                clients=each["concurrency"],
                tokens_per_second=each["output_tokens_per_second"],
                ttft_p50=each["ttft_seconds"].get("p50"),
                command=command,
                date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            )
            write_point(self.folder, point)
        if kept:
            say(Console(stderr=True), f"recorded in {self.folder / FILE_NAME}: {len(kept)} loads")
        else:
            warn("nothing to record: a point is of clients (--concurrency) whose requests all succeed")
