from __future__ import annotations

from djl_trtllm.sizing.parameters import expected_tensors
from tests.sizing.configs import deepseek, llama


def test_the_parameters_of_llama_3_8b_are_counted_exactly() -> None:
    # The total of its index file: https://huggingface.co/NousResearch/Meta-Llama-3-8B
    assert sum(tensor.bytes for tensor in expected_tensors(llama())) == 16_060_522_496


def test_the_parameters_of_deepseek_v3_are_671_billion() -> None:
    assert round(sum(tensor.elements for tensor in expected_tensors(deepseek())) / 1e9) == 671


def test_a_tied_head_is_no_tensor_of_its_own() -> None:
    names = {tensor.name for tensor in expected_tensors(llama(tie_word_embeddings=True))}
    assert "lm_head.weight" not in names


def test_a_config_without_sizes_has_no_tensors() -> None:
    assert expected_tensors({"model_type": "llama"}) == ()
