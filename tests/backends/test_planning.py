from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.backends.openvino.plan import OpenVinoPlan
from djl_trtllm.backends.planning import plan_engine, suppose_machine
from djl_trtllm.backends.scripted.plan import ScriptedPlan
from djl_trtllm.backends.tensorrt_llm.plan import CheckpointPlan, TensorRtEnginePlan
from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.model import inspect
from tests.engines.helpers import CPU_ONLY, configured, gpu_machine


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("openvino", OpenVinoPlan),
        ("scripted", ScriptedPlan),
        ("tensorrt", TensorRtEnginePlan),
        ("pytorch", CheckpointPlan),
        ("autodeploy", CheckpointPlan),
    ],
)
def test_each_backend_has_its_own_plan(checkpoint: Path, backend: str, kind: type[EnginePlan]) -> None:
    plan = plan_engine(configured(backend=backend), inspect(checkpoint), gpu_machine())
    assert type(plan) is kind
    assert plan.backend.value == backend
    assert plan.reason.startswith(f"option.backend={backend}")


def test_the_machine_is_this_one_where_none_is_given(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djl_trtllm.backends.planning.this_machine", lambda: gpu_machine("1.3.0"))
    assert isinstance(plan_engine(configured(), inspect(checkpoint)), CheckpointPlan)
    assert isinstance(plan_engine(configured(), inspect(checkpoint), CPU_ONLY), OpenVinoPlan)


def test_for_compiling_nothing_is_planned_that_depends_on_where_it_runs(checkpoint: Path) -> None:
    layout = inspect(checkpoint)
    for compile_only in (False, True):
        plan = plan_engine(configured(), layout, CPU_ONLY, compile_only=compile_only)
        assert isinstance(plan, OpenVinoPlan)
        assert (plan.kv_cache is None) is compile_only
    plan = plan_engine(configured(), layout, CPU_ONLY)
    assert isinstance(plan, OpenVinoPlan) and plan.kv_cache is not None


def test_a_machine_is_supposed_to_have_what_this_one_does_not_say_otherwise() -> None:
    gpus = (Gpu("NVIDIA H100", (9, 0)),) * 2
    there = suppose_machine(CPU_ONLY, gpus)
    assert (there.gpus, there.tensorrt_llm, there.has_engine_backend) == (gpus, "1.2.1", True)
    assert there.available_memory == CPU_ONLY.available_memory
    assert suppose_machine(gpu_machine("1.3.0"), gpus).tensorrt_llm == "1.3.0"
