from __future__ import annotations

import pytest

from djl_trtllm.api.triton.dialect import TRITON
from djl_trtllm.errors import UnknownModelError
from djl_trtllm.server.find_model import find_model, status_of
from djl_trtllm.service import Registry, ServedModel


def registry(*names: str) -> Registry:
    made = Registry()
    for name in names:
        made.add(ServedModel(name, f"/{name}"))
    return made


@pytest.mark.parametrize("name", ["story", None, "ensemble"])
def test_the_only_model_has_aliases_and_needs_no_name(name: str | None) -> None:
    assert find_model(registry("story"), TRITON, name).name == "story"


def test_a_model_may_have_the_name_of_an_alias() -> None:
    assert find_model(registry("story", "ensemble"), TRITON, "ensemble").name == "ensemble"


def test_an_endpoint_may_be_the_name_of_a_model() -> None:
    assert find_model(registry("story", "tale"), TRITON, None, "tale").name == "tale"


@pytest.mark.parametrize(
    ("name", "endpoint", "message"),
    [
        ("hen", None, "there is no model named 'hen' here; loaded: story, tale"),
        (None, None, "Parameter model_name is required; loaded: story, tale"),
        (None, "hen", "there is no model named 'hen' here; loaded: story, tale"),
    ],
)
def test_a_model_that_is_not_there(name: str | None, endpoint: str | None, message: str) -> None:
    with pytest.raises(UnknownModelError, match=message):
        find_model(registry("story", "tale"), TRITON, name, endpoint)


def test_a_model_that_loads_is_not_ready() -> None:
    status = status_of(registry("story").models["story"])
    assert (status.name, status.ready, status.context) == ("story", False, None)
