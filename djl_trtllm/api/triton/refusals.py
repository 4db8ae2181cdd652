"""What Triton's API has beside inference and is not here: refused by name, with what to do instead.

Source of the paths: `http_server.cc` of Triton (e1db8a6).
"""

from __future__ import annotations

from collections.abc import Iterable

from djl_trtllm.api.base import Operation
from djl_trtllm.api.parameters import show
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError

_SHARED_MEMORY = "tensors are not passed in shared memory here: send their values in the request"
_LOADING = (
    "models are not loaded and unloaded through Triton's API here: POST /models of this server loads one, and DELETE "
    "/models/NAME unloads it"
)
_SETTINGS = "this server has no traces, and its log is set up when it starts: GET /metrics has the times of requests"

_OF_TENSORS = {"classification": "no output has classes"}

_MODEL_SETTING = "/v2/models/{model}/trace/setting"
ACTIONS = {
    **{f"/v2/repository/models/{{name}}/{verb}": _LOADING for verb in ("load", "unload")},
    **{
        f"/v2/{kind}sharedmemory{path}": _SHARED_MEMORY
        for kind in ("system", "cuda")
        for path in ("/region/{region}/register", "/region/{region}/unregister", "/unregister")
    },
    **dict.fromkeys(("/v2/trace/setting", _MODEL_SETTING, "/v2/logging"), _SETTINGS),
}
"""Paths of POST requests, each with the explanation."""
PAGES = {
    **{
        f"/v2/{kind}sharedmemory{path}/status": _SHARED_MEMORY
        for kind in ("system", "cuda")
        for path in ("", "/region/{region}")
    },
    **dict.fromkeys(("/v2/trace/setting", _MODEL_SETTING, "/v2/logging"), _SETTINGS),
}
"""Those of GET requests."""
METHODS = {
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

DESCRIPTION = Operation("Refused: not available here", responses={}, errors={400: "Not available"})


def refuse_tensor_parameters(given: Iterable[str], tensor: str, known: str = "") -> None:
    """Refuse parameters of a tensor (`input 'x'`) but the `known` one. Raises InvalidRequestError."""
    for name in sorted(set(given) - {known}):
        explanation = _SHARED_MEMORY if name.startswith("shared_memory_") else _OF_TENSORS.get(name)
        if explanation is not None:
            raise UnsupportedParameterError(f"parameter {show(name)} of {tensor} is not available: {explanation}")
        raise InvalidRequestError(f"unknown parameter {show(name)} of {tensor}: expected {known or 'none'}")
