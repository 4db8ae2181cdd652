"""Plain data becomes TensorRT-LLM's own objects, which check what they are given."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.tensorrt_llm.plan import TensorRtEnginePlan, TensorRtLlmPlan
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import inspect
from tests.backends.tensorrt_llm.cases import CASES
from tests.engines.helpers import configured, gpu_machine
from tests.fakes.installation import fake_tensorrt_llm

_PROGRAM = """
import json, sys
from djl_trtllm.backends.tensorrt_llm.objects import build_arguments

def shown(value):
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)

for data in json.load(sys.stdin):
    try:
        print("MADE", json.dumps({name: shown(value) for name, value in build_arguments(data).items()}))
    except Exception as error:
        print("MADE", json.dumps(f"{type(error).__name__}: {error}"))
"""


def made(directory: Path, version: str, *data: dict[str, Any]) -> list[Any]:
    """What `build_arguments` makes of each of `data`, its objects as text; a text alone is an error."""
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps(data),
        env={**os.environ, **fake_tensorrt_llm(directory, version=version)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("MADE ")]
    return [json.loads(line.removeprefix("MADE ")) for line in lines]


def test_classes_enums_and_attributes_are_made(tmp_path: Path) -> None:
    (arguments,) = made(
        tmp_path,
        "1.2.1",
        {
            "build_config": {
                "class": "BuildConfig",
                "max_batch_size": 8,
                "kv_cache_type": {"enum": "KVCacheType", "name": "PAGED"},
                "plugin_config": {"class": "PluginConfig", "gemm_plugin": None, "tokens_per_block": 64},
            },
            "cuda_graph_config": None,
            "max_num_tokens": 8192,
        },
    )
    assert (arguments["cuda_graph_config"], arguments["max_num_tokens"]) == (None, 8192)
    for part in ("max_batch_size=8", "PAGED", "tokens_per_block=64"):
        assert part in arguments["build_config"]


def test_what_a_class_does_not_take_is_its_own_error(tmp_path: Path) -> None:
    (error,) = made(tmp_path, "1.2.1", {"kv_cache_config": {"class": "KvCacheConfig", "free_gpu_memory_fraction": "a"}})
    assert error.startswith("ValidationError: ")


@pytest.mark.parametrize("version", ["1.0.0", "1.2.1", "1.3.0"])
def test_everything_that_options_become_is_taken(checkpoint: Path, tmp_path: Path, version: str) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    data: dict[str, dict[str, Any]] = {}
    for backend in ("pytorch",) if version == "1.3.0" else ("tensorrt", "pytorch"):
        for case in CASES:
            try:
                config = configured(backend=backend, **{case.option: case.value})
                plan = plan_engine(config, inspect(model), gpu_machine(version, gpus=8))
            except ConfigError:
                continue  # this version or backend does not have it
            assert isinstance(plan, TensorRtLlmPlan)
            data[f"{backend} {case.option}"] = plan.running
            if isinstance(plan, TensorRtEnginePlan):
                data[f"{backend} {case.option} to build"] = plan.building
    assert len(data) > 100
    results = made(tmp_path, version, *data.values())
    assert {name: result for name, result in zip(data, results, strict=True) if isinstance(result, str)} == {}
