"""Measured numbers override estimated ones."""

from __future__ import annotations

from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.conditions import Conditions, LoraSlots
from djl_trtllm.sizing.gpus import GpuModel, Instance, gpu_named, instance_named
from djl_trtllm.sizing.recommendation import Recommendation, recommend
from tests.sizing.configs import llama

SIZES = CheckpointSizes.from_config(llama())


def of(machine: Instance | GpuModel | None, degree: int = 1, lmi: str = "0.28", **changes: object) -> Recommendation:
    gpu = machine.gpu if isinstance(machine, Instance) else machine
    conditions = Conditions(gpu.memory if gpu else 40 << 30, degree, **changes)  # type: ignore[arg-type]
    return recommend(SIZES, conditions, machine, lmi=lmi)


def test_a_measured_number_stands_and_is_at_most_16384() -> None:
    found = of(instance_named("g5.12xlarge"))
    assert (found.maximum, found.max_num_tokens, found.fits) == (24000, 16384, True)
    assert found.origin == "table LMI 0.28, LLaMA 3 8B on g5.12xl, tp 1: 24000, at most 16384 used"
    assert found.refusal is None


def test_an_estimate_is_halved() -> None:
    found = of(gpu_named("h100"))
    assert found.row is None
    assert found.max_num_tokens == min(16384, found.estimate.max_num_tokens // 2)
    assert found.origin.startswith(f"half of the estimate of {found.estimate.max_num_tokens}")
    assert found.origin.endswith("for H100, tp 1, at most 16384 used")


def test_other_gpus_are_estimated() -> None:
    assert of(None).origin.endswith("for GPUs, tp 1, at most 16384 used")
    assert of(gpu_named("a10")).row is None


def test_measurements_are_of_plain_models() -> None:
    g5 = instance_named("g5.12xlarge")
    for changes in ({"quantization": "fp8"}, {"max_beam_width": 2}, {"dtype": "float32"}, {"pipeline_parallel": 2}):
        assert of(g5, **changes).row is None
    assert of(g5, lora=LoraSlots()).row is None
    assert of(g5, draft=SIZES).row is None
    assert of(g5, lmi="0.27").row is None


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    big = CheckpointSizes.from_config(
        llama(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
    )
    g5 = instance_named("g5.48xlarge")
    measured = recommend(big, Conditions(g5.gpu.memory, 8), g5)
    assert (measured.maximum, measured.max_num_tokens) == (0, 0)
    assert measured.refusal is not None
    assert "out of memory was measured (table LMI 0.28, LLaMA 3 70B on g5.48xl, tp 8)" in measured.refusal
    assert "each GPU has 22.5 GiB and the weights take 18." in measured.refusal
    expected = recommend(big, Conditions(g5.gpu.memory, 4, 1), g5).refusal
    assert expected is not None and expected.startswith("out of memory is expected on A10G, tp 4, where each GPU")


def test_a_sequence_that_is_too_long_for_the_cache_is_another_reason() -> None:
    h100 = gpu_named("h100")
    found = recommend(SIZES, Conditions(h100.memory, max_input_len=900_000, max_output_len=100_000), h100)
    assert not found.fits and found.refusal is not None
    assert found.refusal.startswith("the KV cache on H100, tp 1 holds about")
    assert "less than one sequence of 1000000" in found.refusal


def test_half_of_a_small_estimate_is_recommended() -> None:
    found = of(gpu_named("l4"))
    assert 0 < found.max_num_tokens == found.maximum // 2 < 16384
