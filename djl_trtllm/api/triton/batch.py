"""A request of `infer` as one request for each prompt: tensors have a batch dimension, and each row is a prompt.

The outputs of all of them are one response.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from djl_trtllm.api.base import ModelContext
from djl_trtllm.api.output import CollectedSequence
from djl_trtllm.api.parameters import Problems, show
from djl_trtllm.api.triton.inputs import FIELDS, InferenceRequest, input_named, read_request
from djl_trtllm.api.triton.outputs import ALWAYS, NOT_PRODUCED, OUTPUTS, output_tensors, sequence_output
from djl_trtllm.api.triton.tensors import Tensor
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError

_MOST_PROMPTS = 64
_MOST_SEQUENCES = 128
"""Of all prompts of a request."""
_LARGEST_NEUTRAL = 256
"""Of the values of a refused input that ask for nothing."""
_OUTPUT_NAMES = frozenset(output.name for output in OUTPUTS)


def read_batch(
    tensors: Iterable[Tensor], parameters: Mapping[str, Any], model: ModelContext, name: str
) -> list[InferenceRequest]:
    """The requests of all prompts, to which `parameters` apply. `name` is the model's in the request.

    Raises InvalidRequestError.
    """
    given: dict[str, Tensor] = {}
    for tensor in tensors:
        _check_shape(tensor, name)
        if tensor.name in given:
            raise InvalidRequestError(f"input '{tensor.name}' is given twice: expected one tensor of each name")
        given[tensor.name] = tensor
    batch = _batch_size(list(given.values()))
    requests = []
    for row in range(batch):
        problems = Problems()
        values = {each.name: _row(each, row, batch) for each in given.values()}
        requests.append(read_request({**parameters, **values}, model, problems))
        problems.raise_any(f"prompt {row}: " if batch > 1 else "")
    if len({request.n for request in requests}) > 1:
        raise InvalidRequestError("the prompts differ in 'num_return_sequences': expected one number for all of them")
    sequences = sum(request.generation.sampling.sequences for request in requests)
    if sequences > _MOST_SEQUENCES:
        raise InvalidRequestError(f"{sequences} sequences for {batch} prompts: expected at most {_MOST_SEQUENCES}")
    return requests


def check_input(name: Any, model: str, size: int) -> None:
    """Check the name of an input before its values are unpacked: `size` is the number of their bytes or elements.

    An input that is refused may be large. `model` is the name in the request. Raises InvalidRequestError.
    """
    described = input_named(name) if type(name) is str else None
    if described is None:
        raise InvalidRequestError(f"unexpected inference input {show(name)} for model '{model}'")
    if described.row.target is None and size > _LARGEST_NEUTRAL:
        problems = Problems()
        FIELDS.read({described.name: "a tensor"}, problems, "input")
        problems.raise_any()


def check_outputs(names: Sequence[Any], model: str) -> tuple[str, ...]:
    """The outputs that a request names, or those of one that names none. Raises InvalidRequestError."""
    for name in names:
        if type(name) is str and name in NOT_PRODUCED:
            raise UnsupportedParameterError(f"output '{name}' is not available: expected {_expected_outputs()}")
        if type(name) is not str or name not in _OUTPUT_NAMES:
            raise InvalidRequestError(f"unexpected inference output {show(name)} for model '{model}'")
    return tuple(dict.fromkeys(names)) or ALWAYS


def batch_tensors(
    requests: Sequence[InferenceRequest], prompts: Sequence[str], sequences: Sequence[CollectedSequence]
) -> dict[str, Tensor]:
    """All outputs of a whole response, by name. `prompts` are the texts that the sequences of each request follow."""
    n, batch = requests[0].n, len(requests)
    shown = []
    for index, each in enumerate(sequences):
        assert each.finished is not None
        request, text = requests[index // n], prompts[index // n] + each.text
        cumulative = each.finished.cumulative_logprob
        shown.append(sequence_output(text, each.tokens, logprobs=request.logprobs, cumulative=cumulative))
    tensors = {tensor.name: tensor for tensor in output_tensors(shown, batch)}
    tensors["batch_index"] = Tensor("batch_index", "INT32", (batch, 1), list(range(batch)))
    tensors["sequence_index"] = Tensor("sequence_index", "INT32", (batch, n), [*range(n)] * batch)
    return tensors


def _expected_outputs() -> str:
    return ", ".join(f"'{output.name}'" for output in OUTPUTS)


def _check_shape(tensor: Tensor, model: str) -> None:
    described = input_named(tensor.name)
    assert described is not None
    expected, shape = (-1, *described.dims), tensor.shape
    fits = len(shape) == len(expected) and all(
        wanted in (-1, size) for wanted, size in zip(expected, shape, strict=True)
    )
    if not fits:
        raise InvalidRequestError(
            f"unexpected shape for input '{tensor.name}' for model '{model}'. "
            f"Expected {show(list(expected))}, got {show(list(shape))}"
        )


def _batch_size(tensors: list[Tensor]) -> int:
    """The first dimension of every tensor."""
    sizes = {tensor.shape[0]: tensor.name for tensor in tensors}
    if len(sizes) > 1:
        shown = ", ".join(f"{size} in '{name}'" for size, name in sizes.items())
        raise InvalidRequestError(f"input batch sizes differ: {shown}")
    batch = next(iter(sizes), 1)
    if not 0 < batch <= _MOST_PROMPTS:
        raise InvalidRequestError(f"the batch size is {batch}: expected 1 to {_MOST_PROMPTS}")
    return batch


def _row(tensor: Tensor, row: int, batch: int) -> list[Any]:
    width = len(tensor.data) // batch
    values = tensor.data[row * width : (row + 1) * width]
    if tensor.datatype == "FP32":
        # As their sender wrote them: 0.9 and not 0.8999999761581421, which would sample differently.
        values = [float(f"{value:.7g}") for value in values]
    return values
