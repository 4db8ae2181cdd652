from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError
from djl_trtllm.server.listeners import Listener, further_listeners, listen
from tests.support.server import free_port


@pytest.mark.parametrize(
    ("options", "ports"),
    [
        (Options(), {}),
        (Options(triton_http_port=8000, triton_metrics_port=8002), {8000: "http", 8002: "metrics"}),
        (Options(triton_http_port=8000, triton_metrics_port=8002, port=8000), {8002: "metrics"}),
        (Options(triton_http_port=8000, triton_metrics_port=8000), {8000: "http"}),
        (Options(triton_metrics_port=8002), {8002: "metrics"}),
    ],
)
def test_a_port_is_listened_on_once(options: Options, ports: dict[int, str]) -> None:
    expected = [Listener(options.host, port, f"triton_{name}_port") for port, name in ports.items()]
    assert further_listeners(options) == expected


def test_the_management_api_has_its_own_host() -> None:
    options = Options(management_port=8081, triton_http_port=8000)
    assert further_listeners(options) == [
        Listener("0.0.0.0", 8000, "triton_http_port"),
        Listener("127.0.0.1", 8081, "management_port"),
    ]


def test_both_ports_answer() -> None:
    asyncio.run(both_ports_answer())


async def both_ports_answer() -> None:
    reached = asyncio.Event()

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            reached.set()

    options = Options(host="127.0.0.1", port=free_port(), triton_http_port=free_port(), triton_metrics_port=free_port())
    servers = await listen(options, Answering, 10)
    assert len(servers) == 3
    for port in (options.port, options.triton_http_port, options.triton_metrics_port):
        reached.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait_for(reached.wait(), 30)
        writer.close()
    for server in servers:
        server.close()


def test_a_port_in_use_is_an_error_that_names_the_option_and_leaves_none_open() -> None:
    async def refused(options: Options) -> None:
        opened: list[asyncio.base_events.Server] = []
        loop = asyncio.get_running_loop()
        create = loop.create_server

        async def keep(*arguments: Any, **options: Any) -> Any:
            opened.append(await create(*arguments, **options))
            return opened[-1]

        loop.create_server = keep  # type: ignore[method-assign]
        try:
            await listen(options, asyncio.Protocol, 10)
        finally:
            assert not any(server.is_serving() for server in opened)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port, own = taken.getsockname()[1], free_port()
        with pytest.raises(ConfigError, match=rf"inference_port={port}: .*SERVING_INFERENCE_PORT to another one$"):
            asyncio.run(refused(Options(host="127.0.0.1", port=port)))
        message = rf"triton_metrics_port={port}: .*SERVING_TRITON_METRICS_PORT to another one or to 0 for none$"
        for further in (0, free_port()):
            with pytest.raises(ConfigError, match=message):
                options = Options(host="127.0.0.1", port=own, triton_http_port=further, triton_metrics_port=port)
                asyncio.run(refused(options))


def test_as_many_connections_may_wait_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []

    class Counted(socket.socket):
        def listen(self, most: int = 0, /) -> None:
            waiting.append(most)
            super().listen(most)

    monkeypatch.setattr(socket, "socket", Counted)

    async def run() -> None:
        for server in await listen(Options(host="127.0.0.1", port=free_port()), asyncio.Protocol, 17):
            server.close()

    asyncio.run(run())
    assert waiting == [17]
