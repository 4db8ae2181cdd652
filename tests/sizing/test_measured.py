"""The tables of the document, row for row, and which model and machine gets which."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import SizingError
from djl_trtllm.model.shape import ModelShape
from djl_trtllm.sizing.gpus import gpu_named, instance_named
from djl_trtllm.sizing.measured import TABLES, look_up

DOCUMENT = """
### LMI 0.28.0
LLaMA 3 8B | g5.12xl | 1 | 24000
LLaMA 3 8B | g5.12xl | 4 | 176000
LLaMA 2 7B | g5.12xl | 1 | 29000
LLaMA 2 7B | g5.12xl | 4 | 198000
LLaMA 2 13B | g5.12xl | 4 | 127000
Gemma 7B | g5.12xl | 4 | 125000
Gemma 7B | g5.12xl | 1 | 1190
Falcon 7B | g5.12xl | 1 | 36000
Mistral 7B | g5.12xl | 1 | 35000
Mistral 7B | g5.12xl | 4 | 198000
LLaMA 2 13B | g6.12xl | 4 | 116000
LLaMA 2 13B | g5.48xl | 8 | 142000
LLaMA 2 70B | g5.48xl | 8 | 4100
LLaMA 3 70B | g5.48xl | 8 | Out of Memory
Mixtral 8x7B | g5.48xl | 8 | 31000
Falcon 40B | g5.48xl | 8 | 32000
CodeLLAMA 34B | g5.48xl | 8 | 36000
LLAMA 2 13B | p4d.24xl | 4 | 235000
LLAMA 2 70B | p4d.24xl | 8 | 97000
LLAMA 3 70B | p4d.24xl | 8 | 82000
Mixtral 8x7B | p4d.24xl | 4 | 50000
Mixtral 8x7B | p4d.24xl | 8 | 112000
Falcon 40B | p4d.24xl | 4 | 71000
Mistral 7B | p4d.24xl | 2 | 245000
Mistral 7B | p4d.24xl | 4 | 498000
CodeLLaMA 34B | p4d.24xl | 4 | 115000
CodeLLaMA 34B | p4d.24xl | 8 | 191000
### LMI 0.27.0
LLaMA 2 7B | g5.12xl | 1 | 2835
LLaMA 2 7B | g5.12xl | 4 | 200000
LLaMA 2 13B | g5.12xl | 4 | 120000
LLaMA 2 13B | g6.12xl | 4 | 100000
Mistral 7B | g5.12xl | 1 | 3287
Mistral 7B | g5.12xl | 4 | 200000
Falcon 7B | g5.12xl | 1 | 2835
LLAMA 2 13B | p4d.24xl | 4 | 230000
LLAMA 2 70B | p4d.24xl | 8 | 104000
Mixtral 8x7B | p4d.24xl | 4 | 57000
Falcon 40B | p4d.24xl | 4 | 75000
CodeLLaMA 34B | p4d.24xl | 4 | 150000
CodeLLaMA 34B | p4d.24xl | 8 | 190000
"""
"""The tables as LMI's document has them: model, machine, tensor parallel degree, max number of tokens."""

PAGE = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text(encoding="utf-8")


def llama(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "torch_dtype": "float16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
    }


MISTRAL = {**llama(32, 4096, 32, 8, 14336, 32000), "model_type": "mistral", "torch_dtype": "bfloat16"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama 2 7b": llama(32, 4096, 32, 32, 11008, 32000),
    "llama 2 13b": llama(40, 5120, 40, 40, 13824, 32000),
    "llama 2 70b": llama(80, 8192, 64, 8, 28672, 32000),
    "llama 3 8b": llama(32, 4096, 32, 8, 14336, 128256),
    "llama 3 70b": llama(80, 8192, 64, 8, 28672, 128256),
    "codellama 34b": llama(48, 8192, 64, 8, 22016, 32000),
    "mistral 7b": MISTRAL,
    "mixtral 8x7b": {**MISTRAL, "model_type": "mixtral", "num_local_experts": 8},
    "gemma 7b": {
        "model_type": "gemma",
        "num_hidden_layers": 28,
        "hidden_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "intermediate_size": 24576,
        "vocab_size": 256000,
    },
    "falcon 7b": {
        "model_type": "falcon",
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "multi_query": True,
        "vocab_size": 65024,
    },
    "falcon 40b": {
        "model_type": "falcon",
        "num_hidden_layers": 60,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
        "vocab_size": 65024,
    },
}
"""The sizes in the models' own config.json on the Hugging Face hub."""


def documented() -> list[tuple[str, str, str, int, int | None]]:
    """LMI's version, model, machine, degree, tokens (None: out of memory) of every row of the document."""
    rows = []
    lmi = ""
    for line in DOCUMENT.strip().splitlines():
        if title := re.fullmatch(r"### LMI (\d+\.\d+)\.0", line):
            lmi = title[1]
            continue
        model, machine, degree, tokens = line.split(" | ")
        rows.append((lmi, model.lower(), machine, int(degree), None if tokens == "Out of Memory" else int(tokens)))
    return rows


def shape(model: str) -> ModelShape:
    return ModelShape.from_config(CONFIGS[model])


def experts(model: str) -> int:
    return int(CONFIGS[model].get("num_local_experts", 0))


def test_the_tables_have_every_row_of_the_document_and_no_other() -> None:
    rows = [
        (row.lmi, row.model.name.lower(), row.written, row.tensor_parallel, row.max_num_tokens)
        for rows in TABLES.values()
        for row in rows
    ]
    assert rows == documented()
    assert [len(rows) for rows in TABLES.values()] == [27, 13]


@pytest.mark.parametrize(("lmi", "model", "machine", "degree", "tokens"), documented())
def test_every_row_is_found_by_instance_type_and_by_the_gpus(
    lmi: str, model: str, machine: str, degree: int, tokens: int | None
) -> None:
    for place in (instance_named(machine), instance_named(f"ml.{machine}arge"), instance_named(machine).gpu):
        for dtype in ("float16", "bfloat16"):
            found = look_up(shape(model), experts(model), dtype, place, degree, lmi)
            assert found is not None
            assert found.max_num_tokens == tokens
            assert str(found).lower() == f"table lmi {lmi}, {model} on {machine}, tp {degree}"


def test_lmi_028_is_the_default() -> None:
    found = look_up(shape("mistral 7b"), 0, "bfloat16", instance_named("g5.12xlarge"), 1)
    assert found is not None and found.max_num_tokens == 35000


def test_rows_are_of_unquantised_weights() -> None:
    for dtype in (None, "fp8", "int8", "float32"):
        assert look_up(shape("mistral 7b"), 0, dtype, instance_named("g5.12xlarge"), 1) is None


@pytest.mark.parametrize(
    "other",
    [
        {"num_layers": 33},
        {"hidden": 4097},
        {"num_heads": 64},
        {"num_kv_heads": 4},
        {"intermediate": 11008},
        {"vocab_size": 32768},
        {"vocab_size": None},
    ],
)
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
    for lmi, rows in TABLES.items():
        part = PAGE.split(f"**LMI {lmi}.0**\n")[1]
        table = part.strip().split("\n\n")[0].splitlines()[2:]
        cells = [tuple(re.split(r"\s*\|\s*", line.strip("| "))) for line in table]
        assert cells == [
            (row.model.name, row.written, str(row.tensor_parallel), str(row.max_num_tokens or "Out of Memory"))
            for row in rows
        ]


def test_of_two_machines_with_the_same_gpus_the_machine_itself_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = TABLES["0.28"][0]
    small, large = instance_named("g5.12xlarge"), instance_named("g5.48xlarge")
    rows = (replace(measured, machine=small, max_num_tokens=1), replace(measured, machine=large, max_num_tokens=2))
    monkeypatch.setattr("djl_trtllm.sizing.measured.TABLES", {"0.28": rows})
    for machine, tokens in ((small, 1), (large, 2), (instance_named("g5.24xlarge"), 1)):
        found = look_up(shape("llama 3 8b"), 0, "bfloat16", machine, measured.tensor_parallel)
        assert found is not None and found.max_num_tokens == tokens
