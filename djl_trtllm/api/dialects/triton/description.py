"""Descriptions of the server and its models, as plain dictionaries with the names of KServe's JSON.

Triton's models for TensorRT-LLM are `ensemble` and `tensorrt_llm_bls`, and the parts that they are made of. The one
model of a server has all of these names beside its own; the parts take no requests. In a repository of the LLM API,
`tensorrt_llm` is the model, and takes them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from djl_trtllm.api.base import ModelContext, ModelStatus
from djl_trtllm.api.dialects.triton.inference import BLS_INPUTS, InputSpec, OutputSpec, interface_of
from djl_trtllm.api.parameters import show
from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.errors import InvalidRequestError, NotReadyError, UnknownModelError, UnsupportedParameterError
from djl_trtllm.request import FinishReason
from djl_trtllm.version import __version__

ENSEMBLE = "ensemble"
BLS = "tensorrt_llm_bls"
PARTS = ("postprocessing", "preprocessing", "tensorrt_llm")
NAMES = frozenset({ENSEMBLE, BLS, *PARTS})
"""The models of a repository: names that mean the only model."""

VERSION = "1"
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "generate",
    "model_configuration",
    "model_repository",
    "statistics",
)
_READY = {"state": "READY", "reason": ""}
_NOT_READY = {"state": "UNAVAILABLE", "reason": "loading, recovering or failed: see GET /ping"}
_FAILED = (FinishReason.CANCELLED, FinishReason.ERROR)


def check_version(version: str | None, name: str) -> None:
    """Raises UnknownModelError for a version that is not there; None and "" are the newest."""
    if version not in (None, "", VERSION):
        raise UnknownModelError(
            f"model '{name}' has no version {version[:20]!r}: there is version {VERSION}", name=name
        )


def check_takes_requests(name: str, model: ModelContext) -> None:
    """Raises InvalidRequestError for the part of an ensemble. The LLM API's `tensorrt_llm` is none."""
    if name in PARTS and interface_of(model).batched:
        raise InvalidRequestError(
            f"model '{name}' is a part that takes no requests here: send them to '{ENSEMBLE}' or '{BLS}', as text"
        )


def page(kind: str, models: Sequence[ModelStatus], name: str | None) -> dict[str, Any]:
    """The server's metadata, or statistics of `models`, or the metadata or configuration of the only one of them.

    `name` is the model's in the request. Raises NotReadyError for a model that is not known yet.
    """
    if kind == "server":
        return server_metadata()
    if kind in ("stats", "all_statistics"):
        return statistics(models, name)
    (model,) = models
    if model.context is None:
        raise NotReadyError(f"model '{model.name}' is not ready", retry_after=10)
    name = name or model.name
    return (model_config if kind == "config" else model_metadata)(name, model.context)


def server_metadata() -> dict[str, Any]:
    return {"name": "djl-trtllm", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(name: str, model: ModelContext) -> dict[str, Any]:
    """`name` is the one in the request. Raises InvalidRequestError for a part."""
    check_takes_requests(name, model)
    interface = interface_of(model)
    return {
        "name": name,
        "versions": [VERSION],
        "platform": ENSEMBLE if interface.batched else "python",
        "inputs": [_described(each, batched=interface.batched) for each in _inputs_of(name, model)],
        "outputs": [_described(each, batched=interface.batched) for each in interface.outputs],
    }


def model_config(name: str, model: ModelContext) -> dict[str, Any]:
    """Triton's model configuration, with the names of its protocol buffer. Raises InvalidRequestError for a part."""
    check_takes_requests(name, model)
    interface = interface_of(model)
    return {
        "name": name,
        "platform": ENSEMBLE if interface.batched else "",
        "backend": "" if interface.batched else "python",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": model.options.max_rolling_batch_size if interface.batched else 0,
        "input": [_configured(each) | {"optional": each.optional} for each in _inputs_of(name, model)],
        "output": [_configured(each) for each in interface.outputs],
        "model_transaction_policy": {"decoupled": is_decoupled(model)},
    }


def is_decoupled(model: ModelContext) -> bool:
    """Whether a request may have several responses: every model streams unless its configuration says otherwise."""
    return model.options.decoupled is not False


def _inputs_of(name: str, model: ModelContext) -> list[InputSpec]:
    return [each for each in interface_of(model).inputs if name == BLS or each not in BLS_INPUTS]


def statistics(models: Sequence[ModelStatus], name: str | None = None) -> dict[str, Any]:
    """Totals since each model was loaded; `name` is the one in the request, if it names one.

    A sequence is counted when it has ended. Triton counts a request for each part of the ensemble, too.
    """
    return {"model_stats": [_statistics(model, name or model.name) for model in models]}


def repository_index(models: Sequence[ModelStatus], *, ready_only: bool = False) -> list[dict[str, Any]]:
    """The models with their states; the only one under all of its names, as Triton lists the parts of an ensemble."""
    return [
        {"name": name, "version": VERSION, **(_READY if model.ready else _NOT_READY)}
        for model in models
        if model.ready or not ready_only
        for name in sorted({model.name, *(NAMES if len(models) == 1 else ())})
    ]


def _described(each: InputSpec | OutputSpec, *, batched: bool) -> dict[str, Any]:
    return {"name": each.name, "datatype": each.datatype, "shape": [*[-1] * batched, *each.dims]}


def _configured(each: InputSpec | OutputSpec) -> dict[str, Any]:
    kind = "STRING" if each.datatype == "BYTES" else each.datatype
    return {"name": each.name, "data_type": f"TYPE_{kind}", "dims": list(each.dims)}


def _statistics(model: ModelStatus, name: str) -> dict[str, Any]:
    figures = model.statistics
    failed = sum(figures.finished[reason] for reason in _FAILED)
    ended = figures.finished.total() - failed
    queue, whole, first = figures.queue_time, figures.request_time, figures.time_to_first_token
    nothing = {"count": 0, "ns": 0}
    return {
        "name": name,
        "version": VERSION,
        "last_inference": round(figures.last_request_at * 1000),
        "inference_count": ended,
        "execution_count": ended,
        "inference_stats": {
            "success": {"count": ended, "ns": _nanoseconds(whole.sum)},
            "fail": {"count": failed, "ns": 0},
            "queue": _duration(queue),
            "compute_input": {"count": sum(first.counts), "ns": _nanoseconds(max(0.0, first.sum - queue.sum))},
            "compute_infer": {
                "count": sum(whole.counts),
                "ns": _nanoseconds(max(0.0, whole.sum - max(first.sum, queue.sum))),
            },
            "compute_output": nothing,
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def _duration(histogram: Histogram) -> dict[str, int]:
    return {"count": sum(histogram.counts), "ns": _nanoseconds(histogram.sum)}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


# What Triton's API has beside inference and is not here: refused by name, with what to do instead.
#
# Source of the paths: `http_server.cc` of Triton (e1db8a6).


_SHARED_MEMORY = "tensors are not passed in shared memory here: send their values in the request"
_LOADING = (
    "models are not loaded and unloaded through Triton's API here: POST /models of this server loads one, and DELETE "
    "/models/NAME unloads it"
)
_SETTINGS = "this server has no traces, and its log is set up when it starts: GET /metrics has the times of requests"

_OF_TENSORS = {"classification": "no output has classes"}

_MODEL_SETTING = "/v2/models/{model}/trace/setting"
REFUSED_ACTIONS = {
    **{f"/v2/repository/models/{{name}}/{verb}": _LOADING for verb in ("load", "unload")},
    **{
        f"/v2/{kind}sharedmemory{path}": _SHARED_MEMORY
        for kind in ("system", "cuda")
        for path in ("/region/{region}/register", "/region/{region}/unregister", "/unregister")
    },
    **dict.fromkeys(("/v2/trace/setting", _MODEL_SETTING, "/v2/logging"), _SETTINGS),
}
"""Paths of POST requests, each with the explanation."""
REFUSED_PAGES = {
    **{
        f"/v2/{kind}sharedmemory{path}/status": _SHARED_MEMORY
        for kind in ("system", "cuda")
        for path in ("", "/region/{region}")
    },
    **dict.fromkeys(("/v2/trace/setting", _MODEL_SETTING, "/v2/logging"), _SETTINGS),
}
"""Paths of GET requests, each with the explanation."""
REFUSED_METHODS = {
    "RepositoryModelLoad": _LOADING,
    "RepositoryModelUnload": _LOADING,
    **{
        f"{kind}SharedMemory{verb}": _SHARED_MEMORY
        for kind in ("System", "Cuda")
        for verb in ("Status", "Register", "Unregister")
    },
    "TraceSetting": _SETTINGS,
    "LogSettings": _SETTINGS,
}
"""Methods of the gRPC API."""


def refuse_tensor_parameters(given: Iterable[str], tensor: str, known: str = "") -> None:
    """Refuse parameters of a tensor (`input 'x'`) but the `known` one. Raises InvalidRequestError."""
    for name in sorted(set(given) - {known}):
        explanation = _SHARED_MEMORY if name.startswith("shared_memory_") else _OF_TENSORS.get(name)
        if explanation is not None:
            raise UnsupportedParameterError(f"parameter {show(name)} of {tensor} is not available: {explanation}")
        raise InvalidRequestError(f"unknown parameter {show(name)} of {tensor}: expected {known or 'none'}")
