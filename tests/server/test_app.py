"""The server from its start to its end; what it does with sockets is in tests/integration/server."""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import signal
import socket
import ssl
import threading
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp

from djl_trtllm.api.dialects.lmi.dialect import Lmi
from djl_trtllm.config import Options, load
from djl_trtllm.config.options.choices import LogLevel
from djl_trtllm.errors import ConfigError, LayoutError
from djl_trtllm.model import Tokenizer
from djl_trtllm.server.app import Listener, Server, address, banner, bind, further_listeners, run
from djl_trtllm.server.application import Startup
from djl_trtllm.service.lifecycle import State
from djl_trtllm.service.model import Model
from djl_trtllm.version import __version__
from tests.server.application import body
from tests.support.asgi import Client, lifespan
from tests.support.in_process import Hosts, played_model
from tests.support.models import scripted_model
from tests.support.server import Certificates, free_port
from tests.support.tables import by_table
from tests.support.virtual_time import in_real_time, until


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the garbage collector was settled, which is for a process of its own."""
    times: list[int] = []
    monkeypatch.setattr("djl_trtllm.service.engine.settle_garbage_collector", lambda: times.append(1))
    return times


class Running:
    """A server's application, and what its options say."""

    def __init__(self, startup: list[Startup], store: Path | None = None, **options: Any) -> None:
        self.server = Server(Options(**options), startup, store)
        self.app = cast(ASGIApp, self.server.config.app)
        self.client = Client(self.app)

    async def ping(self) -> tuple[int, dict[str, str]]:
        answer = await self.client.get("/ping")
        return answer.status, {name: model["status"] for name, model in answer.json.items()}

    def is_ready(self, hosts: Hosts, made: int) -> bool:
        """Whether the model `story` is ready, with the engine process that was made as the `made`-th."""
        return len(hosts.made) == made and self.server.application.registry.models["story"].state is State.READY

    def signal(self, number: signal.Signals) -> None:
        self.server.handle_exit(number, None)


def preparing(tokenizer: Tokenizer, name: str = "story", **options: Any) -> Startup:
    return Startup(name, f"/{name}", lambda: played_model(tokenizer, **options))


def failing(error: Exception) -> Startup:
    def prepare() -> Model:
        raise error

    return Startup("broken", "/broken", prepare)


# -- loading -----------------------------------------------------------------------------------------------------------


async def test_models_are_loaded_one_after_the_other(hosts: Hosts, tokenizer: Tokenizer, settled: list[int]) -> None:
    hosts.load_seconds = 10
    running = Running([preparing(tokenizer, "red"), preparing(tokenizer, "blue")])
    async with lifespan(running.app):
        await asyncio.sleep(5)
        assert await running.ping() == (503, {"red": "PENDING", "blue": "PENDING"})
        assert len(hosts.made) == 1
        await asyncio.sleep(10)
        assert await running.ping() == (503, {"red": "Healthy", "blue": "PENDING"})
        assert settled == []
        await asyncio.sleep(10)
        assert await running.ping() == (200, {"red": "Healthy", "blue": "Healthy"})
        assert settled == [1]
        assert (running.server.should_exit, running.server.exit_status) == (False, 0)
    assert all(host.closed for host in hosts.made)


@pytest.mark.parametrize("error", [LayoutError("no model"), KeyError("tokenizer")], ids=["told", "a defect"])
async def test_a_server_whose_model_does_not_load_ends_with_1(
    hosts: Hosts, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    running = Running([failing(error)])
    async with lifespan(running.app):
        await until(lambda: running.server.should_exit)
        assert running.server.exit_status == 1
        assert await running.ping() == (500, {"broken": "FAILED"})
    assert ("Traceback" in caplog.text) == isinstance(error, KeyError)


@pytest.mark.parametrize("fail_fast", [True, False])
async def test_a_server_whose_model_fails_later_ends_with_1_only_if_it_is_to_fail_fast(
    hosts: Hosts, tokenizer: Tokenizer, fail_fast: bool
) -> None:
    running = Running([preparing(tokenizer, retry_threshold=0)], fail_fast=fail_fast)
    async with lifespan(running.app):
        await until(lambda: bool(hosts.made))
        await asyncio.sleep(1)
        hosts.last.die()
        await asyncio.sleep(1)
        assert await running.ping() == (500, {"story": "FAILED"})
        assert (running.server.should_exit, running.server.exit_status) == (fail_fast, int(fail_fast))


async def test_a_model_that_fails_for_a_while_says_when_it_is_started_again(hosts: Hosts, tokenizer: Tokenizer) -> None:
    running = Running([preparing(tokenizer, retry_threshold=1)])
    async with lifespan(running.app):
        for made in (1, 2):
            await until(partial(running.is_ready, hosts, made))
            hosts.last.die()
        answer = await running.client.get("/ping")
        assert (answer.status, answer.json["story"]["status"]) == (503, "Unhealthy")
        assert "in 30 seconds" in answer.json["story"]["message"]
        await until(partial(running.is_ready, hosts, 3))
        assert 30 <= asyncio.get_running_loop().time() < 40
        assert (await running.client.get("/ping")).json == {"story": {"status": "Healthy"}}


async def test_models_may_be_registered_from_the_store(hosts: Hosts, tmp_path: Path) -> None:
    scripted_model(tmp_path / "red")
    running = Running([], tmp_path)
    async with lifespan(running.app):
        answer = await running.client.post("/models", query="url=red")
        assert (answer.status, len(hosts.made)) == (200, 1)
        hosts.load_seconds = 60
        await running.client.post("/models", query="url=red&model_name=other&synchronous=false")
        await until(lambda: len(hosts.made) == 2)
    # Nothing goes on when the server has ended, and nothing was waited for.
    assert [host.closed for host in hosts.made] == [True, True]
    assert asyncio.get_running_loop().time() < 30


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_refuses_new_requests_and_lets_running_ones_end(
    hosts: Hosts, tokenizer: Tokenizer, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    running = Running([preparing(tokenizer)])
    async with lifespan(running.app):
        await until(lambda: bool(hosts.made))
        await asyncio.sleep(1)
        request = running.client.begin("POST", "/invocations", body(1))
        await until(lambda: bool(hosts.last.submitted))
        running.signal(number)
        await asyncio.sleep(1)
        assert await running.ping() == (503, {"story": "Unhealthy"})
        assert (await running.client.post("/invocations", body())).headers["connection"] == "close"
        ended = [running.server.should_exit]
        hosts.last.step()
        assert (await request.end()).status == 200
        await asyncio.sleep(0.1)
        assert [*ended, running.server.should_exit] == [False, True]
        assert (running.server.force_exit, running.server.exit_status, hosts.last.closed) == (False, 0, True)
    assert f"{number.name}: refusing new requests" in caplog.text


async def test_a_signal_refuses_new_requests_before_anything_else_has_ended(
    hosts: Hosts, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    scripted_model(tmp_path / "red")
    running = Running([preparing(tokenizer)], tmp_path)
    async with lifespan(running.app):
        await until(lambda: bool(hosts.made))
        await asyncio.sleep(1)
        hosts.load_seconds = 60
        await running.client.post("/models", query="url=red&synchronous=false")
        await until(lambda: len(hosts.made) == 2)
        running.signal(signal.SIGTERM)
        await asyncio.sleep(0)
        assert not hosts.last.closed
        assert (await running.client.post("/predictions/story", body())).headers["connection"] == "close"


async def test_running_requests_have_shutdown_timeout_seconds(hosts: Hosts, tokenizer: Tokenizer) -> None:
    running = Running([preparing(tokenizer)], shutdown_timeout=7)
    async with lifespan(running.app):
        await until(lambda: bool(hosts.made))
        await asyncio.sleep(1)
        request = running.client.begin("POST", "/invocations", body(100))
        await until(lambda: bool(hosts.last.submitted))
        running.signal(signal.SIGTERM)
        await asyncio.sleep(6.9)
        ended = [running.server.should_exit]
        await asyncio.sleep(0.2)
        ended.append(running.server.should_exit)
        assert ended == [False, True]
        assert (await request.end()).status == 503


async def test_a_second_sigterm_changes_nothing_and_a_second_sigint_is_immediate(
    hosts: Hosts, tokenizer: Tokenizer
) -> None:
    running = Running([preparing(tokenizer)])
    async with lifespan(running.app):
        await until(lambda: bool(hosts.made))
        await asyncio.sleep(1)
        request = running.client.begin("POST", "/invocations", body(100))
        await until(lambda: bool(hosts.last.submitted))
        seen = []
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            running.signal(number)
            await asyncio.sleep(1)
            seen.append((running.server.should_exit, running.server.force_exit))
        assert seen == [(False, False)] * 4 + [(True, True)]
        request.leave()
        await request.end()
    await asyncio.sleep(1)


async def test_a_signal_ends_what_still_loads(hosts: Hosts, tokenizer: Tokenizer, tmp_path: Path) -> None:
    scripted_model(tmp_path / "red")
    hosts.load_seconds = 60
    running = Running([preparing(tokenizer), preparing(tokenizer, "later")], tmp_path)
    async with lifespan(running.app):
        await running.client.post("/models", query="url=red&synchronous=false")
        await until(lambda: len(hosts.made) == 2)
        running.signal(signal.SIGTERM)
        await asyncio.sleep(1)
        assert running.server.should_exit
        assert [host.closed for host in hosts.made] == [True, True]
        await asyncio.sleep(100)
        assert len(hosts.made) == 2


async def test_a_signal_before_there_is_a_loop_is_uvicorns() -> None:
    server = Server(Options(), [], None)
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit


# -- what the options say ----------------------------------------------------------------------------------------------


async def test_requests_and_answers_are_as_the_options_say(hosts: Hosts, tokenizer: Tokenizer) -> None:
    running = Running(
        [preparing(tokenizer, max_rolling_batch_size=1, job_queue_size=1, predict_timeout=1e-9)],
        max_request_size=300,
        request_id_header_key="x-trace",
        wlm_error_http_code=531,
        throttle_error_http_code=529,
        timeout_http_code=418,
        server_error_http_code=555,
        stream_write_timeout=3,
    )
    async with lifespan(running.app):
        loading = await running.client.post("/invocations", body(), {"x-trace": "story-1"})
        assert (loading.status, loading.headers["x-trace"]) == (531, "story-1")
        assert (await running.client.post("/invocations", b" " * 301)).status == 413
        await until(lambda: bool(hosts.made))
        await asyncio.sleep(1)
        waiting = [running.client.begin("POST", "/invocations", body()) for _ in range(2)]
        await until(lambda: bool(hosts.last.submitted))
        await asyncio.sleep(0)
        assert (await running.client.post("/invocations", body())).status == 529
        for request in waiting:
            assert (await request.end()).status == 418
        hosts.last.step()
        stalled = running.client.begin("POST", "/invocations", body(stream=True))
        stalled.stop_reading()
        await until(lambda: len(hosts.last.submitted) == 2)
        hosts.last.step()
        await asyncio.sleep(2.9)
        aborted = [stalled.aborted]
        await asyncio.sleep(0.2)
        assert [*aborted, stalled.aborted] == [False, True]
        await stalled.end()


async def test_a_defect_has_the_status_that_the_options_say(
    hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("secret")

    running = Running([preparing(tokenizer)], server_error_http_code=555)
    async with lifespan(running.app):
        await until(lambda: bool(hosts.made))
        await asyncio.sleep(1)
        monkeypatch.setattr(Lmi, "parse", broken)
        assert (await running.client.post("/invocations", body())).status == 555


def test_uvicorn_listens_where_the_options_say_and_adds_nothing_of_its_own() -> None:
    config = Server(Options(host="127.0.0.9", port=7), [], None).config
    assert (config.host, config.port, config.lifespan) == ("127.0.0.9", 7, "on")
    assert (config.ws_max_size, config.ws_per_message_deflate) == (Options().max_request_size, False)
    assert (config.log_config, config.access_log, config.server_header) == (None, False, False)
    assert (config.timeout_graceful_shutdown, config.log_level) == (2, logging.WARNING)
    assert Server(Options(log_level=LogLevel.DEBUG), [], None).config.log_level is None


@pytest.mark.parametrize("status", [0, 1])
def test_the_process_ends_with_the_servers_status(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    ran: list[Server] = []

    def play(server: Server) -> None:
        ran.append(server)
        server.exit_status = status or server.exit_status

    monkeypatch.setattr(uvicorn.Server, "run", play)
    assert run(Options(), []) == status
    assert len(ran) == 1


@by_table("terminal", "options", "names", apart=True)
async def test_a_person_at_a_terminal_sees_where_the_server_is_when_it_is_ready(
    hosts: Hosts,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    options: dict[str, Any],
    names: str | None,
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    environ = {f"SERVING_{name.upper()}": str(value) for name, value in options.items()}
    server = Server(load(None, environ).options, [preparing(tokenizer)], None)
    async with lifespan(server.application):
        await until(lambda: server.application.registry.models["story"].state is State.READY)
        await asyncio.sleep(1)
        for thread in threading.enumerate():
            if thread.name == "banner":
                thread.join(60)
    shown = capsys.readouterr().err
    assert names is None or names in shown
    assert ("curl -N" in shown) is (names is not None)
    assert (f"localhost:{options.get('inference_port', 8080)}/docs" in shown) is (names is not None)
    link = "" if "api_key" in options else f"#{server.application.monitor.key}"
    assert (f"/monitor{link}\n" in shown) is (names is not None and "monitor" not in options)
    assert "secret" not in shown


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


@in_real_time
async def test_both_ports_answer() -> None:
    reached = asyncio.Event()

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            reached.set()

    options = Options(host="127.0.0.1", port=free_port(), triton_http_port=free_port(), triton_metrics_port=free_port())
    servers = await bind(options, Answering, 10)
    assert len(servers) == 3
    for server in servers:
        await server.start_serving()
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
            await bind(options, asyncio.Protocol, 10)
        finally:
            assert not any(server.sockets for server in opened)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port, own = taken.getsockname()[1], free_port()
        with pytest.raises(ConfigError, match=rf"inference_port={port}: .*_PORT or --port to another one$"):
            asyncio.run(refused(Options(host="127.0.0.1", port=port)))
        message = rf"triton_metrics_port={port}: .*SERVING_TRITON_METRICS_PORT to another one or to 0 for none$"
        for further in (0, free_port()):
            with pytest.raises(ConfigError, match=message):
                options = Options(host="127.0.0.1", port=own, triton_http_port=further, triton_metrics_port=port)
                asyncio.run(refused(options))


@pytest.mark.parametrize("tls", [False, True])
@in_real_time
async def test_a_server_answers_on_all_its_ports_from_its_start_to_its_end(
    hosts: Hosts, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture, tls: bool
) -> None:
    caplog.set_level("INFO", "djl_trtllm.server.app")
    files, scheme = Certificates(tmp_path) if tls else None, "https" if tls else "http"
    given = {} if files is None else {"certificate_file": files.certificate, "private_key_file": files.key}
    http, rpc = free_port(), free_port()
    options = Options(host="127.0.0.1", port=0, triton_http_port=http, triton_grpc_port=rpc, **given)
    server, before = Server(options, [preparing(tokenizer)], None), asyncio.all_tasks()
    serving = asyncio.ensure_future(server.serve())
    await until(lambda: len(re.findall("listening on", caplog.text)) == 3)
    assert f"127.0.0.1:{rpc} for gRPC" in caplog.text
    own, other = (int(port) for port in re.findall(rf"listening on {scheme}://127\.0\.0\.1:(\d+)", caplog.text))
    assert other == http
    trust = ssl.create_default_context(cafile=files.authority) if files else True
    async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
        for port in (own, http):
            assert (await client.get(f"{scheme}://127.0.0.1:{port}/v2/health/live")).status_code == 200
    credentials = grpc.ssl_channel_credentials(files.authority.read_bytes()) if files else None
    made = partial(grpc.aio.secure_channel, credentials=credentials) if files else grpc.aio.insecure_channel
    async with made(f"127.0.0.1:{rpc}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
    server.handle_exit(signal.SIGTERM, None)
    await asyncio.wait_for(serving, 60)
    for port in (own, http, rpc):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
    await until(lambda: asyncio.all_tasks() == before)
    assert (server.exit_status, [host.closed for host in hosts.made]) == (0, [True])


@in_real_time
async def test_a_server_whose_port_is_in_use_ends_with_1_before_a_model_is_prepared(
    hosts: Hosts, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(Options(host="127.0.0.1", port=port), [preparing(tokenizer)], None)
        await asyncio.wait_for(server.serve(), 60)
    assert (server.exit_status, server.started, hosts.made) == (1, False, [])
    assert f"inference_port={port}: cannot listen on 127.0.0.1:{port}" in caplog.text


URL = "http://localhost:8080"


def test_it_has_the_address_the_pages_and_a_request_that_a_shell_takes() -> None:
    lines = banner(URL, ["story"], [("page", "/monitor")], key=False).splitlines()
    assert lines[0] == f"djl-trtllm {__version__} serves story"
    assert [line.split() for line in lines[1:3]] == [["address", URL], ["page", f"{URL}/monitor"]]
    name, *words = shlex.split(lines[3])
    assert (name, words[:3]) == ("try", ["curl", "-N", f"{URL}/invocations"])
    assert words[-1].startswith('{"inputs": ')


def test_of_several_models_the_request_names_one_and_with_keys_it_has_one() -> None:
    last = banner(URL, ["a b", "c"], [], key=True).splitlines()[-1]
    assert f"'{URL}/predictions/a b'" in last
    assert '-H "Authorization: Bearer $KEY"' in last


def test_a_name_cannot_control_the_terminal() -> None:
    assert "\x1b" not in banner(URL, ["\x1b[2J"], [], key=False)


@by_table("host", "url")
def test_the_address_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    assert address("http", host, 80) == url
