"""The compiler itself: what it writes generates what the checkpoint generates."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from djl_trtllm.backends.openvino.backend import OpenVinoPlan
from djl_trtllm.backends.openvino.compile import compress
from djl_trtllm.backends.openvino.executor import OpenVinoExecutor
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.engines.build import build_engine, prepare_engine
from djl_trtllm.engines.cache import EngineDir
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.model import inspect
from djl_trtllm.request import Sampling
from tests.engines.helpers import CPU_ONLY, VOCABULARY, configured
from tests.support.steps import deltas_of

pytestmark = pytest.mark.slow

NEW_TOKENS = 32
NEAR_TIE = 2e-3
"""Difference of two logits (their spread is 0.6) below which rounding to f16 may decide between them."""


def plan_of(checkpoint: Path, **options: object) -> OpenVinoPlan:
    plan = plan_engine(configured(max_rolling_batch_size=8, **options), inspect(checkpoint), CPU_ONLY)
    assert isinstance(plan, OpenVinoPlan)
    return plan


def generate(executor: OpenVinoExecutor, prompts: list[list[int]]) -> list[list[int]]:
    for number, ids in enumerate(prompts):
        executor.submit(Submit(number, ids, Sampling(NEW_TOKENS, ignore_eos=True)))
    generated: list[list[int]] = [[] for _ in prompts]
    while executor.busy:
        for delta in deltas_of(executor.step()):
            generated[delta.request_id] += delta.token_ids
    return generated


@dataclass(frozen=True)
class Reference:
    """Prompts, and what transformers makes of them in float32."""

    prompts: list[list[int]]
    generated: list[list[int]]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    """Random weights now and then put two tokens first; prompts that lead there say nothing and are left out."""
    import numpy as np
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)  # several are slower: the model is tiny

    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    random = np.random.default_rng(1)
    prompts, generated = [], []
    for _ in range(12):
        prompt = random.integers(3, VOCABULARY, size=int(random.integers(2, 40))).tolist()
        tokens, margin = list(prompt), float("inf")
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                best = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
        if margin > NEAR_TIE:
            prompts.append(prompt)
            generated.append(tokens[len(prompt) :])
    return Reference(prompts, generated)


def test_greedy_output_is_that_of_transformers(checkpoint: Path, engine: EngineDir, reference: Reference) -> None:
    options = plan_of(checkpoint).at(engine.path).executor_options()
    assert len(reference.prompts) >= 6
    assert generate(OpenVinoExecutor(**options), reference.prompts) == reference.generated
    assert len({token for tokens in reference.generated for token in tokens}) > 20


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_planned_block_size_is_the_engines_own(checkpoint: Path, engine: EngineDir, dtype: str) -> None:
    plan = plan_of(checkpoint, kv_cache_dtype=dtype)
    executor = OpenVinoExecutor(**plan.at(engine.path).executor_options())
    generate(executor, [[3, 4, 5]])
    assert plan.kv_cache is not None and plan.kv_cache.block_bytes is not None
    # Only the engine itself reports what it has taken.
    assert executor._pipeline.get_metrics().kv_cache_size_in_bytes == plan.kv_cache.blocks * plan.kv_cache.block_bytes


def test_a_compiled_directory_is_complete_for_serving(checkpoint: Path, engine: EngineDir) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (engine.path / name).read_bytes() == (checkpoint / name).read_bytes()
    names = {path.name for path in engine.path.iterdir()}
    assert names >= {"openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_detokenizer.xml"}
    assert not any(name.endswith((".safetensors", ".partial")) or name == "spec.json" for name in names)
    assert engine.manifest is not None
    assert engine.manifest.files.keys() == names - {"manifest.json"}
    alone = inspect(engine.path)
    assert (
        prepare_engine(configured(), alone, print, plan=plan_engine(configured(), alone)).tokenizer_dir == engine.path
    )


def test_int8_is_compressed_by_the_compiler_and_generates(
    checkpoint: Path, engine: EngineDir, reference: Reference, tmp_path: Path
) -> None:
    told: list[str] = []
    plan = plan_of(checkpoint, quantize="int8")
    compiled = build_engine(plan, tmp_path / "int8", told.append)
    assert any(line.startswith("compiling: compress") for line in told)
    assert compiled.manifest is not None and compiled.manifest.options["quantize"] == "int8"
    assert weights_of(compiled.path) < weights_of(engine.path) * 0.6
    generated = generate(OpenVinoExecutor(**plan.at(compiled.path).executor_options()), reference.prompts)
    assert agreement(generated, reference.generated) > 0.5


@pytest.mark.parametrize("quantize", ["int4", "awq"])
def test_4_bit_weights_are_smaller_and_generate(
    checkpoint: Path, engine: EngineDir, tmp_path: Path, quantize: str
) -> None:
    path = Path(shutil.copytree(engine.path, tmp_path / quantize))
    compress(path / "openvino_model.xml", quantize)
    assert not list(path.glob("compressed_*"))
    assert weights_of(path) < weights_of(engine.path) * 0.45
    (generated,) = generate(OpenVinoExecutor(**plan_of(checkpoint).at(path).executor_options()), [[3, 4, 5]])
    assert len(generated) == NEW_TOKENS


def weights_of(path: Path) -> int:
    return (path / "openvino_model.bin").stat().st_size


def agreement(some: list[list[int]], others: list[list[int]]) -> float:
    """The share of first tokens that agree: later ones follow from different texts."""
    return sum(a[0] == b[0] for a, b in zip(some, others, strict=True)) / len(some)
