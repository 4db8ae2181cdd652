from __future__ import annotations

import pytest

from djl_trtllm.backends import registry
from djl_trtllm.backends.registry import backend_named, backends, register
from djl_trtllm.config import Backend
from tests.backends.echo.backend import EchoBackend


def test_every_value_of_the_option_has_one_backend() -> None:
    names = [name for backend in backends() for name in backend.effects]
    assert sorted(names) == sorted(set(Backend.all_values()) - {"auto"})
    assert all(name in backend_named(Backend(name)).effects for name in names)


def test_auto_asks_tensorrt_llm_first() -> None:
    assert [next(iter(backend.effects)) for backend in backends()] == ["tensorrt", "openvino", "scripted"]


def test_a_backend_is_available_under_its_names_once_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BACKENDS", list(backends()))
    monkeypatch.setattr("djl_trtllm.config.options.choices._ADDED", {})
    with pytest.raises(ValueError, match="echo"):
        Backend("echo")
    echo = EchoBackend()
    register(echo)
    assert backend_named(Backend("echo")) is backends()[-1] is echo
    assert Backend("echo") is Backend("echo")
    assert (Backend("echo").value, str(Backend("echo")), repr(Backend("echo"))) == (
        "echo",
        "echo",
        "<Backend.ECHO: 'echo'>",
    )
    assert Backend.all_values() == (*(member.value for member in Backend), "echo")
