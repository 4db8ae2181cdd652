"""LoRA adapters over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from djl_trtllm.api.base import SMALL
from djl_trtllm.executor.protocol import Feature
from djl_trtllm.model import Tokenizer
from djl_trtllm.service import ServedModel
from tests.server.application import Application, application
from tests.support.in_process import Hosts
from tests.support.tables import by_table

COLLECTIONS = ["/adapters", "/models/story/adapters"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's, with two adapters and one that is not registered by itself."""
    for name in ("dutch", "french", "more/greek"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    return tmp_path


@asynccontextmanager
async def adapting(hosts: Hosts, tokenizer: Tokenizer, directory: Path) -> AsyncIterator[Application]:
    """An application whose model takes adapters."""
    hosts.features |= {Feature.ADAPTERS}
    async with application(tokenizer, directory=directory) as served:
        yield served


def described(directory: Path, name: str) -> dict[str, str]:
    return {"name": name, "src": str(directory / "adapters" / name)}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", COLLECTIONS)
async def test_adapters_are_listed(hosts: Hosts, tokenizer: Tokenizer, directory: Path, path: str, method: str) -> None:
    async with adapting(hosts, tokenizer, directory) as served:
        answer = await served.client.get(path, method=method)
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json == {"adapters": [described(directory, "dutch"), described(directory, "french")]}


@pytest.mark.parametrize("path", COLLECTIONS)
async def test_an_adapter_is_registered_and_unregistered(
    hosts: Hosts, tokenizer: Tokenizer, directory: Path, path: str
) -> None:
    async with adapting(hosts, tokenizer, directory) as served:
        made = await served.client.post(path, query="name=new&src=more/greek")
        assert (made.status, made.json) == (200, {"status": "Adapter new registered"})
        shown = await served.client.get(f"{path}/new")
        assert shown.json["src"] == str((directory / "adapters" / "more" / "greek").resolve())
        gone = await served.client.get(f"{path}/new", method="DELETE")
        assert (gone.status, gone.json) == (200, {"status": "Adapter new unregistered"})
        again = await served.client.get(f"{path}/new", method="DELETE")
        assert again.status == 404


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


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "the body is not JSON"),
        (b"[]", "the body must be a JSON object"),
        (b'{"name": 3, "src": "dutch"}', "'name' is 3: expected a string"),
        (b'{"name": "a", "src": "dutch", "pins": 1}', "unknown field \"pins\", did you mean 'pin'?"),
        (b'{"src": "dutch"}', "an adapter needs a name"),
    ],
)
async def test_a_body_that_is_wrong_is_400(
    hosts: Hosts, tokenizer: Tokenizer, directory: Path, content: bytes, told: str
) -> None:
    async with adapting(hosts, tokenizer, directory) as served:
        answer = await served.client.post("/adapters", content)
        assert (answer.status, told in answer.json["message"]) == (400, True)


async def test_an_adapter_without_a_source_is_in_the_folder_of_its_name(
    hosts: Hosts, tokenizer: Tokenizer, directory: Path
) -> None:
    async with adapting(hosts, tokenizer, directory) as served:
        await served.client.get("/adapters/dutch", method="DELETE")
        for query in ("name=dutch", "name=dutch&src="):
            assert (await served.client.post("/adapters", query=query)).status == 200
            await served.client.get("/adapters/dutch", method="DELETE")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_unknown_adapter_is_404_with_those_that_are_there(
    hosts: Hosts, tokenizer: Tokenizer, directory: Path, method: str
) -> None:
    async with adapting(hosts, tokenizer, directory) as served:
        answer = await served.client.get("/adapters/german", method=method)
        assert (answer.status, answer.json["type"]) == (404, "ResourceNotFoundException")
        assert "'german': registered are dutch, french" in answer.json["message"]


@pytest.mark.parametrize(
    ("query", "told"),
    [("name=dutch", "'dutch' already"), ("", "needs a name"), ("name=new&src=../outside", "src is '../outside'")],
)
async def test_what_cannot_be_registered_is_400(
    hosts: Hosts, tokenizer: Tokenizer, directory: Path, query: str, told: str
) -> None:
    async with adapting(hosts, tokenizer, directory) as served:
        answer = await served.client.post("/adapters", query=query)
        assert answer.status == 400
        assert told in answer.json["message"]


@by_table("path", "method", "allow", "told")
async def test_a_wrong_method_is_405_and_names_the_right_ones(
    hosts: Hosts, tokenizer: Tokenizer, directory: Path, path: str, method: str, allow: str, told: str
) -> None:
    async with adapting(hosts, tokenizer, directory) as served:
        answer = await served.client.get(path, method=method)
        assert (answer.status, answer.headers["allow"], answer.json["message"]) == (405, allow, told)


@pytest.mark.parametrize("path", ["/adapters", "/adapters/dutch"])
async def test_a_model_without_lora_says_how_to_get_it(hosts: Hosts, tokenizer: Tokenizer, path: str) -> None:
    async with application(tokenizer) as served:
        answer = await served.client.get(path)
        assert answer.status == 400
        assert answer.json["message"] == "LoRA is not enabled: set option.enable_lora=true, on TensorRT-LLM."


async def test_a_model_that_is_not_ready_refuses(hosts: Hosts) -> None:
    async with application() as served:
        served.registry.add(ServedModel("story", "/story"))
        answer = await served.client.get("/adapters")
        assert (answer.status, answer.json["message"]) == (529, "model story is not ready")


@pytest.mark.parametrize("path", ["/models/hen/adapters", "/models/hen/adapters/dutch"])
async def test_an_unknown_model_is_404(hosts: Hosts, tokenizer: Tokenizer, directory: Path, path: str) -> None:
    async with adapting(hosts, tokenizer, directory) as served:
        answer = await served.client.get(path)
        assert (answer.status, answer.json["message"]) == (404, "there is no such model here")


async def test_of_several_models_one_has_to_be_named(hosts: Hosts, tokenizer: Tokenizer, directory: Path) -> None:
    async with adapting(hosts, tokenizer, directory) as served:
        await served.load(tokenizer, "fable")
        assert (await served.client.get("/adapters")).status == 404
        assert (await served.client.get("/models/story/adapters")).status == 200


@pytest.mark.parametrize("path", COLLECTIONS)
async def test_a_body_that_would_stop_the_event_loop_is_not_read(
    hosts: Hosts, tokenizer: Tokenizer, directory: Path, path: str
) -> None:
    hosts.features |= {Feature.ADAPTERS}
    async with application(tokenizer, directory=directory, max_request_size=100_000) as served:
        answer = await served.client.post(path, b" " * (SMALL + 1))
        assert (answer.status, str(SMALL) in answer.json["message"]) == (413, True)
        assert (await served.client.post(path, b" " * SMALL)).status == 400
