from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from djl_trtllm.config import Options
from djl_trtllm.errors import ConfigError
from djl_trtllm.server.metrics import ServerCounts
from djl_trtllm.server.triton_ports import further_ports, listen, listen_grpc, ready_table
from djl_trtllm.service import Registry
from tests.support.server import free_port

TABLE = """\
+------------------+---------+--------+
| Model            | Version | Status |
+------------------+---------+--------+
| ensemble         | 1       | READY  |
| postprocessing   | 1       | READY  |
| preprocessing    | 1       | READY  |
| tensorrt_llm     | 1       | READY  |
| tensorrt_llm_bls | 1       | READY  |
+------------------+---------+--------+"""


def write(directory: Path, *models: str) -> None:
    for model in models:
        (directory / model).mkdir(parents=True)
        (directory / model / "config.pbtxt").write_text("")


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
    assert further_ports(options) == {port: f"triton_{name}_port" for port, name in ports.items()}


def test_both_ports_answer() -> None:
    asyncio.run(both_ports_answer())


async def both_ports_answer() -> None:
    reached = asyncio.Event()

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            reached.set()

    options = Options(host="127.0.0.1", triton_http_port=free_port(), triton_metrics_port=free_port())
    servers = await listen(options, Answering, 10)
    for port in (options.triton_http_port, options.triton_metrics_port):
        reached.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait_for(reached.wait(), 30)
        writer.close()
    for server in servers:
        server.close()


def test_a_port_in_use_is_an_error_that_names_the_option_and_leaves_none_open() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port, free = taken.getsockname()[1], free_port()
        options = Options(host="127.0.0.1", triton_http_port=free, triton_metrics_port=port)
        with pytest.raises(ConfigError, match=rf"triton_metrics_port={port}: .*SERVING_TRITON_METRICS_PORT"):
            asyncio.run(listen(options.model_copy(update={"triton_http_port": 0}), asyncio.Protocol, 10))
        with pytest.raises(ConfigError):
            asyncio.run(listen(options, asyncio.Protocol, 10))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free))


def test_the_port_of_grpc_answers() -> None:
    asyncio.run(the_port_of_grpc_answers())


async def the_port_of_grpc_answers() -> None:
    options = Options(host="127.0.0.1", triton_grpc_port=free_port())
    server = await listen_grpc(Registry(), options, ServerCounts())
    assert server is not None and server.bound_port == options.triton_grpc_port
    await server.close()
    assert await listen_grpc(Registry(), Options(), ServerCounts()) is None


def test_without_grpcio_there_is_http_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert asyncio.run(listen_grpc(Registry(), Options(triton_grpc_port=8001), ServerCounts())) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "triton_grpc_port=8001 is not served: grpcio is not installed" in record.message
    assert "pip install 'djl-trtllm[grpc]'" in record.message


def test_the_table_is_tritons(tmp_path: Path) -> None:
    write(tmp_path, "tensorrt_llm_bls", "ensemble", "tensorrt_llm", "preprocessing", "postprocessing")
    assert ready_table(tmp_path) == TABLE


def test_other_directories_have_no_table(tmp_path: Path) -> None:
    assert ready_table(tmp_path) == ""
    write(tmp_path, "tensorrt_llm")
    assert ready_table(tmp_path) == ""
