"""Plans of TensorRT-LLM for tests, and their arguments without nesting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.tensorrt_llm.arguments import LLM_OWNERS
from djl_trtllm.backends.tensorrt_llm.names import has
from djl_trtllm.backends.tensorrt_llm.plan import TensorRtEnginePlan, TensorRtLlmPlan
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import inspect
from tests.backends.tensorrt_llm.cases import ABSENT
from tests.engines.helpers import configured, gpu_machine


def planned(model: Path, version: str = "1.2.1", gpus: int = 8, /, **options: object) -> TensorRtLlmPlan:
    """A plan, of which every argument is one that this version of TensorRT-LLM has."""
    plan = plan_engine(configured(**options), inspect(model), gpu_machine(version, gpus=gpus))
    assert isinstance(plan, TensorRtLlmPlan)
    passed = [plan.running, *([plan.building] if isinstance(plan, TensorRtEnginePlan) else [])]
    for arguments in passed:
        for owner, name in _names(arguments, LLM_OWNERS[plan.backend]):
            assert has(owner, name, version), f"{owner}.{name}"
    return plan


def engine_planned(model: Path, version: str = "1.2.1", gpus: int = 8, /, **options: object) -> TensorRtEnginePlan:
    """A plan of an engine that is compiled."""
    plan = planned(model, version, gpus, backend="tensorrt", **options)
    assert isinstance(plan, TensorRtEnginePlan)
    return plan


def building(model: Path, version: str = "1.2.1", gpus: int = 8, /, **options: object) -> dict[str, Any]:
    """The arguments that compile an engine, by `OWNER.FIELD`."""
    return flat(engine_planned(model, version, gpus, **options).building)


def running(model: Path, version: str = "1.2.1", gpus: int = 8, /, **options: object) -> dict[str, Any]:
    """The arguments that run an engine, or a checkpoint with `backend="pytorch"`, by `OWNER.FIELD`."""
    return flat(planned(model, version, gpus, **{"backend": "tensorrt", **options}).running)


def problems(model: Path, version: str = "1.2.1", gpus: int = 8, /, **options: object) -> tuple[str, ...]:
    """What is wrong with the options."""
    with pytest.raises(ConfigError) as caught:
        planned(model, version, gpus, **options)
    return caught.value.problems


def flat(arguments: Mapping[str, Any], owner: str = "LLM") -> dict[str, Any]:
    """Arguments by `OWNER.FIELD`."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, dict) and "class" in value:
            found |= flat(value, value["class"]) or {f"{owner}.{name}": value["class"]}
        elif name != "class":
            found[f"{owner}.{name}"] = f"{value['enum']}.{value['name']}" if isinstance(value, dict) else value
    return found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What is another, and what is missing."""
    differing = {name: value for name, value in after.items() if name not in before or before[name] != value}
    return differing | {name: ABSENT for name in before if name not in after}


def _names(arguments: Mapping[str, Any], owner: str) -> list[tuple[str, str]]:
    found = []
    for name, value in arguments.items():
        if name == "class":
            continue
        found.append((owner, name))
        if isinstance(value, dict):
            found += [(value["enum"], value["name"])] if "enum" in value else _names(value, value["class"])
    return found
