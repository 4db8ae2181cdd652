"""Measured numbers override estimated ones; the tables of measured numbers can be checked."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import SizingError
from djl_trtllm.model.checkpoint import ModelShape
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import FITTED, Conditions, EngineConstants, LoraSlots
from djl_trtllm.sizing.machines import GpuModel, Instance, gpu_named, instance_named
from djl_trtllm.sizing.recommendation import (
    TABLES,
    Recommendation,
    conditions_of,
    guess_max_num_tokens,
    halvings,
    look_up,
    recommend,
    weight_dtype,
)
from tests.engines.helpers import configured
from tests.sizing.configs import CONFIGS, llama
from tests.support.tables import by_rows, by_table, table
from tools.sizing.check_tables import Check, cost, fit, model_sizes, render, rows

# -- LMI's formula, and halving what it gives --


def test_the_guess_is_batch_times_input_times_alpha() -> None:
    assert guess_max_num_tokens(128, 3700) == 94720
    assert guess_max_num_tokens(128, 3700, 0.1) == 47360
    assert guess_max_num_tokens(128, 3700, 1) == 473600
    assert guess_max_num_tokens(100, 1, 0.29) == 29
    assert guess_max_num_tokens(1, 1, 0.1) == 1


@pytest.mark.parametrize("alpha", [0, -0.1, 1.001, float("nan")])
def test_alpha_is_above_0_and_at_most_1(alpha: float) -> None:
    with pytest.raises(SizingError, match=r"expected more than 0 and at most 1; NVIDIA recommends 0\.1 to 0\.2"):
        guess_max_num_tokens(1, 1, alpha)


@pytest.mark.parametrize(("batch", "length", "name"), [(0, 1, "max batch size 0"), (1, -1, "max input length -1")])
def test_a_batch_and_a_length_are_at_least_1(batch: int, length: int, name: str) -> None:
    with pytest.raises(SizingError, match=f"{name}: expected at least 1"):
        guess_max_num_tokens(batch, length)


def test_halving_ends_where_smaller_values_are_not_worth_trying() -> None:
    assert list(halvings(2000)) == [2000, 1000, 500]
    assert list(halvings(512)) == [512, 256]
    assert list(halvings(100)) == [100]


# -- What options say of memory --


SHAPE = ModelShape.from_config(llama())


def test_lengths_end_at_the_models_context() -> None:
    found = conditions_of(configured(max_input_len=8000, max_output_len=4000), SHAPE, gpu_memory=1)
    assert (found.max_input_len, found.max_output_len) == (8000, 192)
    found = conditions_of(configured(max_input_len=100, max_seq_len=300), SHAPE, gpu_memory=1)
    assert (found.max_input_len, found.max_output_len) == (100, 200)
    found = conditions_of(configured(max_input_len=9000), SHAPE, gpu_memory=1)
    assert (found.max_input_len, found.max_output_len) == (8192, 1)


def test_machine_and_degrees_are_passed_on() -> None:
    found = conditions_of(
        configured(), SHAPE, gpu_memory=7, tensor_parallel=4, pipeline_parallel=2, compiled=False, draft=SMALL
    )
    assert (found.gpu_memory, found.tensor_parallel, found.pipeline_parallel, found.backend) == (7, 4, 2, "pytorch")
    assert found.draft is SMALL
    more = conditions_of(configured(max_beam_width=3, max_num_sequences=64), SHAPE, gpu_memory=1)
    assert (more.max_beam_width, more.max_batch_size, more.backend) == (3, 64, "tensorrt")
    assert conditions_of(configured(), SHAPE, gpu_memory=1).max_batch_size == 32


@by_table("options", "quantization", "kv_dtype", "fraction")
def test_formats_and_fraction(
    options: dict[str, str], quantization: str | None, kv_dtype: str | None, fraction: float
) -> None:
    found = conditions_of(configured(**options), SHAPE, gpu_memory=1)
    assert (found.quantization, found.kv_dtype, found.fraction) == (quantization, kv_dtype, fraction)


@by_table("dtype", "stored", "capability", "compiled", "expected")
def test_the_type_of_weights_is_what_tensorrt_llm_makes_of_auto(
    dtype: str, stored: str | None, capability: list[int] | None, compiled: bool, expected: str | None
) -> None:
    shape = ModelShape(dtype=stored)
    known = None if capability is None else (capability[0], capability[1])
    assert weight_dtype(configured(dtype=dtype), shape, known, compiled=compiled) == expected


def test_windows_and_adapters_are_passed_on() -> None:
    found = conditions_of(configured(), SHAPE, gpu_memory=1)
    assert (found.attention_windows, found.lora) == (None, None)
    options = {"max_attention_window": "512,1024", "enable_lora": "true", "max_lora_rank": "8"}
    found = conditions_of(configured(**options), SHAPE, gpu_memory=1)
    assert (found.attention_windows, found.lora) == ((512, 1024), LoraSlots(adapters=0, rank=8, free_share=0.05))
    found = conditions_of(configured(**options, lora_target_modules="attn_q"), SHAPE, gpu_memory=1)
    assert found.lora == LoraSlots(adapters=0, rank=8, free_share=0.05, modules=("attn_q",))


# -- The tables of the document, row for row, and which model and machine gets which --


PAGE = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text(encoding="utf-8")


MODELS: dict[str, dict[str, Any]] = CONFIGS["measured"]
"""The sizes in the models' own config.json on the Hugging Face hub."""

DOCUMENT: list[tuple[str, str, str, int, int | None]] = [tuple(row) for row in table(__file__, "document")]
"""LMI's version, model, machine, degree, tokens (None: out of memory) of every row of the document's tables."""


"""The sizes in the models' own config.json on the Hugging Face hub."""


def shape(model: str) -> ModelShape:
    return ModelShape.from_config(MODELS[model])


def experts(model: str) -> int:
    return int(MODELS[model].get("num_local_experts", 0))


def test_the_tables_have_every_row_of_the_document_and_no_other() -> None:
    found = [
        (row.lmi, row.model.name.lower(), row.written, row.tensor_parallel, row.max_num_tokens)
        for table in TABLES.values()
        for row in table
    ]
    assert found == DOCUMENT
    assert list(map(len, TABLES.values())) == [27, 13]


@by_rows(("lmi", "model", "machine", "degree", "tokens"), DOCUMENT)
def test_every_row_is_found_by_instance_type_and_by_the_gpus(
    lmi: str, model: str, machine: str, degree: int, tokens: int | None
) -> None:
    for place in (instance_named(machine), instance_named(f"ml.{machine}arge"), instance_named(machine).gpu):
        for dtype in ("float16", "bfloat16"):
            found = look_up(shape(model), experts(model), dtype, place, degree, lmi)
            assert found is not None
            assert found.max_num_tokens == tokens
            assert str(found).lower() == f"table lmi {lmi}, {model} on {machine}, tp {degree}"


def test_rows_are_of_unquantised_weights() -> None:
    for dtype in (None, "fp8", "int8", "float32"):
        assert look_up(shape("mistral 7b"), 0, dtype, instance_named("g5.12xlarge"), 1) is None


@by_table("other")
def test_another_shape_is_another_model(other: dict[str, int | None]) -> None:
    wanted: Any = other
    assert look_up(replace(shape("mistral 7b"), **wanted), 0, "bfloat16", instance_named("g5.12xlarge"), 1) is None


def test_a_name_makes_no_difference() -> None:
    """Llama 3.1 8B has the sizes of Llama 3 8B."""
    named = replace(shape("llama 3 8b"), model_type="other", architecture="OtherForCausalLM", max_position_embeddings=9)
    found = look_up(named, 0, "bfloat16", instance_named("g5.12xlarge"), 1)
    assert found is not None and found.max_num_tokens == 24000


def test_mixtral_differs_from_mistral_in_its_experts_only() -> None:
    assert replace(shape("mixtral 8x7b"), model_type="mistral") == shape("mistral 7b")
    p4d = instance_named("p4d.24xlarge")
    dense, sparse = (look_up(shape("mistral 7b"), count, "bfloat16", p4d, 4) for count in (0, 8))
    assert dense is not None and sparse is not None
    assert (dense.max_num_tokens, sparse.max_num_tokens) == (498000, 50000)


def test_80_gb_are_not_40() -> None:
    for machine in (instance_named("p4de.24xlarge"), gpu_named("a100-80gb"), gpu_named("a100")):
        assert look_up(shape("llama 3 70b"), 0, "bfloat16", machine, 8) is None
    assert look_up(shape("llama 3 70b"), 0, "bfloat16", gpu_named("a100-40gb"), 8) is not None


def test_machines_with_the_same_gpus_share_rows_as_far_as_they_have_enough_of_them() -> None:
    for machine, tokens in (("g5.xlarge", 24000), ("g5.48xlarge", 24000), ("g6.xlarge", None)):
        found = look_up(shape("llama 3 8b"), 0, "bfloat16", instance_named(machine), 1)
        assert (found and found.max_num_tokens) == tokens
    assert look_up(shape("llama 3 8b"), 0, "bfloat16", instance_named("g5.xlarge"), 4) is None


def test_a_version_without_a_table_is_refused() -> None:
    with pytest.raises(SizingError, match=r"0\.29: expected a version with a table of measurements: 0\.28 or 0\.27"):
        look_up(shape("llama 3 8b"), 0, "bfloat16", instance_named("g5.xlarge"), 1, "0.29")


def test_the_page_has_the_measured_tables() -> None:
    for lmi, measured in TABLES.items():
        part = PAGE.split(f"**LMI {lmi}.0**\n")[1]
        table = part.strip().split("\n\n")[0].splitlines()[2:]
        cells = [tuple(re.split(r"\s*\|\s*", line.strip("| "))) for line in table]
        assert cells == [
            (row.model.name, row.written, str(row.tensor_parallel), str(row.max_num_tokens or "Out of Memory"))
            for row in measured
        ]


def test_of_two_machines_with_the_same_gpus_the_machine_itself_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = TABLES["0.28"][0]
    small, large = instance_named("g5.12xlarge"), instance_named("g5.48xlarge")
    rows = (replace(measured, machine=small, max_num_tokens=1), replace(measured, machine=large, max_num_tokens=2))
    monkeypatch.setattr("djl_trtllm.sizing.recommendation.TABLES", {"0.28": rows})
    for machine, tokens in ((small, 1), (large, 2), (instance_named("g5.24xlarge"), 1)):
        found = look_up(shape("llama 3 8b"), 0, "bfloat16", machine, measured.tensor_parallel)
        assert found is not None and found.max_num_tokens == tokens


SMALL = CheckpointSizes.from_config(llama())
BIG = CheckpointSizes.from_config(
    llama(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
)


def of(machine: Instance | GpuModel | None, degree: int = 1, lmi: str = "0.28", **changes: object) -> Recommendation:
    gpu = machine.gpu if isinstance(machine, Instance) else machine
    conditions = Conditions(gpu.memory if gpu else 40 << 30, degree, **changes)  # type: ignore[arg-type]
    return recommend(SMALL, conditions, machine, lmi=lmi)


def test_a_measured_number_stands_and_is_at_most_16384() -> None:
    found = of(instance_named("g5.12xlarge"))
    assert (found.maximum, found.max_num_tokens, found.fits) == (24000, 16384, True)
    assert found.origin == "table LMI 0.28, LLaMA 3 8B on g5.12xl, tp 1: 24000, at most 16384 used"
    assert found.refusal is None


def test_an_estimate_is_halved() -> None:
    found, small = of(gpu_named("h100")), of(gpu_named("l4"))
    assert found.row is None
    assert found.max_num_tokens == 16384 < found.estimate.max_num_tokens // 2
    assert found.origin.startswith(f"half of the estimate of {found.estimate.max_num_tokens}")
    assert found.origin.endswith("for H100, tp 1, at most 16384 used")
    assert of(None).origin.endswith("for GPUs, tp 1, at most 16384 used") and of(gpu_named("a10")).row is None
    assert 0 < small.max_num_tokens == small.maximum // 2 < 16384


def test_measurements_are_of_plain_models() -> None:
    g5 = instance_named("g5.12xlarge")
    for changes in ({"quantization": "fp8"}, {"max_beam_width": 2}, {"dtype": "float32"}, {"pipeline_parallel": 2}):
        assert of(g5, **changes).row is None
    assert of(g5, lora=LoraSlots()).row is None
    assert of(g5, draft=SMALL).row is None
    assert of(g5, lmi="0.27").row is None


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    g5, h100 = instance_named("g5.48xlarge"), gpu_named("h100")
    measured = recommend(BIG, Conditions(g5.gpu.memory, 8), g5)
    assert (measured.maximum, measured.max_num_tokens) == (0, 0)
    assert measured.refusal is not None
    assert "out of memory was measured (table LMI 0.28, LLaMA 3 70B on g5.48xl, tp 8)" in measured.refusal
    assert "each GPU has 22.5 GiB and the weights take 18." in measured.refusal
    expected = recommend(BIG, Conditions(g5.gpu.memory, 4, 1), g5).refusal
    assert expected is not None and expected.startswith("out of memory is expected on A10G, tp 4, where each GPU")
    # A sequence that is too long for the cache is another reason.
    found = recommend(SMALL, Conditions(h100.memory, max_input_len=900_000, max_output_len=100_000), h100)
    assert not found.fits and found.refusal is not None
    assert found.refusal.startswith("the KV cache on H100, tp 1 holds about")
    assert "less than one sequence of 1000000" in found.refusal


# -- the estimates beside the measurements of LMI's tables ------------------------------------------------------------


ROWS = rows()


def share(checks: list[Check], name: str) -> float:
    numbers = [check for check in checks if check.ratio is not None]
    good = [check for check in numbers if getattr(check, name)]
    return len(good) / len(numbers)


def test_every_row_of_both_tables_has_an_estimate() -> None:
    assert [check.row for check in ROWS] == [row for table in TABLES.values() for row in table]
    assert len(ROWS) == 40
    assert sum(check.fitted for check in ROWS) == 20


def test_the_estimate_is_at_or_under_what_was_measured_and_near_it_on_both_halves() -> None:
    for half in ([c for c in ROWS if c.fitted], [c for c in ROWS if not c.fitted], list(ROWS)):
        assert share(half, "not_above") >= 0.8
        assert share(half, "near") >= 0.75


def test_what_ran_out_of_memory_does_so_and_nothing_else() -> None:
    assert all(check.right_memory for check in ROWS)


def test_the_models_of_the_tables_have_the_sizes_that_rows_are_found_by() -> None:
    for check in ROWS:
        sizes = model_sizes(check.row.model.name)
        assert check.row.model.is_of(sizes.shape, sizes.experts), check.row.model.name


def test_the_parameters_of_the_models_are_those_of_their_files() -> None:
    # The totals of the index files, in billions of parameters.
    known = {
        "LLaMA 2 7B": 6.738,
        "LLaMA 3 70B": 70.554,
        "Mixtral 8x7B": 46.703,
        "Gemma 7B": 8.538,
        "CodeLLaMA 34B": 33.744,
    }
    for name, billions in known.items():
        assert round(model_sizes(name).parameters / 1e9, 3) == billions, name


def test_the_table_has_a_line_per_row_and_the_counts_of_both_halves() -> None:
    text = render(ROWS)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 42
    assert len({len(line) for line in lines}) == 1
    assert "| 0.28 | LLaMA 3 70B   | g5.48xl  | 8  | out of memory | out of memory |" in text
    assert "fitted half: at most 1.1 x measured in 19 of 20 (95%), within a factor of 2.5 in 19 of 20 (95%)" in text
    assert "held-out half: at most 1.1 x measured in 16 of 19 (84%), within a factor of 2.5 in 17 of 19 (89%)" in text
    assert "out of memory: 1 of 1 rows that failed, and 0 of the 39 that ran" in text


@pytest.mark.slow
def test_the_constants_are_those_that_the_fit_finds() -> None:
    assert fit() == FITTED


def test_an_estimate_above_costs_more_than_one_as_far_below_and_wrong_memory_most() -> None:
    exact = [check for check in rows() if check.ratio is not None and 0.97 < check.ratio < 1]
    assert 0 < cost(exact) < 0.03 * len(exact)
    assert cost([check for check in rows() if check.ratio is not None and check.ratio > 1]) > 0
    nothing = rows(EngineConstants(scale=1.0, overhead=0, eight_ranks=0))
    assert cost([check for check in nothing if check.row.max_num_tokens is None]) == 5.0
