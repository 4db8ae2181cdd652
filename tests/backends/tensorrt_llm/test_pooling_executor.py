"""Cross-encoders on TensorRT-LLM: who serves them, and the engine process, where TensorRT-LLM is the fake."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from djl_trtllm.backends.planning import choose_backend, plan_engine
from djl_trtllm.backends.tensorrt_llm import executor as module
from djl_trtllm.backends.tensorrt_llm.names import module_of
from djl_trtllm.backends.tensorrt_llm.plan import PoolingPlan, TensorRtLlmPlan
from djl_trtllm.config import Backend
from djl_trtllm.errors import ConfigError, EngineError
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.model import inspect
from djl_trtllm.request import FinishReason, Pooling, Sampling
from tests.backends.tensorrt_llm.kit import Machine, in_processes
from tests.engines.helpers import configured, gpu_machine
from tests.executor.kit import Probe

VERSION = "1.4.0rc1"
OLDER = "1.2.1"


@pytest.fixture
def scoring(tmp_path: Path, tiny_stories: Path) -> Path:
    """The files of a cross-encoder, as far as a plan and the fake read them."""
    model = Path(shutil.copytree(tiny_stories, tmp_path / "model", ignore=shutil.ignore_patterns("engine", "*.prop*")))
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "it"}}
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    return model


def planned(model: Path, version: str = VERSION, gpus: int = 1, /, **options: object) -> PoolingPlan:
    plan = plan_engine(configured(**options), inspect(model), gpu_machine(version, gpus=gpus))
    assert isinstance(plan, PoolingPlan)
    return plan


# -- who serves it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"backend": "pytorch"}, {"backend": "pytorch", "task": "score"}])
def test_a_cross_encoder_is_served_by_a_release_that_encodes(scoring: Path, options: dict[str, object]) -> None:
    plan = planned(scoring, **options)
    assert plan.backend is Backend.PYTORCH and plan.max_seq_len == plan.max_input_len == 64
    assert plan.running["encode_only"] is True and "guided_decoding_backend" not in plan.running


def test_iterations_take_what_the_llm_is_made_for(scoring: Path) -> None:
    plan = planned(scoring, max_num_sequences=16, max_num_tokens=300)
    given = plan.executor_options()
    arguments: dict[str, Any] = given["arguments"]
    assert arguments["max_batch_size"] == given["max_sequences"] == 16
    assert arguments["max_num_tokens"] == given["max_num_tokens"] == 300
    assert planned(scoring, max_num_tokens=8).running["max_num_tokens"] == 64


@pytest.mark.parametrize(
    ("version", "backend", "changes", "told"),
    [
        (OLDER, "pytorch", {}, f"TensorRT-LLM {OLDER} has no LLM.encode"),
        (VERSION, "pytorch", {"architectures": ["XLMRobertaForSequenceClassification"]}, "XLMRoberta"),
        (VERSION, "autodeploy", {}, "option.backend=pytorch"),
        (OLDER, "tensorrt", {}, "no LLM.encode"),
        (VERSION, "pytorch", {"id2label": {"0": "a", "1": "b"}}, "2 labels"),
        (VERSION, "pytorch", {"architectures": ["BertModel"]}, "option.task=embed"),
    ],
)
def test_what_tensorrt_llm_does_not_score_is_refused_by_name(
    scoring: Path, version: str, backend: str, changes: dict[str, object], told: str
) -> None:
    config = json.loads((scoring / "config.json").read_text())
    (scoring / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(EngineError) as caught:
        plan_engine(configured(backend=backend), inspect(scoring), gpu_machine(version, gpus=1))
    assert told in str(caught.value)


def test_auto_takes_another_engine_where_tensorrt_llm_does_not_score(scoring: Path) -> None:
    for version in ("0.21.0", OLDER):
        backend, reason = choose_backend(configured(), inspect(scoring), gpu_machine(version, gpus=1))
        assert backend is Backend.OPENVINO and "LLM.encode" in reason


def test_encoding_on_several_gpus_is_refused(scoring: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree=2 .*: TensorRT-LLM encodes on one GPU"):
        planned(scoring, VERSION, 2, tensor_parallel_degree=2)


# -- the executor over a TensorRT-LLM that is played -------------------------------------------------------------------


class PlayedLlm:
    """TensorRT-LLM's LLM. The score of a pair is its number of tokens of the second text."""

    def encode(self, inputs: list[list[int]], token_type_ids: list[int]) -> list[SimpleNamespace]:
        kinds = iter(token_type_ids)
        return [SimpleNamespace(logits=np.array([sum(next(kinds) for _ in ids)])) for ids in inputs]


@pytest.mark.parametrize("trusted", [False, True])
def test_a_batch_is_encoded_with_its_second_texts_and_code_only_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    def tensor(kinds: list[int], dtype: str, device: str) -> list[int]:
        assert (dtype, device) == ("32 bits", "cuda")
        return kinds

    (tmp_path / "config.json").write_text('{"auto_map": {}}')
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TRTLLM_NO_USAGE_STATS", "0")
    given: dict[str, Any] = {}
    package = SimpleNamespace(__version__=VERSION, LLM=lambda **arguments: (given.update(arguments), PlayedLlm())[1])
    for name in ("tensorrt_llm", module_of("LLM.pytorch", VERSION)):
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(int32="32 bits", tensor=tensor))
    prepared: list[bool] = []
    monkeypatch.setattr(module, "prepare_mpi", lambda: prepared.append(True))
    executor = module.TensorRtLlmPoolingExecutor(
        model=str(tmp_path), tokenizer="tokenizer", arguments={"trust_remote_code": trusted, "max_batch_size": 8},
        environment={"TRTLLM_NO_USAGE_STATS": "1"}, task="score", activates=False, max_sequences=8, max_seq_len=64,
        max_num_tokens=64,
    )  # fmt: skip
    assert ("auto_map" in (Path(given.pop("model")) / "config.json").read_text()) is trusted
    assert given == {"tokenizer": "tokenizer", "trust_remote_code": trusted, "max_batch_size": 8}
    assert (prepared, os.environ["TRTLLM_NO_USAGE_STATS"], executor.limits.dimensions) == ([True], "1", 1)
    assert executor.details == {"TensorRT-LLM": VERSION, "backend": "pytorch", "GPUs": 1}
    poolings = (Pooling("score", second=6), Pooling("score"), None)
    pairs = [Submit(1, [5] * 9, Sampling(1), pooling=pooling) for pooling in poolings]
    assert executor.compute(pairs).tolist() == [[3], [0], [0]]


# -- the engine process ------------------------------------------------------------------------------------------------


async def started(machine: Machine, plan: TensorRtLlmPlan) -> Probe:
    machine.install(version=VERSION)
    probe = Probe(300.0)
    await probe.start(plan.executor, reasons=plan.reasons, **plan.executor_options())
    return probe


def score(probe: Probe, request_id: int) -> float:
    """The one number of a pair."""
    steps = (step for steps in probe.steps for step in steps)
    (vector,) = [step.vectors[request_id] for step in steps if request_id in step.vectors]
    (found,) = np.frombuffer(vector, np.float32).tolist()
    return float(found)


@pytest.mark.slow
@in_processes
async def test_each_pair_gets_its_own_score_whatever_others_are_beside_it(machine: Machine, scoring: Path) -> Probe:
    probe = await started(machine, planned(scoring, max_num_tokens=128))
    limits = probe.client.limits
    assert limits is not None and (limits.task, limits.dimensions) == ("score", 1)
    pairs = {number: ((number,) * (1 + number % 40), number % 7) for number in range(1, 200)}
    for number, (ids, second) in pairs.items():
        second = second if second < len(ids) else 0
        pairs[number] = ids, second
        probe.submit(number, 1, ids, pooling=Pooling("score", activate=False, second=second))
    assert set(await probe.end_of(*pairs)) == {FinishReason.LENGTH}
    expected = {number: sum(ids) / 100 + second for number, (ids, second) in pairs.items()}
    assert {number: score(probe, number) for number in pairs} == pytest.approx(expected)
    return probe
