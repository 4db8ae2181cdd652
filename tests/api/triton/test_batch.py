from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.api.output import SequenceCollector
from djl_trtllm.api.triton.batch import batch_tensors, check_input, check_outputs, read_batch
from djl_trtllm.api.triton.inputs import InferenceRequest
from djl_trtllm.api.triton.outputs import ALWAYS, OUTPUTS
from djl_trtllm.api.triton.tensors import Tensor
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from djl_trtllm.request import OutputChunk
from tests.api.scripts import several
from tests.api.triton.played import PlayedModel


def column(name: str, datatype: str, data: list[Any], rows: int = 2) -> Tensor:
    return Tensor(name, datatype, (rows, len(data) // rows), data)


TEXTS = column("text_input", "BYTES", ["a wolf", "a fox"])
COUNTS = column("max_tokens", "INT32", [3, 4])


def read(*tensors: Tensor, **parameters: Any) -> list[InferenceRequest]:
    return read_batch([TEXTS, COUNTS, *tensors], parameters, PlayedModel(), "ensemble")


def test_each_row_is_a_prompt_with_its_own_values() -> None:
    first, second = read(
        column("stop_words", "BYTES", ["x", "", "y", "z"]),
        column("end_id", "INT32", [5, -1]),
        column("return_log_probs", "BOOL", [True, False]),
    )
    assert (first.generation.prompt, first.generation.stop, first.logprobs) == ("a wolf", ("x",), True)
    assert (second.generation.prompt, second.generation.stop, second.logprobs) == ("a fox", ("y", "z"), False)
    assert (first.generation.stop_token_ids, second.generation.stop_token_ids) == ((5,), ())
    assert [each.generation.sampling.max_new_tokens for each in (first, second)] == [3, 4]


def test_parameters_are_those_of_every_row() -> None:
    assert [each.empty_final_response for each in read(triton_enable_empty_final_response=True)] == [True, True]


def test_floats_of_32_bits_are_as_their_sender_wrote_them() -> None:
    first, second = read(column("temperature", "FP32", [0.8999999761581421, 0.30000001192092896]))
    assert (first.generation.sampling.temperature, second.generation.sampling.temperature) == (0.9, 0.3)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (TEXTS, "input 'text_input' is given twice"),
        (column("top_k", "INT32", [1], 1), "input batch sizes differ: 2 in 'max_tokens', 1 in 'top_k'"),
        (Tensor("top_k", "INT32", (2,), [1, 1]), r"unexpected shape for input 'top_k' .*\[-1,1\], got \[2\]"),
        (Tensor("top_k", "INT32", (2, 2), [1] * 4), r"Expected \[-1,1\], got \[2,2\]"),
        (column("top_k", "INT32", [1, -7]), "prompt 1: 'top_k' is -7"),
        (column("num_return_sequences", "INT32", [1, 2]), "the prompts differ in 'num_return_sequences'"),
    ],
)
def test_what_is_no_batch_is_refused(tensor: Tensor, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read(tensor)


@pytest.mark.parametrize(("prompts", "n", "refused"), [(64, 2, False), (64, 3, True), (65, 1, True), (1, 16, False)])
def test_prompts_and_their_sequences_are_bounded(prompts: int, n: int, refused: bool) -> None:
    tensors = [
        column("text_input", "BYTES", ["a"] * prompts, prompts),
        column("max_tokens", "INT32", [3] * prompts, prompts),
        column("num_return_sequences", "INT32", [n] * prompts, prompts),
    ]
    if refused:
        with pytest.raises(InvalidRequestError, match=r"expected 1 to 64|expected at most 128"):
            read_batch(tensors, {}, PlayedModel(), "ensemble")
    else:
        assert len(read_batch(tensors, {}, PlayedModel(), "ensemble")) == prompts


def test_inputs_are_known_and_those_that_are_refused_are_small() -> None:
    check_input("text_input", "ensemble", 10**9)
    check_input("lora_weights", "ensemble", 256)
    with pytest.raises(UnsupportedParameterError, match=r"'lora_weights' is .*register the adapter"):
        check_input("lora_weights", "ensemble", 257)
    with pytest.raises(InvalidRequestError, match="unexpected inference input \"hen\" for model 'ensemble'"):
        check_input("hen", "ensemble", 1)


def test_outputs_are_those_that_are_named_or_the_usual_ones() -> None:
    assert check_outputs([], "ensemble") == ALWAYS
    assert check_outputs(["batch_index", "text_output", "text_output"], "ensemble") == ("batch_index", "text_output")
    with pytest.raises(UnsupportedParameterError, match="output 'context_logits' is not available"):
        check_outputs(["context_logits"], "ensemble")
    for name in ("hen", None, ["text_output"]):
        with pytest.raises(InvalidRequestError, match="unexpected inference output"):
            check_outputs([name], "ensemble")


def test_the_outputs_of_a_batch() -> None:
    output = SequenceCollector(2, 3)
    for number in range(3):
        for each in several(2):
            output.add(OutputChunk(each.index, each.tokens, each.finished, number))
    requests = read_batch(
        [
            column("text_input", "BYTES", ["a", "b", "c"], 3),
            column("max_tokens", "INT32", [2] * 3, 3),
            column("num_return_sequences", "INT32", [2] * 3, 3),
            column("return_log_probs", "BOOL", [False, True, False], 3),
        ],
        {},
        PlayedModel(),
        "ensemble",
    )
    tensors = batch_tensors(requests, ["a ", "b ", "c "], output.sequences)
    assert tensors["text_output"].data == [f"{prompt} {index}0 {index}1" for prompt in "abc" for index in (0, 1)]
    assert tensors["cum_log_probs"].data == [0, 0, -0.2, -0.30000000000000004, 0, 0]
    assert tensors["batch_index"] == Tensor("batch_index", "INT32", (3, 1), [0, 1, 2])
    assert tensors["sequence_index"] == Tensor("sequence_index", "INT32", (3, 2), [0, 1] * 3)
    assert tensors.keys() == {output.name for output in OUTPUTS}


def test_a_request_without_tensors_is_one_prompt_that_is_missing() -> None:
    with pytest.raises(InvalidRequestError, match=r"^'text_input' is required"):
        read_batch([], {}, PlayedModel(), "ensemble")


def test_outputs_that_are_there_are_named() -> None:
    names = "'text_output', 'cum_log_probs', 'output_log_probs', 'batch_index', 'sequence_index'"
    with pytest.raises(UnsupportedParameterError, match=f"expected {names}$"):
        check_outputs(["context_logits"], "ensemble")
