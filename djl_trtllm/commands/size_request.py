"""What `djl-trtllm size` is asked: the model, its options and the machines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from djl_trtllm.config import Config, load, names_configuration
from djl_trtllm.config.options.choices import Backend
from djl_trtllm.engines.gpu_state import GpuState, read_states
from djl_trtllm.errors import LayoutError, SizingError
from djl_trtllm.model import ModelKind, inspect
from djl_trtllm.model.remote.fetch import is_remote
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.configured import conditions_of
from djl_trtllm.sizing.gpus import gpu_found
from djl_trtllm.sizing.machines import Machine, of_gpu, of_instance, of_memory
from djl_trtllm.sizing.measured import DEFAULT_LMI
from djl_trtllm.sizing.recommendation import Recommendation, recommend

_WIDENED_BATCH = 256
_GIB = 1 << 30
_DRIVERS = 2 * _GIB
"""The driver itself keeps half a GiB of a large GPU, and other programs' contexts as much."""


@dataclass(frozen=True)
class SizeRequest:
    """`settings` are the options that flags set, as in serving.properties."""

    sizes: CheckpointSizes
    config: Config
    settings: Mapping[str, str]
    lmi: str = DEFAULT_LMI

    @property
    def input_len(self) -> int:
        """At most a token less than the model's context; two thirds of it where nobody asked for more."""
        asked, context = self.config.options.max_input_len, self.sizes.shape.max_position_embeddings
        if context is None:
            return asked
        return min(asked, context - 1 if self.config.is_set("max_input_len") else max(1, context * 2 // 3))

    @property
    def output_len(self) -> int:
        """At most what the prompt leaves of the model's context."""
        asked, context = self.config.options.max_output_len, self.sizes.shape.max_position_embeddings
        return asked if context is None else min(asked, context - self.input_len)

    @property
    def shortened(self) -> str | None:
        """What of the lengths asked for the model's context does not hold."""
        options = self.config.options
        set_by_user = self.config.is_set("max_input_len") or self.config.is_set("max_output_len")
        if not set_by_user or options.max_input_len + options.max_output_len == self.length:
            return None
        return (
            f"sequences of {options.max_input_len} + {options.max_output_len} tokens are longer than the model's "
            f"context of {self.sizes.shape.max_position_embeddings}: counted are {self.input_len} + {self.output_len}"
        )

    @property
    def length(self) -> int:
        """Tokens of the sequences that are counted."""
        return self.input_len + self.output_len

    @property
    def compiled(self) -> bool:
        return self.config.options.backend in (Backend.AUTO, Backend.TENSORRT)

    def degree_on(self, machine: Machine) -> int:
        """The tensor parallel degree that the options say, `max` as many as there are GPUs. Raises SizingError."""
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
        )
        conditions = replace(conditions, max_batch_size=max(_WIDENED_BATCH, conditions.max_batch_size))
        return recommend(self.sizes, conditions, machine.known, gpu=machine.gpu, lmi=self.lmi)


def read_request(model: str, settings: Mapping[str, str], lmi: str) -> SizeRequest:
    """Read a model's options and the headers of its weights. Raises ModelError and ConfigError."""
    arguments = [f"option.{name}={value}" for name, value in settings.items()]
    environ = {name: value for name, value in os.environ.items() if name != "HF_MODEL_ID"}
    if is_remote(model):
        config, checkpoint = load(None, environ, arguments=arguments), model
    else:
        directory, config = _opened(Path(model), environ, arguments)
        own = config.options.model_id
        checkpoint = str(directory) if own is None else _named(directory, own)
    _refuse_engine(checkpoint)
    hub_cache = None if config.options.download_dir is None else config.options.download_dir / "hub"
    sizes = CheckpointSizes.read(checkpoint, revision=config.options.revision, hub_cache=hub_cache)
    if not sizes.layers or not sizes.parts:
        raise SizingError(
            f"{checkpoint}/config.json does not give the layers, the heads and the hidden size of the model as numbers "
            "above 0, so nothing can be estimated; --measure finds what fits"
        )
    return SizeRequest(sizes, config, settings, lmi)


def _opened(path: Path, environ: Mapping[str, str], arguments: Sequence[str]) -> tuple[Path, Config]:
    """The model's directory and its configuration."""
    if names_configuration(path) or path.is_dir():
        return path.parent if names_configuration(path) else path, load(path, environ, arguments=arguments)
    # An archive, or nothing. Importing the service takes a quarter of a second.
    from djl_trtllm.service.model import open_source

    source = open_source(path, environ, arguments)
    return source.directory, source.config


def _named(directory: Path, model_id: str) -> str:
    return str(directory / model_id) if (directory / model_id).is_dir() else model_id


def _refuse_engine(checkpoint: str) -> None:
    if is_remote(checkpoint):
        return
    try:
        layout = inspect(Path(checkpoint))
    except LayoutError:
        return  # a config.json alone is enough
    if layout.kind.is_engine:
        raise SizingError(
            f"{checkpoint} is a {layout.kind.value}: it keeps what it was compiled for (djl-trtllm config shows it); "
            "name the checkpoint it was made from"
        )
    if layout.kind is not ModelKind.HF_CHECKPOINT:
        raise SizingError(
            f"{checkpoint} is a {layout.kind.value}, which is not read; name the Hugging Face checkpoint it was made "
            "from"
        )


def machines_of(gpu: Sequence[str], memory: str | None, instance: Sequence[str], *, here: bool) -> list[Machine]:
    """The machines that flags name, else, with `here`, this one. Raises SizingError."""
    asked = [("--gpu", of_gpu, name) for name in gpu] + [("--instance", of_instance, name) for name in instance]
    if memory is not None:
        asked.append(("--gpu-memory", of_memory, memory))
    named = [_machine(flag, read, text) for flag, read, text in asked]
    return named or ([_this_machine()] if here else [])


def _machine(flag: str, read: Callable[[str], Machine], text: str) -> Machine:
    try:
        return read(text)
    except SizingError as error:
        raise SizingError(f"{flag} {error}") from None


def _this_machine() -> Machine:
    from djl_trtllm.engines.gpu import visible_gpus

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
    """Memory in use, and GPUs that do not reach each other."""
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
