"""What arguments follow from beside the options."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.backends.tensorrt_llm.plan import TensorRtLlmPlan
from djl_trtllm.errors import ConfigError
from djl_trtllm.model import inspect
from tests.backends.tensorrt_llm.plans import building, engine_planned, planned, problems, running
from tests.engines.helpers import configured, gpu_machine

# -- tokens of an iteration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 8192),
        ({"max_rolling_batch_size": 2}, 2 * 1536),
        ({"max_rolling_batch_size": 10_000}, 10_000),
        ({"max_rolling_batch_size": 4000, "max_beam_width": 4}, 16_000),
        ({"max_input_len": 8000, "max_rolling_batch_size": 1, "max_output_len": 100}, 8100),
        ({"max_rolling_batch_size": 1, "max_seq_len": 600}, 600),
        ({"max_num_tokens": 20_000}, 20_000),
    ],
)
def test_an_iteration_holds_what_the_batch_can_use(roomy: Path, options: dict[str, object], tokens: int) -> None:
    assert running(roomy, **options)["LLM.max_num_tokens"] == tokens
    assert building(roomy, **options)["BuildConfig.max_num_tokens"] == tokens


def test_an_iteration_holds_the_longest_prompt_unless_it_is_split(roomy: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(roomy, tmp_path / "m"))
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 131072}
    (path / "config.json").write_text(json.dumps(config))
    plan = planned(path, max_input_len=100_000)
    assert plan.inputs.max_num_tokens == 100_000
    assert "an iteration holds 100000 tokens, because prompts may be so long and are not split" in plan.notes[0]
    split = planned(path, max_input_len=100_000, enable_chunked_prefill="true")
    assert (split.inputs.max_num_tokens, split.notes) == (8192, ())


# -- GPUs ------------------------------------------------------------------------------------------------------------


def with_heads(roomy: Path, folder: Path, heads: int, kv_heads: int) -> Path:
    path = Path(shutil.copytree(roomy, folder / "m"))
    config = json.loads((path / "config.json").read_text())
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("options", "gpus", "tensor"),
    [
        ({"tensor_parallel_degree": "max"}, 8, 8),
        ({"tensor_parallel_degree": "max"}, 1, 1),
        ({"tensor_parallel_degree": "max", "pipeline_parallel_degree": 2}, 8, 4),
        ({"tensor_parallel_degree": "max", "pipeline_parallel_degree": 2, "context_parallel_size": 2}, 8, 2),
    ],
)
def test_max_takes_every_gpu(roomy: Path, tmp_path: Path, options: dict[str, object], gpus: int, tensor: int) -> None:
    assert running(with_heads(roomy, tmp_path, 32, 8), "1.2.1", gpus, **options)["LLM.tensor_parallel_size"] == tensor


def test_gpus_of_other_machines_count_where_their_ranks_are_launched(
    roomy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_heads(roomy, tmp_path, 32, 8)
    options: dict[str, object] = {"tensor_parallel_degree": "max", "num_nodes": 2}
    assert running(model, "1.2.1", 4, **options)["LLM.tensor_parallel_size"] == 4
    monkeypatch.setenv("TLLM_SPAWN_PROXY_PROCESS", "1")
    assert running(model, "1.2.1", 4, **options)["LLM.tensor_parallel_size"] == 8
    assert running(model, "1.2.1", 4, tensor_parallel_degree=16)["LLM.tensor_parallel_size"] == 16


@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree", "problem"),
    [
        (32, 8, 3, "32 attention heads cannot be divided among 3 GPUs"),
        (40, 10, 4, "10 heads of keys and values can neither be divided among 4 GPUs nor repeated evenly"),
        (28, 4, 7, "4 heads of keys and values can neither be divided among 7 GPUs nor repeated evenly"),
    ],
)
def test_heads_that_cannot_be_split_are_an_error_before_anything_starts(
    roomy: Path, tmp_path: Path, backend: str, heads: int, kv_heads: int, degree: int, problem: str
) -> None:
    model = with_heads(roomy, tmp_path, heads, kv_heads)
    (found,) = problems(model, "1.2.1", 8, backend=backend, tensor_parallel_degree=degree)
    setting = f"option.tensor_parallel_degree={degree} (environment variable OPTION_TENSOR_PARALLEL_DEGREE)"
    assert found.startswith(f"{setting}: {problem}")
    assert "set an option.tensor_parallel_degree that divides" in found


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        (32, 8, {"tensor_parallel_degree": 8}),
        (32, 2, {"tensor_parallel_degree": 8}),
        (32, 1, {"tensor_parallel_degree": 4}),
        (32, 8, {"tensor_parallel_degree": 3, "backend": "pytorch", "enable_attention_dp": "true"}),
        (32, 8, {"tensor_parallel_degree": 3, "backend": "autodeploy"}),
    ],
)
def test_heads_that_are_split_repeated_or_left_whole_are_planned(
    roomy: Path, tmp_path: Path, heads: int, kv_heads: int, options: dict[str, object]
) -> None:
    model = with_heads(roomy, tmp_path, heads, kv_heads)
    assert planned(model, "1.2.1", 8, **options).inputs.tensor_parallel == options["tensor_parallel_degree"]


def test_more_gpus_than_there_are_is_an_error_before_anything_starts(roomy: Path) -> None:
    (problem,) = problems(roomy, "1.2.1", 2, tensor_parallel_degree=2, pipeline_parallel_degree=2)
    assert problem == (
        "option.tensor_parallel_degree=2 (environment variable OPTION_TENSOR_PARALLEL_DEGREE) and "
        "option.pipeline_parallel_degree=2 (environment variable OPTION_PIPELINE_PARALLEL_DEGREE) need 4 GPUs, and 2 "
        "can be used here; with GPUs of several machines, start the server with trtllm-llmapi-launch"
    )


def test_a_checkpoint_in_tensorrt_llms_format_keeps_its_ranks(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "config.json").write_text(
        '{"architecture": "LlamaForCausalLM", "dtype": "float16", "mapping": {"world_size": 2, "tp_size": 2}}'
    )
    for rank in range(2):
        shutil.copy(checkpoint / "model.safetensors", path / f"rank{rank}.safetensors")
    plan = engine_planned(path, "1.2.1", 2)
    assert plan.building["tensor_parallel_size"] == 2
    with pytest.raises(ConfigError, match=r"option\.tensor_parallel_degree=1 .*: the checkpoint is converted for 2"):
        planned(path, "1.2.1", 2, tensor_parallel_degree=1)


# -- the version ------------------------------------------------------------------------------------------------------


def test_a_version_that_cannot_be_reported_is_taken_for_the_stable_one(roomy: Path) -> None:
    plan = plan_engine(configured(), inspect(roomy), gpu_machine("of unknown version"))
    assert isinstance(plan, TensorRtLlmPlan)
    assert plan.inputs.version == "1.2.1"
    assert plan.notes == ("the version of TensorRT-LLM is unknown: it gets the arguments of 1.2.1",)
