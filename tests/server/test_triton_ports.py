from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from djl_trtllm.config import Options
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.triton_ports import listen_grpc, ready_table
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


def test_the_port_of_grpc_answers() -> None:
    asyncio.run(the_port_of_grpc_answers())


async def the_port_of_grpc_answers() -> None:
    options = Options(host="127.0.0.1", triton_grpc_port=free_port())
    server = await listen_grpc(ServerContext(options))
    assert server is not None and server.bound_port == options.triton_grpc_port
    await server.close()
    assert await listen_grpc(ServerContext(Options())) is None


def test_without_grpcio_there_is_http_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert asyncio.run(listen_grpc(ServerContext(Options(triton_grpc_port=8001)))) is None
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
