from __future__ import annotations

import pytest

from djl_trtllm.api.truss.dialect import TRUSS
from djl_trtllm.model import Tokenizer
from djl_trtllm.service import ServedModel
from tests.api.tables import check_descriptions
from tests.server.application import application
from tests.support.in_process import Hosts
from tests.support.virtual_time import in_virtual_time

BODY = b'{"prompt": "the wolf", "max_tokens": 2, "stream": false}'


@pytest.mark.parametrize("path", ["/predict", "/v1/models/model:predict", "/v1/models/story:predict"])
@in_virtual_time
async def test_every_name_of_the_model_predicts(hosts: Hosts, tokenizer: Tokenizer, path: str) -> None:
    hosts.alone = True
    async with application(tokenizer) as served:
        answer = await served.client.post(path, BODY)
        assert (answer.status, answer.json) == (200, {"text": tokenizer.decode(tokenizer.encode("the wolf")[:2])})


@in_virtual_time
async def test_readiness_is_that_of_the_model(hosts: Hosts, tokenizer: Tokenizer) -> None:
    async with application(tokenizer) as served:
        assert (await served.client.get("/v1/models/model/loaded")).status == 200
        served.registry.add(ServedModel("fable", "/fable"))
        assert (await served.client.get("/v1/models/fable/loaded")).status == 503
        answer = await served.client.get("/v1/models/hen/loaded")
        assert (answer.status, list(answer.json)) == (404, ["error"])


def test_its_paths_are_described() -> None:
    check_descriptions(TRUSS)
