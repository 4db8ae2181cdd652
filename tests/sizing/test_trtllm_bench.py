from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.trtllm_bench import BenchModel, bench_settings
from tests.sizing.configs import llama, nemotron_h

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "trtllm_bench.json").read_text(encoding="utf-8"))
MIB = 1024 * 1024


def test_the_settings_are_those_of_trtllm_bench_to_the_last_bit() -> None:
    """The expected values are those of the original (see the file's `source`)."""
    compared = 0
    for name, quantization, cache, memory, tensor, pipeline, inputs, outputs, batch, tokens, requests, said in DATA[
        "rows"
    ]:
        model = BenchModel(**DATA["models"][name], quantization=quantization, kv_quantization=cache)
        arguments = (model, memory * MIB, inputs, outputs, tensor, pipeline)
        if batch is None:
            with pytest.raises(SizingError, match="weights take" if said == 0 else "does not hold one request"):
                bench_settings(*arguments)
            continue
        found = bench_settings(*arguments)
        assert (found.max_batch_size, found.max_num_tokens, found.kv_requests.hex()) == (batch, tokens, requests)
        assert len(found.warnings) == said
        compared += 1
    assert compared > 400


def test_a_model_is_described_by_its_checkpoint() -> None:
    model = BenchModel.of(CheckpointSizes.from_config(llama()), "fp8")
    assert model == BenchModel(8_030_261_248, 32, 8, 128, quantization="FP8")


def test_nemotron_h_has_few_attention_layers_and_a_state() -> None:
    model = BenchModel.of(CheckpointSizes.from_config(nemotron_h()))
    expected = DATA["models"]["Nemotron-H-8B"]
    assert (model.attention_layers, model.hybrid, model.state_elements) == (4, True, expected["state_elements"])


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 1), (1, 0)])
def test_lengths_of_zero_are_refused(inputs: int, outputs: int) -> None:
    with pytest.raises(SizingError, match="at least 1"):
        bench_settings(BenchModel(10**9, 32, 8, 128), 80 << 30, inputs, outputs)


def test_a_model_without_sizes_is_refused() -> None:
    with pytest.raises(SizingError, match=r"config\.json does not give"):
        BenchModel.of(CheckpointSizes.from_config({}))
