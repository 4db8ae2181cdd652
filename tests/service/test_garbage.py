from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from djl_trtllm.service import settle_garbage_collector


@pytest.fixture(autouse=True)
def settings_of_before() -> Iterator[None]:
    before = gc.get_threshold()
    gc.unfreeze()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Cyclic:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_loaded_is_never_looked_at_again() -> None:
    settle_garbage_collector()
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    assert len(gc.get_objects()) < frozen


def test_garbage_is_not_kept_for_ever() -> None:
    gc.disable()
    try:
        garbage = weakref.ref(Cyclic())
        assert garbage() is not None
        settle_garbage_collector()
        assert garbage() is None
    finally:
        gc.enable()


def test_collections_are_rare() -> None:
    settle_garbage_collector()
    assert gc.get_threshold() == (50_000, 20, 50)
