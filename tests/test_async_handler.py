"""DJL Serving's entry point in async mode."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.djl.worker import Item
from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.executor.protocol import Feature
from tests.server.application import body
from tests.support.djl import Input, Output, Reader, Socket, answer_of, install_djl_python
from tests.support.in_process import Hosts
from tests.support.models import scripted_model
from tests.support.virtual_time import until

NAME = "djl_trtllm.async_handler"


@pytest.fixture
def handler(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported anew."""
    install_djl_python(monkeypatch)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    monkeypatch.setattr(module, "settle_garbage_collector", lambda: None)
    yield module
    sys.modules.pop(NAME, None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = scripted_model(tmp_path / "model", None, **{"retry_threshold": 0})
    (path / "adapters" / "dutch").mkdir(parents=True)
    (path / "adapters" / "dutch" / "adapter_config.json").write_text("{}")
    return path


def loading(model: Path, **properties: str) -> Input:
    """DJL's first call."""
    return Input(None, model_dir=str(model), rolling_batch="disable", async_mode="true", **properties)


@asynccontextmanager
async def worker(handler: Any, model: Path) -> AsyncIterator[Any]:
    """The worker with its model loaded; its metrics and its model end with the block."""
    assert await handler.handle(loading(model)) is None
    yield handler._worker
    await handler._worker.service.close()
    for timer in asyncio.get_running_loop().timers():  # type: ignore[attr-defined]
        if "_print_metrics" in repr(timer):
            timer.cancel()


class Asked:
    """A request, and the sender thread of djl_python for it."""

    def __init__(self, number: str) -> None:
        self.number = number
        self.connection = Socket()
        self.task: asyncio.Task[None]

    @classmethod
    async def begin(cls, handler: Any, content: bytes | None, number: str = "r1", **headers: str) -> Asked:
        asked = cls(number)
        properties = {"Content-Type": "application/json", **headers, "request_tracking_id": number}
        answers = await handler.handle(Input(content if content is not None else b"", **properties))

        async def send() -> None:
            async for streams in answers:
                streams.add_property("request_tracking_id", number)
                streams.send(asked.connection)

        asked.task = asyncio.ensure_future(send())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return asked

    async def end(self) -> dict[str, Any]:
        """What DJL makes of it."""
        await asyncio.wait_for(self.task, 60)
        frames = [frame for frame in self.connection.frames if frame.properties["request_tracking_id"] == self.number]
        return answer_of([frame.contents[0] for frame in frames])


def plain(tokens: int) -> bytes:
    return body(tokens, stream=True, output_formatter="none")


# -- the model ---------------------------------------------------------------------------------------------------------


async def test_the_first_call_loads_the_model(handler: Any, model: Path, hosts: Hosts) -> None:
    settled: list[int] = []
    handler.settle_garbage_collector = lambda: settled.append(len(hosts.made))
    async with worker(handler, model):
        assert await handler.handle(loading(model)) is None
        assert settled == [1]


@pytest.mark.parametrize(("reason", "code"), [("no such engine", 500), ("CUDA error: out of memory", 507)])
async def test_a_model_that_does_not_load_has_a_status_and_ends_the_process(
    handler: Any, model: Path, hosts: Hosts, reason: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    hosts.failures = [ExecutorStartError(reason)]
    output: Output = await handler.handle(loading(model))
    assert (output.code, output.message, handler._worker) == (code, reason, None)
    await asyncio.sleep(2)
    assert ended == [1]


async def test_a_model_that_has_failed_ends_the_process_once_its_clients_have_their_answers(
    handler: Any, model: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    async with worker(handler, model):
        asked = await Asked.begin(handler, plain(9))
        hosts.last.die()
        assert (await asked.end())["error"] is not None
        await asyncio.sleep(0.9)
        assert ended == []
        await asyncio.sleep(0.2)
        assert ended == [1]


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_an_answer_is_sent_as_it_comes(handler: Any, model: Path, hosts: Hosts) -> None:
    async with worker(handler, model) as loaded:
        asked = await Asked.begin(handler, plain(3))
        hosts.last.step(2)
        await asyncio.sleep(0.01)
        first = asked.connection.frames
        assert first[0].properties == {"request_tracking_id": "r1", "Content-Type": "text/plain"}
        hosts.last.step()
        answer = await asked.end()
        assert answer == {
            "text": loaded.service.model.tokenizer.decode(hosts.last.submitted[0].prompt_ids[:3]),
            "error": None,
        }
        assert len(asked.connection.frames) > len(first)


async def test_answers_travel_with_each_other(handler: Any, model: Path, hosts: Hosts) -> None:
    async with worker(handler, model):
        asked = [await Asked.begin(handler, plain(2), f"r{number}") for number in range(3)]
        hosts.last.step(2)
        await asyncio.sleep(0.01)
        assert all(each.task.done() for each in asked)
        frames = [frame for each in asked for frame in each.connection.frames]
        # Each with its end, which DJL takes in a frame of its own.
        assert [frame.properties["request_tracking_id"] for frame in frames] == ["r0", "r0", "r1", "r1", "r2", "r2"]
        assert sum(len(each.connection.writes) for each in asked) == 1


async def test_a_body_is_read_by_its_own_headers(handler: Any, model: Path, hosts: Hosts) -> None:
    hosts.alone = True
    async with worker(handler, model):
        asked = await Asked.begin(handler, b"a wolf", **{"Content-Type": "text/plain"})
        assert (await asked.end())["error"] is None
        for content in (b"a wolf", None):
            refused = await Asked.begin(handler, content)
            assert "Invalid request payload" in (await refused.end())["error"]


async def test_statuses_are_those_of_the_options(handler: Any, tmp_path: Path, hosts: Hosts) -> None:
    options = {"option.max_rolling_batch_size": 1, "job_queue_size": 1, "throttle_error_http_code": 529}
    async with worker(handler, scripted_model(tmp_path / "small", None, **options)):
        *running, refused = [await Asked.begin(handler, plain(9), f"r{number}") for number in range(3)]
        await refused.end()
        assert refused.connection.frames[0].contents[0]["code"] == "529"
        for asked in running:
            asked.task.cancel()


async def test_a_request_that_djl_gives_up_is_cancelled(handler: Any, model: Path, hosts: Hosts) -> None:
    async with worker(handler, model):
        asked = await Asked.begin(handler, plain(9))
        await until(lambda: bool(hosts.last.submitted))
        asked.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked.task
        await until(lambda: hosts.last.cancelled == [0])


# -- adapters, metrics -------------------------------------------------------------------------------------------------


async def test_adapters_are_changed(handler: Any, model: Path, hosts: Hosts) -> None:
    hosts.features |= {Feature.ADAPTERS}

    async def said(call: str) -> dict[str, str]:
        output: Output = await getattr(handler, call)(Input(b"", name="dutch"))
        return Reader(output.contents["data"]).pairs()

    async with worker(handler, model):
        assert await said("unregister_adapter") == {"data": "Adapter dutch unregistered", "last": "true"}
        assert await said("register_adapter") == {"data": "Adapter dutch registered", "last": "true"}
        assert "cannot be changed" in (await said("update_adapter"))["error"]


async def test_an_adapter_is_read_beside_the_event_loop(
    handler: Any, model: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def register(*given: object) -> Item:
        threads.append(threading.current_thread())
        return Item(b"", True)

    monkeypatch.setattr("djl_trtllm.djl.worker.register", register)
    async with worker(handler, model):
        await handler.register_adapter(Input(b"", name="dutch"))
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


async def test_metrics_are_printed_once_a_minute(
    handler: Any, model: Path, hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    async with worker(handler, model):
        asked = await Asked.begin(handler, plain(9))
        printed = []
        for seconds in (59, 2, 60):
            await asyncio.sleep(seconds)
            printed.append(capsys.readouterr().out.count("[METRICS]Running.Count:1|#Model:scripted"))
        assert printed == [0, 1, 1]
        asked.task.cancel()
