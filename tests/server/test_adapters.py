"""LoRA adapters over HTTP."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from djl_trtllm.api.base import SMALL
from djl_trtllm.executor.protocol import Feature
from djl_trtllm.model import Tokenizer
from tests.server.application import application
from tests.support.in_process import Hosts

COLLECTIONS = ["/adapters", "/models/story/adapters"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's, with two adapters and one that is not registered by itself."""
    for name in ("dutch", "french", "more/greek"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    return tmp_path


async def test_sagemaker_registers_an_adapter_of_an_inference_component(
    hosts: Hosts, tokenizer: Tokenizer, directory: Path
) -> None:
    (directory / "mount" / "dutch").mkdir(parents=True)
    (directory / "mount" / "dutch" / "adapter_config.json").write_text("{}")
    model = directory / "model"
    (model / "adapters").mkdir(parents=True)
    hosts.features |= {Feature.ADAPTERS}
    async with application(tokenizer, directory=model, adapter_roots=(str(directory / "mount"),)) as served:
        content = {"name": "component-1", "src": str(directory / "mount" / "dutch"), "preload": True, "pin": False}
        alias = {"X-Amzn-SageMaker-Adapter-Alias": "dutch"}
        made = await served.client.post("/adapters", orjson.dumps(content), alias)
        assert (made.status, made.json) == (200, {"status": "Adapter dutch registered"})
        assert "warning" not in made.headers
        assert (await served.client.get("/adapters/component-1")).json["src"] == content["src"]
        gone = await served.client.get("/adapters/component-1", method="DELETE")
        assert (gone.status, gone.json) == (200, {"status": "Adapter component-1 unregistered"})
        made = await served.client.post("/adapters", orjson.dumps({**content, "pin": True}))
        assert (made.status, "pin has no effect" in made.headers["warning"]) == (200, True)


@pytest.mark.parametrize("path", COLLECTIONS)
async def test_a_body_that_would_stop_the_event_loop_is_not_read(
    hosts: Hosts, tokenizer: Tokenizer, directory: Path, path: str
) -> None:
    hosts.features |= {Feature.ADAPTERS}
    async with application(tokenizer, directory=directory, max_request_size=100_000) as served:
        answer = await served.client.post(path, b" " * (SMALL + 1))
        assert (answer.status, str(SMALL) in answer.json["message"]) == (413, True)
        assert (await served.client.post(path, b" " * SMALL)).status == 400
