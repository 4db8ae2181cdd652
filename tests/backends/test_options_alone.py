"""Each option alone, on each backend: what is said of it is what happens to the engine's arguments.

An option that changes nothing is named in the log with the reason, and one that changes something is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.effects import Derived, Fixed, Passed
from djl_trtllm.backends.options import option_maps, with_effects
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.tensorrt_llm.plan import TensorRtEnginePlan
from djl_trtllm.config import Backend, Config
from djl_trtllm.config.options.registry import OPTIONS, DeclaredOption, find
from djl_trtllm.config.options.values import as_text
from djl_trtllm.config.rules.table import check_model
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import inspect
from tests.backends.tensorrt_llm.cases import CASES
from tests.engines.helpers import CPU_ONLY, configured, gpu_machine

BACKENDS = [Backend.TENSORRT, Backend.PYTORCH, Backend.OPENVINO, Backend.SCRIPTED]
VALUES = {declared.name: str(case.value) for case in CASES if (declared := find(f"option.{case.option}"))}
OF_A_BACKEND = [
    declared
    for declared in OPTIONS.values()
    if not declared.option.effect_everywhere and declared.name not in ("backend", "script")
]


def value_of(declared: DeclaredOption) -> str:
    """A value that is not the default."""
    if declared.name in VALUES:
        return VALUES[declared.name]
    default = as_text(declared.default)
    if declared.type.choices:
        return next(value for value in declared.type.choices if value != default)
    if declared.type.base is bool:
        return "false" if declared.default else "true"
    if declared.option.example:
        return declared.option.example
    if declared.type.base in (int, float):
        return as_text(declared.default * 2 or 1)
    return "other"


def said(config: Config, plan: EnginePlan, declared: DeclaredOption) -> list[str]:
    """The lines of the log that name the option, by its key or as the variable that was set."""
    names = (declared.key, f"OPTION_{declared.name.upper()}")
    return [line for line in (*config.notes, *config.warnings, *plan.notes) if line.startswith(names)]


def has_its_own_way(declared: DeclaredOption, backend: Backend, config: Config) -> bool:
    """Whether the backend does as the value says without it, or receives it where it has no use for it."""
    effect = option_maps()[backend].get(declared.name)
    if isinstance(effect, Fixed):
        return bool(effect.value == getattr(config.options, declared.name))
    if isinstance(effect, Passed) and declared.name == "awq_block_size":
        return True  # a rule says that it needs AWQ, by either of two options
    return isinstance(effect, Passed | Derived) and effect.needs is not None and not effect.needs.met(config)


def planned(checkpoint: Path, backend: Backend, **options: str) -> tuple[Config, EnginePlan]:
    hardware = CPU_ONLY if backend in (Backend.OPENVINO, Backend.SCRIPTED) else gpu_machine(gpus=8)
    layout = inspect(checkpoint)
    config = check_model(configured(backend=backend.value, **options), layout.shape.model_type, is_engine=False)
    plan = plan_engine(config, layout, hardware)
    return with_effects(config, backend, plan), plan


def arguments(config: Config, plan: EnginePlan) -> list[Any]:
    """All that a backend makes of the options."""
    limits = [plan.max_sequences, plan.max_seq_len, plan.max_input_len, config.options.max_output_len, plan.describe()]
    if isinstance(plan, TensorRtEnginePlan):
        running = plan._executor_options(Path("/engine"))
        return [*limits, plan.building, running, plan.compile_spec(Path("/out"))]
    limits.append(plan.stream_interval)
    if plan.compiler is not None:
        return [*limits, plan.at(Path("/engine")).executor_options(), plan.compile_spec(Path("/out"))]
    return [*limits, plan.executor_options()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_said_of_an_option_is_what_happens(roomy: Path, backend: Backend) -> None:
    before = arguments(*planned(roomy, backend))
    wrong = []
    for declared in OF_A_BACKEND:
        value = value_of(declared)
        try:
            config, plan = planned(roomy, backend, **{declared.name: value})
        except ConfigError as refused:
            assert any(declared.key in problem for problem in refused.problems)
            continue
        told = said(config, plan, declared)
        if has_its_own_way(declared, backend, config):
            effect = option_maps()[backend][declared.name]
            right = bool(told) != isinstance(effect, Fixed)
        else:
            right = (arguments(config, plan) != before) != bool(told)
        if not right:
            wrong.append((declared.name, value, told))
    assert wrong == []
