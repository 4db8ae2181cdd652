"""DJL Serving's entry point in rolling batch mode, and what both modes have in common."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.djl import worker as worker_module
from djl_trtllm.djl.worker import Item
from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.executor.protocol import Feature
from tests.server.application import body
from tests.support.djl import Input, Output, Reader, Socket, install_djl_python
from tests.support.in_process import Hosts
from tests.support.models import scripted_model

NAME = "djl_trtllm.handler"
ROLLING = {"rolling_batch": "enable"}


@pytest.fixture
def hosts(hosts: Hosts) -> Hosts:
    """Engine processes that generate by themselves."""
    hosts.alone = True
    return hosts


@pytest.fixture
def handler(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported anew."""
    install_djl_python(monkeypatch)
    monkeypatch.setattr(worker_module, "settle_garbage_collector", lambda: None)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    yield module
    sys.modules.pop(NAME, None)
    if (worker := module._worker) is not None:
        asyncio.run_coroutine_threadsafe(worker.service.close(), worker.loop).result(60)
        worker.loop.call_soon_threadsafe(worker.loop.stop)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = scripted_model(tmp_path / "model")
    (path / "adapters" / "dutch").mkdir(parents=True)
    (path / "adapters" / "dutch" / "adapter_config.json").write_text("{}")
    return path


@pytest.mark.parametrize(("flag", "module"), [("--async-mode", "djl_trtllm.async_handler"), ("--no-async-mode", NAME)])
def test_the_old_containers_module_names_lead_to_the_handler_of_djls_mode(
    handler: Any, monkeypatch: pytest.MonkeyPatch, flag: str, module: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["djl_python_engine.py", flag])
    found = runpy.run_path(str(Path(__file__).parent.parent / "docker" / "djl" / "old_handler.py"))
    for name in ("handle", "register_adapter", "update_adapter", "unregister_adapter"):
        assert found[name].__module__ == module


def loading(model: Path, **properties: str) -> Input:
    """DJL's first call."""
    return Input(None, model_dir=str(model), **{**ROLLING, **properties})


def answered(output: Any) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Properties and items of a batch's answer, as DJL reads them."""
    connection = Socket()
    output.send(connection)
    assert len(connection.writes) == 1
    (frame,) = connection.frames
    assert (frame.code, frame.message) == (200, "OK")
    return frame.properties, frame.contents


def test_the_first_call_loads_the_model_and_the_others_bring_requests(handler: Any, model: Path, hosts: Hosts) -> None:
    assert handler.handle(loading(model)) is None
    assert handler.handle(loading(model)) is None
    assert len(hosts.made) == 1
    request = (body(3, stream=True, output_formatter="none"), {"Content-Type": "application/json"})
    properties, [item] = answered(handler.handle(Input.batch(1, {0: request})))
    items = [] if item == {"data": "", "last": "false"} else [item]
    while not items or items[-1]["last"] != "true":
        more, [item] = answered(handler.handle(Input.batch(1, {})))
        properties |= more
        items.append(item)
    assert properties == {"batch_0_Content-Type": "text/plain"}
    assert "".join(item["data"] for item in items).split() == ["the"]


def test_items_and_their_headers_go_in_one_write_by_their_place(handler: Any) -> None:
    items = [None, Item(b"a", properties=(("A", "1"), ("B", "2"))), Item(b"", True, 500, "broken", (("A", "3"),))]
    output = handler.BatchOutput(items)
    assert (output.code, output.message) == (200, "OK")
    properties, contents = answered(output)
    assert properties == {"batch_1_A": "1", "batch_1_B": "2", "batch_2_A": "3"}
    assert contents == [
        {"data": "", "last": "false"},
        {"data": "a", "last": "false"},
        {"code": "500", "error": "broken", "data": "", "last": "true"},
    ]


@pytest.mark.parametrize(
    ("script", "code"), [("no such engine", 500), ("CUDA error: out of memory", 507)], ids=["failed", "no memory"]
)
def test_a_model_that_does_not_load_has_a_status(
    handler: Any, tmp_path: Path, hosts: Hosts, script: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.failures = [ExecutorStartError(script)]
    output: Output = handler.handle(loading(scripted_model(tmp_path / "model")))
    assert (output.code, output.message) == (code, script)
    assert script in caplog.text
    # DJL may ask again.
    assert handler.handle(loading(tmp_path / "model")) is None


def test_adapters_are_changed(handler: Any, model: Path, hosts: Hosts) -> None:
    hosts.features |= {Feature.ADAPTERS}
    handler.handle(loading(model))

    def said(call: str) -> dict[str, str]:
        output: Output = getattr(handler, call)(Input(b"", name="dutch"))
        return Reader(output.contents["data"]).pairs()

    assert said("unregister_adapter") == {"data": "Adapter dutch unregistered", "last": "true"}
    assert said("register_adapter") == {"data": "Adapter dutch registered", "last": "true"}
    assert "cannot be changed" in said("update_adapter")["error"]


def test_requests_go_on_while_an_adapter_is_read(
    handler: Any, model: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register(*given: object) -> Item:
        # What is on the model's loop runs, while this reads.
        ran = threading.Event()
        handler._worker.loop.call_soon_threadsafe(ran.set)
        return Item(b"" if ran.wait(10) else b"the loop stands still", True)

    monkeypatch.setattr("djl_trtllm.djl.worker.register", register)
    handler.handle(loading(model))
    output: Output = handler.register_adapter(Input(b"", name="dutch"))
    assert Reader(output.contents["data"]).pairs()["data"] == ""


# -- both modes --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[NAME, "djl_trtllm.async_handler"])
def entry(hosts: Hosts, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of each mode, imported anew."""
    install_djl_python(monkeypatch)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    yield importlib.import_module(request.param)
    sys.modules.pop(request.param, None)


def returned(answer: Any) -> Any:
    """What a call returns, at once or as a coroutine."""
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


def test_without_djl_it_says_where_it_runs(entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("djl_python", "djl_python.outputs", entry.__name__):
        monkeypatch.setitem(sys.modules, module, None)
    del sys.modules[entry.__name__]
    with pytest.raises(ImportError, match=rf"{entry.__name__} runs inside DJL Serving's .*djl-trtllm serve"):
        importlib.import_module(entry.__name__)


def test_another_mode_is_reported(entry: Any, model: Path, hosts: Hosts) -> None:
    rolling, mode = ("disable", "rolling batch") if entry.__name__ == NAME else ("enable", "async mode")
    output: Output = returned(entry.handle(loading(model, rolling_batch=rolling)))
    assert (output.code, hosts.made) == (500, [])
    assert f"is for DJL's {mode}" in output.message


def test_a_passive_process_of_mpi_does_nothing(
    entry: Any, model: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert returned(entry.handle(loading(model))) is None
    assert hosts.made == []


def test_a_model_is_loaded_before_anything_else_is_asked_of_it(entry: Any) -> None:
    with pytest.raises(AssertionError, match="DJL loads the model before"):
        returned(entry.register_adapter(Input(b"", name="dutch")))
