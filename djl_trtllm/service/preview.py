"""What a model would be served as, found out without serving it: no weights are fetched and no engine is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from djl_trtllm.backends.planning import suppose_machine
from djl_trtllm.backends.registry import this_machine
from djl_trtllm.config import Config, load
from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import DjlTrtllmError, DownloadError, NotDescribedError
from djl_trtllm.model import Layout
from djl_trtllm.model.remote.fetch import is_remote
from djl_trtllm.model.remote.s3 import S3Address, is_s3
from djl_trtllm.model.vocabulary import load_fitting_tokenizer
from djl_trtllm.service.model import ModelSource, layout_of, open_remote, open_source, plan

_HANDLERS = ("djl_trtllm.handler", "djl_trtllm.async_handler")
_WITHOUT_GPU = ("auto", "openvino", "scripted")


@dataclass(frozen=True)
class Preview:
    """The configuration, and its plan or the reason why it cannot be served.

    Neither of the two: there is nothing to plan yet. `remarks` say what was supposed or not looked at.
    """

    config: Config
    hardware: Hardware
    plan: EnginePlan | None = None
    refusal: str | None = None
    remarks: tuple[str, ...] = ()

    @property
    def under_djl(self) -> bool:
        """Whether the model is meant for DJL Serving: in its container, or by the handler that its options name."""
        return _under_djl(self.config)


@dataclass(frozen=True)
class _Machine:
    """The machine that a plan is for. `asked`: the user names the backend, which is there then."""

    asked: bool = False
    gpus: tuple[Gpu, ...] = ()
    here: Hardware = field(default_factory=lambda: this_machine())

    @property
    def hardware(self) -> Hardware:
        if self.gpus or self.asked:
            return suppose_machine(self.here, self.gpus or self.here.gpus)
        return self.here

    def remarks(self, engine_plan: EnginePlan | None = None) -> tuple[str, ...]:
        """What was supposed of the machine."""
        if engine_plan is not None and not engine_plan.gpus:
            return (f"no GPU is used: the backend is {engine_plan.backend}",) if self.gpus else ()
        there, here = self.hardware, self.here
        if there.gpus == here.gpus and (there.tensorrt_llm == here.tensorrt_llm or not there.gpus):
            return ()
        names = sorted({gpu.name or "any NVIDIA GPU" for gpu in there.gpus})
        return (
            f"planned for {len(there.gpus)} x {' and '.join(names)} with TensorRT-LLM {there.tensorrt_llm}, not for "
            "this machine",
        )

    def wants_gpus(self, config: Config) -> bool:
        """Whether the backend that the user asks for needs GPUs of which none is here or named."""
        return self.asked and not self.hardware.gpus and config.options.backend.value not in _WITHOUT_GPU


def preview(
    model: str | None, environ: Mapping[str, str], backend: str | None = None, gpus: tuple[Gpu, ...] = ()
) -> Preview:
    """Plan the model as `serve` would; without one, what the environment alone says.

    `backend` overrides `option.backend`. With it or with `gpus` the plan may be for another machine: one with these
    GPUs, or with those that the backend needs, and with TensorRT-LLM. Of remote models only the files that describe
    them are fetched. Raises ModelError if there is no such model here, and ConfigError.
    """
    arguments = [] if backend is None else [f"option.backend={backend}"]
    machine = _Machine(asked=backend is not None, gpus=gpus)
    if model is not None and not is_remote(model):
        return _planned(open_source(Path(model), environ, arguments), machine)
    alone = load(None, environ, arguments=arguments)
    model = model or alone.options.model_id
    if model is None:
        return Preview(alone, machine.hardware, remarks=("no model is named: this is what the environment says",))
    try:
        if _is_archive(model):
            return _unopened(model, alone, machine)
        if is_remote(model):
            return _planned(open_remote(model, environ, arguments, config_only=True), machine)
        return _planned(open_source(Path(model), environ, arguments), machine)
    except DownloadError as error:
        return Preview(alone, machine.hardware, refusal=str(error))


def _planned(source: ModelSource, machine: _Machine) -> Preview:
    source = replace(source, config_only=True)
    config = source.config
    try:
        model_id = config.options.model_id
        if model_id is not None and _is_archive(model_id):
            return _unopened(model_id, config, machine)
        if machine.wants_gpus(config):
            machine = replace(machine, gpus=(Gpu(),) * _ranks(config, layout_of(source)))
        config, layout, engine_plan = plan(source, machine.hardware, under_djl=_under_djl(config))
        _check_tokenizer(layout)
    except NotDescribedError as error:
        return Preview(config, machine.hardware, remarks=(f"not planned: {error}",))
    except DjlTrtllmError as error:
        return Preview(config, machine.hardware, refusal=str(error), remarks=machine.remarks())
    remarks = machine.remarks(engine_plan)
    if not layout.weight_files:
        remarks += ("the weights are fetched and checked when the model is served",)
    return Preview(config, machine.hardware, plan=engine_plan, remarks=remarks)


def _check_tokenizer(layout: Layout) -> None:
    """Raise TokenizerError as `serve` does, where the tokenizer is read in a moment and without code of the model."""
    if layout.tokenizer_dir is not None and (layout.tokenizer_dir / "tokenizer.json").is_file():
        load_fitting_tokenizer(layout, trust_remote_code=False)


def _under_djl(config: Config) -> bool:
    return "DJL_SERVING_HOME" in os.environ or config.options.entry_point in _HANDLERS


def _ranks(config: Config, layout: Layout) -> int:
    """How many GPUs the model is spread over; `max` is one where there are none."""
    options = config.options
    degrees = (
        layout.tensor_parallel or options.tensor_parallel_degree,
        layout.pipeline_parallel or options.pipeline_parallel_degree,
        options.context_parallel_size,
    )
    return math.prod(degree for degree in degrees if isinstance(degree, int))


def _is_archive(model: str) -> bool:
    return is_s3(model) and model.endswith(".tar.gz")


def _unopened(model: str, config: Config, machine: _Machine) -> Preview:
    """An archive in S3 is fetched whole or not at all: only whether it is there is looked up. Raises DownloadError."""
    from djl_trtllm.model.remote.s3_download import list_objects

    list_objects(S3Address.parse(model))
    remark = f"not planned: {model} is opened when it is served, with the serving.properties in it"
    return Preview(config, machine.hardware, remarks=(remark,))
