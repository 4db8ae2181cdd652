"""The part of djl_python that formatters import."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from djl_trtllm.api import djl_python_shim

pytestmark = pytest.mark.usefixtures("clean_imports")


def test_an_installed_djl_python_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("djl_python")
    monkeypatch.setitem(sys.modules, "djl_python", real)
    assert not djl_python_shim.install()
    assert sys.modules["djl_python"] is real
    assert "djl_python.inputs" not in sys.modules


def test_the_shim_can_be_installed_twice() -> None:
    assert djl_python_shim.install()
    assert djl_python_shim.install()
