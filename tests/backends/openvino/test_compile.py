"""The compiler itself: what it writes generates what the checkpoint generates."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.openvino.compile import compress
from djl_trtllm.backends.openvino.plan import OpenVinoPlan
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.engines.build import build_engine
from djl_trtllm.engines.manifest import EngineDir
from djl_trtllm.engines.preparation import prepare_engine
from djl_trtllm.errors import BuildError
from djl_trtllm.model import inspect
from tests.engines.helpers import CPU_ONLY, VOCABULARY, configured

pytestmark = pytest.mark.slow

NEW_TOKENS = 32
NEAR_TIE = 2e-3
"""Difference of two logits (their spread is 0.6) below which rounding to f16 may decide between them."""


def plan_of(checkpoint: Path, **options: object) -> OpenVinoPlan:
    plan = plan_engine(configured(max_rolling_batch_size=8, **options), inspect(checkpoint), CPU_ONLY)
    assert isinstance(plan, OpenVinoPlan)
    return plan


def open_pipeline(options: dict[str, Any]) -> Any:
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = options["num_kv_blocks"]
    scheduler.max_num_batched_tokens = options["max_num_batched_tokens"]
    scheduler.enable_prefix_caching = options["enable_prefix_caching"]
    scheduler.dynamic_split_fuse = True
    properties = {
        "KV_CACHE_PRECISION": options["kv_cache_precision"],
        "INFERENCE_PRECISION_HINT": options["inference_precision"],
    }
    return openvino_genai.ContinuousBatchingPipeline(options["engine_dir"], scheduler, "CPU", properties, {})


def generate(pipeline: Any, prompts: list[list[int]]) -> list[list[int]]:
    import numpy as np
    import openvino
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = NEW_TOKENS
    config.ignore_eos = True
    handles = [
        pipeline.add_request(number, openvino.Tensor(np.array([ids], dtype=np.int64)), config)
        for number, ids in enumerate(prompts)
    ]
    generated: list[list[int]] = [[] for _ in handles]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for number, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    generated[number] += output.generated_ids
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
    assert generate(open_pipeline(options), reference.prompts) == reference.generated
    assert len({token for tokens in reference.generated for token in tokens}) > 20


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_planned_block_size_is_the_engines_own(checkpoint: Path, engine: EngineDir, dtype: str) -> None:
    plan = plan_of(checkpoint, kv_cache_dtype=dtype)
    pipeline = open_pipeline(plan.at(engine.path).executor_options())
    generate(pipeline, [[3, 4, 5]])
    assert plan.kv_cache is not None and plan.kv_cache.block_bytes is not None
    assert pipeline.get_metrics().kv_cache_size_in_bytes == plan.kv_cache.blocks * plan.kv_cache.block_bytes


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


def test_the_weights_keep_the_checkpoints_16_bits(checkpoint: Path, engine: EngineDir) -> None:
    weights = (checkpoint / "model.safetensors").stat().st_size
    assert weights * 0.95 < (engine.path / "openvino_model.bin").stat().st_size < weights * 1.05


def test_a_checkpoint_that_lacks_a_tensor_and_has_another_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.another.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(BuildError) as caught:
        build_engine(plan_of(model), tmp_path / "engine", print)
    assert caught.value.cause == "checkpoint does not fit its config.json"
    first = str(caught.value).splitlines()[0]
    assert (
        "LlamaForCausalLM needs 1 tensor that the weight files do not have: model.layers.1.mlp.up_proj.weight" in first
    )
    assert first.endswith("have 1 tensor that LlamaForCausalLM does not have: model.layers.1.mlp.another.weight")
    assert not (tmp_path / "engine").exists()


def test_compiling_reported_its_phases(engine: EngineDir, build_progress: list[str]) -> None:
    phases = [line.split()[1] for line in build_progress if line.startswith("compiling: ") and "still" not in line]
    assert phases == ["load", "convert", "tokenizer", "save"]


_SECOND_START = """
import sys
from dataclasses import dataclass
from pathlib import Path
from djl_trtllm.config import load
from djl_trtllm.backends.planning import plan_engine
from djl_trtllm.engines.preparation import prepare_engine
from djl_trtllm.model import inspect
layout, config = inspect(Path(sys.argv[1])), load(None, {"OPTION_ENGINE_CACHE_DIR": sys.argv[2]})
prepare_engine(config, layout, lambda line: print(line, file=sys.stderr), plan=plan_engine(config, layout))
print({"torch", "openvino", "optimum", "nncf"} & set(sys.modules) or "light")
"""


def test_a_second_start_is_a_hit_and_imports_neither_torch_nor_openvino(
    checkpoint: Path, engine: EngineDir, engine_cache: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _SECOND_START, str(checkpoint), str(engine_cache)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "light\n"
    assert run.stderr == f"using the cached engine {engine.path}\n"


def test_int8_is_compressed_by_the_compiler_and_generates(
    checkpoint: Path, engine: EngineDir, reference: Reference, tmp_path: Path
) -> None:
    told: list[str] = []
    plan = plan_of(checkpoint, quantize="int8")
    compiled = build_engine(plan, tmp_path / "int8", told.append)
    assert any(line.startswith("compiling: compress") for line in told)
    assert compiled.manifest is not None and compiled.manifest.options["quantize"] == "int8"
    assert weights_of(compiled.path) < weights_of(engine.path) * 0.6
    generated = generate(open_pipeline(plan.at(compiled.path).executor_options()), reference.prompts)
    assert agreement(generated, reference.generated) > 0.5


@pytest.mark.parametrize("quantize", ["int4", "awq"])
def test_4_bit_weights_are_smaller_and_generate(
    checkpoint: Path, engine: EngineDir, tmp_path: Path, quantize: str
) -> None:
    path = Path(shutil.copytree(engine.path, tmp_path / quantize))
    compress(path / "openvino_model.xml", quantize)
    assert not list(path.glob("compressed_*"))
    assert weights_of(path) < weights_of(engine.path) * 0.45
    (generated,) = generate(open_pipeline(plan_of(checkpoint).at(path).executor_options()), [[3, 4, 5]])
    assert len(generated) == NEW_TOKENS


def weights_of(path: Path) -> int:
    return (path / "openvino_model.bin").stat().st_size


def agreement(some: list[list[int]], others: list[list[int]]) -> float:
    """The share of first tokens that agree: later ones follow from different texts."""
    return sum(a[0] == b[0] for a, b in zip(some, others, strict=True)) / len(some)


_TELEMETRY = """
from djl_trtllm.backends.openvino import compile
from openvino.tools.ovc import telemetry_utils
from nncf.telemetry.wrapper import NNCFTelemetryStub, telemetry
print(telemetry_utils.tm.__name__, isinstance(telemetry, NNCFTelemetryStub))
"""


def test_the_compiler_tells_nobody_of_its_use(tmp_path: Path) -> None:
    environ = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", _TELEMETRY], env=environ, capture_output=True, text=True)
    assert done.stdout.split() == ["openvino.tools.ovc.telemetry_stub", "True"], done.stderr
    assert not (tmp_path / "intel").exists()
