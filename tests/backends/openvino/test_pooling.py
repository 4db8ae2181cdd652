"""The plan of a model that embeds or scores: what the engine process gets, and what is part of the engine's key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.openvino.backend import PoolingPlan
from djl_trtllm.backends.planning import plan_fitted
from djl_trtllm.config import Backend, Config, Quantization, Task
from djl_trtllm.engines.hardware import Hardware
from djl_trtllm.errors import ConfigError, EngineError
from djl_trtllm.model import inspect
from tests.engines.helpers import CPU_ONLY, configured, gpu_machine
from tests.support.encoders import scripted_encoder, write_modules


def planned(checkpoint: Path, hardware: Hardware = CPU_ONLY, **options: Any) -> tuple[Config, PoolingPlan]:
    config, plan = plan_fitted(configured(**options), inspect(checkpoint), hardware)
    assert isinstance(plan, PoolingPlan)
    return config, plan


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return write_modules(scripted_encoder(tmp_path), mode="cls_token", normalize=False, length=128)


def test_the_files_decide_what_the_executor_gets(encoder: Path) -> None:
    config, plan = planned(encoder)
    assert config.options.task is Task.EMBED
    assert plan.at(encoder).executor_options() == {
        "engine_dir": str(encoder),
        "task": "embed",
        "pooled": "cls",
        "activates": False,
        "pad_id": 0,
        "inference_precision": "f32",
        "num_threads": None,
        "max_sequences": 256,
        "max_seq_len": 128,
        "max_num_tokens": 1024,
    }
    assert (plan.max_input_len, config.options.job_queue_size) == (128, 4096)


def test_the_task_is_part_of_what_is_compiled(encoder: Path) -> None:
    _, plan = planned(encoder)
    assert plan.build_options["task"] == "embed"
    assert plan.compile_spec(encoder / "out").task == "feature-extraction"
    assert "normalised" not in plan.describe() and "first token" in plan.describe()


def test_a_cross_encoder_is_compiled_for_classification(tmp_path: Path) -> None:
    config, plan = planned(scripted_encoder(tmp_path, labels=1))
    assert config.options.task is Task.SCORE
    assert plan.compile_spec(tmp_path / "out").task == "text-classification"
    assert "sigmoid" in plan.describe()


def test_a_quantisation_that_openvino_does_not_have_is_refused(encoder: Path) -> None:
    with pytest.raises(ConfigError, match="fp8"):
        planned(encoder, quantize=Quantization.FP8)


@pytest.mark.parametrize("backend", [Backend.TENSORRT, Backend.PYTORCH])
def test_an_engine_that_runs_no_such_models_is_refused_with_those_that_do(encoder: Path, backend: Backend) -> None:
    machine = gpu_machine()
    with pytest.raises(EngineError, match=r"option\.task=embed.*openvino"):
        planned(encoder, machine, backend=backend)
