"""The application's life under any ASGI server; what the server process does with it is in test_app."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError, LayoutError
from djl_trtllm.model import Tokenizer
from djl_trtllm.server import application
from djl_trtllm.server.application import Application
from djl_trtllm.server.startup import Startup
from djl_trtllm.service import Model
from tests.server.application import body
from tests.support.asgi import Client, lifespan
from tests.support.in_process import Hosts, played_model
from tests.support.virtual_time import in_virtual_time, until


@pytest.fixture(autouse=True)
def _of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is for a process of the server's own is not done to that of the tests."""
    monkeypatch.setattr(application, "settle_garbage_collector", lambda: None)


def preparing(tokenizer: Tokenizer, name: str = "story", **options: Any) -> Startup:
    return Startup(name, f"/{name}", lambda: played_model(tokenizer, **options))


def failing() -> Startup:
    def prepare() -> Model:
        raise LayoutError("there is no model")

    return Startup("broken", "/broken", prepare)


async def started(app: Application) -> Message:
    """What the lifespan's start ends with."""
    received: asyncio.Queue[Message] = asyncio.Queue()
    sent: asyncio.Queue[Message] = asyncio.Queue()
    received.put_nowait({"type": "lifespan.startup"})
    life = asyncio.ensure_future(app({"type": "lifespan"}, received.get, sent.put))
    await asyncio.wait({life}, timeout=60)
    return sent.get_nowait()


@in_virtual_time
async def test_the_start_does_not_wait_for_models(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.load_seconds = 10
    app = Application(Options(), [preparing(tokenizer)])
    async with lifespan(app):
        assert (await Client(app).get("/ping")).status == 503
        await asyncio.sleep(11)
        assert (await Client(app).get("/ping")).status == 200


@in_virtual_time
async def test_the_start_waits_for_models_where_that_is_wanted(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.load_seconds = 10
    app = Application(Options(), [preparing(tokenizer)], wait_until_ready=True)
    async with lifespan(app):
        assert asyncio.get_running_loop().time() > 9
        assert (await Client(app).get("/ping")).status == 200


@in_virtual_time
async def test_a_start_that_waits_fails_with_the_model(hosts: Hosts, tokenizer: Tokenizer) -> None:
    message = await started(Application(Options(), [preparing(tokenizer), failing()], wait_until_ready=True))
    assert message["type"] == "lifespan.startup.failed"
    assert "there is no model" in message["message"]
    assert [host.closed for host in hosts.made] == [True]


@in_virtual_time
async def test_a_model_that_does_not_load_is_reported(hosts: Hosts) -> None:
    reported: list[bool] = []
    app = Application(Options(), [failing()], on_failed=lambda: reported.append(True))
    async with lifespan(app):
        await until(lambda: bool(reported))
        assert (await Client(app).get("/ping")).status == 500


@in_virtual_time
async def test_the_end_refuses_new_requests_and_lets_running_ones_end(hosts: Hosts, tokenizer: Tokenizer) -> None:
    app = Application(Options(shutdown_timeout=60), [preparing(tokenizer)], wait_until_ready=True)
    client = Client(app)
    async with lifespan(app):
        request = client.begin("POST", "/invocations", body(1))
        await until(lambda: bool(hosts.last.submitted))

        async def later() -> None:
            await asyncio.sleep(5)
            refused.append((await client.post("/invocations", body())).headers["connection"])
            hosts.last.step()

        refused: list[str] = []
        ending = asyncio.ensure_future(later())
    await ending
    assert refused == ["close"]
    assert (await request.end()).status == 200
    assert 5 <= asyncio.get_running_loop().time() < 20
    assert hosts.last.closed


@in_virtual_time
async def test_the_end_waits_for_shutdown_timeout_seconds(hosts: Hosts, tokenizer: Tokenizer) -> None:
    app = Application(Options(shutdown_timeout=7), [preparing(tokenizer)], wait_until_ready=True)
    async with lifespan(app):
        request = Client(app).begin("POST", "/invocations", body(100))
        await until(lambda: bool(hosts.last.submitted))
        before = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - before == pytest.approx(7, abs=1)
    assert (await request.end()).status == 503


@in_virtual_time
async def test_draining_again_waits_for_the_same_end(hosts: Hosts, tokenizer: Tokenizer) -> None:
    hosts.load_seconds = 60
    app = Application(Options(), [preparing(tokenizer)])
    async with lifespan(app):
        await until(lambda: bool(hosts.made))
        await asyncio.gather(app.drain(), app.drain())
        assert hosts.last.closed
    assert asyncio.get_running_loop().time() < 30


def test_wrong_options_of_access_are_an_error_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="management_port"):
        Application(Options(port=8080, management_port=8080), [])


# -- how late the event loop is ----------------------------------------------------------------------------------------


@in_virtual_time
async def test_stalls_of_the_event_loop_are_counted() -> None:
    app = Application(Options(), [])
    loop = asyncio.get_running_loop()

    async def metric(name: str) -> float:
        page = (await Client(app).get("/metrics")).body.decode()
        (line,) = [line for line in page.splitlines() if line.startswith(f"djl_trtllm_event_loop_stall_seconds_{name}")]
        return float(line.split()[-1])

    async with lifespan(app):
        await asyncio.sleep(1.01)
        assert await metric("count") == 50
        assert await metric("sum") < 1e-6
        loop.now += 0.5  # type: ignore[attr-defined]
        await asyncio.sleep(0.001)
        assert await metric("sum") == pytest.approx(0.49)
