"""DJL's calls about LoRA adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.djl import adapters
from djl_trtllm.djl.item import Item
from djl_trtllm.executor.protocol import Feature
from djl_trtllm.model import Tokenizer
from djl_trtllm.service import ModelService
from tests.support.djl import Input
from tests.support.in_process import Hosts, played_model
from tests.support.virtual_time import in_virtual_time


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("dutch", "more/greek"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    return tmp_path


async def loaded(tokenizer: Tokenizer, directory: Path) -> ModelService:
    service = ModelService("story")
    await service.load(played_model(tokenizer, directory))
    return service


def refused(item: Item, told: str) -> bool:
    return (item.data, item.last, item.code) == (b"", True, 424) and told in item.error


@in_virtual_time
async def test_an_adapter_is_registered_and_unregistered(hosts: Hosts, tokenizer: Tokenizer, directory: Path) -> None:
    hosts.features |= {Feature.ADAPTERS}
    service = await loaded(tokenizer, directory)
    greek = adapters.register(service, Input(name="greek", src=str(directory / "adapters" / "more" / "greek")))
    assert greek == Item(b"Adapter greek registered", True)
    assert service.adapters.find("greek").path.endswith("more/greek")
    assert adapters.unregister(service, Input(name="dutch")) == Item(b"Adapter dutch unregistered", True)
    # Without a source it is in the folder of its name.
    assert adapters.register(service, Input(name="dutch")) == Item(b"Adapter dutch registered", True)
    assert [adapter.name for adapter in service.adapters] == ["greek", "dutch"]
    await service.close()


@in_virtual_time
async def test_what_cannot_be_done_is_reported(hosts: Hosts, tokenizer: Tokenizer, directory: Path) -> None:
    hosts.features |= {Feature.ADAPTERS}
    service = await loaded(tokenizer, directory)
    assert refused(adapters.register(service, Input()), "needs a name")
    assert refused(adapters.register(service, Input(name="dutch")), "'dutch' already")
    assert refused(adapters.unregister(service, Input(name="german")), "'german': registered are dutch")
    assert refused(adapters.unregister(service, Input()), "no adapter ''")
    await service.close()


@in_virtual_time
async def test_a_model_without_lora_says_how_to_get_it(hosts: Hosts, tokenizer: Tokenizer, directory: Path) -> None:
    service = await loaded(tokenizer, directory)
    assert refused(adapters.register(service, Input(name="greek")), "set option.enable_lora=true, on TensorRT-LLM")
    await service.close()


@in_virtual_time
async def test_an_adapter_is_never_changed() -> None:
    told = "an adapter cannot be changed: unregister it, then register it again"
    assert adapters.update(ModelService("story"), Input(name="dutch")) == Item(b"", True, 424, told)
