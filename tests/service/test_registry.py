from __future__ import annotations

from djl_trtllm.service import Registry, ServedModel
from tests.support.virtual_time import in_virtual_time


@in_virtual_time
async def test_a_model_is_found_by_its_name() -> None:
    registry = Registry()
    fox, wolf = ServedModel("fox", "/fox"), ServedModel("wolf", "/wolf")
    registry.add(fox)
    registry.add(wolf)
    assert (registry.find("fox"), registry.find("wolf"), registry.find("hen")) == (fox, wolf, None)
    assert list(registry.models) == ["fox", "wolf"]


@in_virtual_time
async def test_without_a_name_the_only_model_is_meant() -> None:
    registry = Registry()
    assert registry.find(None) is None
    fox = ServedModel("fox", "/fox")
    registry.add(fox)
    assert registry.find(None) is fox
    registry.add(ServedModel("wolf", "/wolf"))
    assert registry.find(None) is None


@in_virtual_time
async def test_without_a_name_the_model_of_the_start_is_meant_whatever_is_registered() -> None:
    registry = Registry()
    fox, wolf, hen = (ServedModel(name, f"/{name}", at_startup=name == "fox") for name in ("fox", "wolf", "hen"))
    for model in (wolf, fox, hen):
        registry.add(model)
    assert registry.find(None) is fox
    registry.remove(fox)
    assert registry.find(None) is None
    registry.remove(wolf)
    assert registry.find(None) is hen


@in_virtual_time
async def test_a_model_that_is_removed_is_gone() -> None:
    registry = Registry()
    fox = ServedModel("fox", "/fox")
    registry.add(fox)
    registry.remove(fox)
    registry.remove(fox)
    assert registry.find("fox") is None


@in_virtual_time
async def test_another_model_of_the_same_name_stays() -> None:
    registry = Registry()
    old, new = ServedModel("fox", "/old"), ServedModel("fox", "/new")
    registry.add(old)
    registry.add(new)
    registry.remove(old)
    assert registry.find("fox") is new
