from __future__ import annotations

import pytest

from djl_trtllm.api.triton import refusals
from djl_trtllm.api.triton.refusals import refuse_tensor_parameters
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from djl_trtllm.model import Tokenizer
from tests.server.application import application
from tests.support.in_process import Hosts
from tests.support.virtual_time import in_virtual_time

FILLED = {"{name}": "hen", "{region}": "r", "{model}": "ensemble"}


@in_virtual_time
async def test_every_path_is_refused_in_tritons_shape(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        for method, paths in (("POST", refusals.ACTIONS), ("GET", refusals.PAGES)):
            for path, explanation in paths.items():
                for placeholder, value in FILLED.items():
                    path = path.replace(placeholder, value)
                answer = await served.client.begin(method, path, b"{}").end()
                assert (answer.status, answer.json) == (400, {"error": explanation}), path


def test_the_explanation_says_what_to_do_instead() -> None:
    said = {**refusals.ACTIONS, **refusals.PAGES, **refusals.METHODS}
    assert "POST /models" in said["/v2/repository/models/{name}/load"] == said["RepositoryModelUnload"]
    assert "send their values" in said["/v2/cudasharedmemory/region/{region}/register"]
    assert said["/v2/systemsharedmemory/status"] == said["SystemSharedMemoryStatus"]
    assert "GET /metrics" in said["/v2/logging"] == said["TraceSetting"]


def test_parameters_of_tensors_are_refused_by_name() -> None:
    refuse_tensor_parameters([], "input 'x'")
    refuse_tensor_parameters(["binary_data_size"], "input 'x'", "binary_data_size")
    with pytest.raises(UnsupportedParameterError, match=r"^parameter \"shared_memory_region\" of input 'x' is not"):
        refuse_tensor_parameters(["shared_memory_region"], "input 'x'", "binary_data_size")
    with pytest.raises(UnsupportedParameterError, match="not available: no output has classes"):
        refuse_tensor_parameters(["classification"], "output 'y'")
    with pytest.raises(InvalidRequestError, match=r"^unknown parameter \"colour\" of output 'y': expected none$"):
        refuse_tensor_parameters(["colour"], "output 'y'")
    with pytest.raises(InvalidRequestError, match=r"expected binary_data$"):
        refuse_tensor_parameters(["binary_data", "a"], "output 'y'", "binary_data")
