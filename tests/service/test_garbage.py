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


def test_little_is_collected_at_once_and_everything_seldom() -> None:
    settle_garbage_collector()
    young, middle, old = gc.get_threshold()
    assert young == 2000
    assert young * middle == 1_000_000
    assert old == 50
