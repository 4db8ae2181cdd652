"""The log and the traces of a real server: each request, whatever became of it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from djl_trtllm.api.dialects.triton import rpc
from tests.project.test_dashboards import FOLDER, board, queries
from tests.support.client import JSON, lmi, opened
from tests.support.models import scripted_model
from tests.support.processes import wait_until
from tests.support.server import Server, free_port, serving
from tests.telemetry.requests import TRACEPARENT

pytestmark = pytest.mark.slow

SECRET = "a-prompt-that-nobody-reads"
FAILS, DIES = 66, 77
"""Tokens of requests at which the engine fails and dies."""
FORGED = "x%0A2026-11-22%2020:00:00,000%20INFO%20root:%20forged"


class Collector:
    """Receives traces and metrics by OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        """The last of each name."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/metrics":
                    for measured in ExportMetricsServiceRequest.FromString(data).resource_metrics:
                        metrics = [metric for scope in measured.scope_metrics for metric in scope.metrics]
                        collector.metrics |= {metric.name: metric for metric in metrics}
                else:
                    assert self.path == "/v1/traces"
                    for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                        collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def roots(self, identifier: str) -> list[Any]:
        """The spans of requests with this id, without their phases."""
        return [span for span in self.spans if attributes(span).get("gen_ai.request.id") == identifier]

    def of_request(self, identifier: str) -> dict[str, Any]:
        """The spans of a request, by name."""
        return {
            span.name: span
            for root in self.roots(identifier)
            for span in self.spans
            if span is root or span.parent_span_id == root.span_id
        }


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@contextmanager
def log_server(folder: Path, collector: Collector) -> Iterator[Server]:
    """A server with the log as JSON, traces, and OpenTelemetry's metrics."""
    environ = {
        "SERVING_LOG_FORMAT": "json",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_METRIC_EXPORT_INTERVAL": "200",
        "SERVING_API_KEY": "key-of-the-server",
        "SERVING_TRITON_GRPC_PORT": str(free_port()),
    }
    faults = [
        {"action": "error", "at_token": 3, "max_new_tokens": FAILS},
        {"action": "die", "at_token": 3, "max_new_tokens": DIES},
    ]
    script = {"steps_per_second": 500, "faults": faults}
    model = scripted_model(folder / "model", script, max_request_size=100_000)
    with Server(model, environ) as server:
        server.http.headers["Authorization"] = "Bearer key-of-the-server"
        server.wait_for_ping()
        server.grpc_port = int(environ["SERVING_TRITON_GRPC_PORT"])  # type: ignore[attr-defined]
        yield server


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    with log_server(tmp_path_factory.mktemp("logged"), collector) as server:
        yield server


@pytest.fixture
def own(tmp_path: Path, collector: Collector) -> Iterator[Server]:
    """One by itself: its engine dies, and only ten refusals a second have a line."""
    with log_server(tmp_path, collector) as server:
        yield server


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log]


def line_of(server: Server, identifier: str) -> dict[str, Any]:
    """The one line of a request."""

    def found() -> list[dict[str, Any]]:
        return [line for line in lines(server) if line.get("request_id") == identifier and line["message"] == "request"]

    wait_until(lambda: bool(found()), what=f"the line of {identifier}")
    (line,) = found()
    return line


def post(server: Server, identifier: str, path: str = "/invocations", **changes: Any) -> httpx.Response:
    headers = {**JSON, "x-request-id": identifier, **changes.pop("headers", {})}
    return server.http.post(path, headers=headers, **{"json": lmi(SECRET, max_new_tokens=3), **changes})


ADDRESS = "address:" + hashlib.sha256(b"127.0.0.1").hexdigest()[:12]


def test_refusals_have_a_line_with_status_and_error(logged: Server) -> None:
    cases: dict[str, tuple[int, str, dict[str, Any]]] = {
        "no-key": (401, "AuthenticationError", {"headers": {"Authorization": ""}}),
        "method": (405, "MethodNotAllowedError", {"path": "/openapi.json"}),
        "nothing": (404, "UnknownPathError", {"path": f"/{FORGED}"}),
    }
    for identifier, (status, error, changes) in cases.items():
        assert post(logged, identifier, **changes).status_code == status
        line = line_of(logged, identifier)
        assert (line["status"], line["error"]) == (status, error), identifier
        assert line["client"] == ADDRESS  # no key was needed, or there was none


def message(identifier: str, model: str = "ensemble", tokens: int = 3, *, stream: bool = False) -> bytes:
    made = rpc.ModelInferRequest(model_name=model, id=identifier)
    made.inputs.add(name="text_input", datatype="BYTES", shape=(1, 1)).contents.bytes_contents.append(SECRET.encode())
    made.inputs.add(name="max_tokens", datatype="INT32", shape=(1, 1)).contents.int_contents.append(tokens)
    made.inputs.add(name="stream", datatype="BOOL", shape=(1, 1)).contents.bool_contents.append(stream)
    data: bytes = made.SerializeToString()
    return data


def test_a_trace_arrives_with_the_parent_that_was_given(logged: Server, collector: Collector) -> None:
    attribute = {"X-Amzn-SageMaker-Custom-Attributes": f"traceparent={TRACEPARENT}"}
    post(logged, "traced", headers={"traceparent": TRACEPARENT})
    post(logged, "by-sagemaker", headers=attribute)
    for identifier in ("traced", "by-sagemaker"):
        wait_until(lambda: len(collector.of_request(identifier)) == 5, what="the trace")  # noqa: B023
        spans = collector.of_request(identifier)
        root = spans["llm_request"]
        assert f"00-{root.trace_id.hex()}-{root.parent_span_id.hex()}-01" == TRACEPARENT
        times = [(spans[name].start_time_unix_nano, spans[name].end_time_unix_nano) for name in PHASES]
        assert times == sorted(times)
        assert attributes(root)["gen_ai.usage.completion_tokens"] == 3
        assert line_of(logged, identifier)["span_id"] == root.span_id.hex()


def test_metrics_of_the_conventions_arrive_at_the_collector(logged: Server, collector: Collector) -> None:
    post(logged, "measured")
    names = {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "gen_ai.client.token.usage",
    }
    wait_until(lambda: names <= set(collector.metrics), what="the metrics")
    assert set(collector.metrics) == names
    for name in names:
        points = [(attributes(point), point) for point in collector.metrics[name].histogram.data_points]
        served = [point for found, point in points if found.get("gen_ai.request.model") == "scripted"]
        assert sum(point.count for point in served) > 0, name
        assert {found["gen_ai.provider.name"] for found, _ in points} == {"djl-trtllm"}


def test_however_a_request_ends_it_is_one_trace(own: Server, collector: Collector) -> None:
    def stream(identifier: str, tokens: int, **parameters: Any) -> int:
        """The status: a busy server may have an error before it has sent anything, and answers with its status then."""
        body = {**lmi(SECRET, max_new_tokens=tokens, **parameters), "stream": True}
        headers = {"x-request-id": identifier}
        with own.http.stream("POST", "/invocations", json=body, headers=headers) as response:
            for _ in response.iter_bytes():
                if tokens > 1000:
                    break
            return response.status_code

    post(own, "t-ended")
    post(own, "t-unknown", "/predictions/hen")
    post(own, "t-malformed", json=None, content=b'{"inputs":')
    post(own, "t-large", json=None, content=b"x" * 100_001)
    stream("t-left", 100_000)
    failed = stream("t-failed", FAILS)
    # What the engine remembers of a request with a penalty is lost with its process.
    died = stream("t-died", DIES, repetition_penalty=1.5)
    headers = {"Authorization": "Bearer key-of-the-server", "x-request-id": "t-ws"}
    with opened(own.port, additional_headers=headers) as socket:
        socket.send(json.dumps(lmi(SECRET, max_new_tokens=3)))
        socket.recv()
        socket.send(json.dumps({**lmi(SECRET, max_new_tokens=100_000), "stream": True}))
        socket.recv()
    metadata = (("authorization", "Bearer key-of-the-server"), ("traceparent", TRACEPARENT))
    with grpc.insecure_channel(f"127.0.0.1:{own.grpc_port}") as channel:  # type: ignore[attr-defined]
        infer = channel.unary_unary(f"/{rpc.SERVICE}/ModelInfer")
        infer(message("t-rpc"), metadata=metadata)
        with pytest.raises(grpc.RpcError):
            infer(message("t-rpc-refused", "hen"), metadata=metadata)
        responses = channel.stream_stream(f"/{rpc.SERVICE}/ModelStreamInfer")(
            iter([message("t-rpc-left", tokens=100_000, stream=True)]), metadata=metadata
        )
        next(responses)
        responses.cancel()
    ends: dict[str, tuple[int | str, str | None]] = {
        "t-ended": (200, None),
        "t-unknown": (404, "UnknownModelError"),
        "t-malformed": (424, "InvalidRequestError"),
        "t-large": (413, "RequestTooLargeError"),
        "t-left": (200, None),
        "t-failed": (failed, "GenerationError"),
        "t-died": (died, "GenerationError"),
        "t-rpc": ("OK", None),
        "t-rpc-refused": ("NOT_FOUND", "UnknownModelError"),
        "t-rpc-left": ("CANCELLED", None),
    }
    wait_until(lambda: all(map(collector.roots, ends)) and len(collector.roots("t-ws")) > 1, what="all traces")
    post(own, "t-last")
    wait_until(lambda: bool(collector.roots("t-last")), what="the last trace")
    assert len(collector.roots("t-ws")) == 2
    found = {}
    for identifier in ends:
        (root,) = collector.roots(identifier)
        assert root.end_time_unix_nano > root.start_time_unix_nano
        given = attributes(root)
        status = given.get("http.response.status_code", given.get("rpc.response.status_code"))
        assert given["djl_trtllm.client"] == "SERVING_API_KEY"
        found[identifier] = status, given.get("error.type")
    assert found == ends
    written = {identifier: line_of(own, identifier) for identifier in ends}
    assert {name: (line["status"], line.get("error")) for name, line in written.items()} == ends
    assert {line["client"] for line in written.values()} == {"SERVING_API_KEY"}
    assert written["t-left"]["finish_reason"] == "cancelled"
    assert collector.of_request("t-rpc")["llm_request"].parent_span_id.hex() == TRACEPARENT.split("-")[2]


PHASES = ("receive", "queue", "prefill", "decode")


def test_nothing_that_was_sent_is_in_the_log_or_the_traces(logged: Server, collector: Collector) -> None:
    post(logged, "secret", "/invocations?token=hf_abcdefghijklmnop", headers={"x-amzn-trace": SECRET})
    line_of(logged, "secret")
    text = "\n".join(logged.log)
    for secret in (SECRET, "key-of-the-server", "hf_abcdefghijklmnop"):
        assert secret not in text
        assert all(secret not in str(span) for span in collector.spans)


# -- A real Prometheus scrapes a server, and answers the queries of the dashboard --------------------------------------

PROMETHEUS = shutil.which("prometheus")

# Only TensorRT-LLM reports these.
WITHOUT_DATA = ("engine_paused", "engine_queued")


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[httpx.Client]:
    """A Prometheus with our configuration that scrapes this port each second, and a client of its API."""
    configuration = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    configuration["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
    # Alerts fire at once, instead of after minutes.
    rules = re.sub(r"for: \d+m", "for: 0s", (FOLDER / "alerts.yml").read_text())
    (folder / "alerts.yml").write_text(rules)
    configuration["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    config_file = folder / "prometheus.yml"
    config_file.write_text(yaml.safe_dump(configuration))
    own = free_port()
    command = [str(PROMETHEUS), f"--config.file={config_file}", f"--storage.tsdb.path={folder / 'data'}"]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{own}"], stdout=log, stderr=log) as process,
    ):
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{own}", trust_env=False) as client:
                yield client
        finally:
            process.terminate()


def ask(client: httpx.Client, query: str) -> list[dict[str, Any]]:
    """The result of a query; empty while Prometheus starts."""
    try:
        response = client.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if response.status_code == 503:
        return []
    answer = response.json()
    assert answer["status"] == "success", (query, answer)
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed (Debian's package prometheus)")
def test_every_panel_has_data(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {"steps_per_second": 200, "kv_blocks": 400})
    with serving(model) as server, prometheus(tmp_path, server.port) as client:
        server.generate(20)
        wait_until(lambda: ask(client, "djl_trtllm_ready == 1") != [], what="a scrape")
        texts = [text for text in queries() if not any(name in text for name in WITHOUT_DATA)]
        assert len(texts) < len(queries()) < 2 * len(board()["panels"])

        def missing() -> list[str]:
            server.generate(20)
            results = {text: ask(client, text) for text in texts}
            return [text for text, found in results.items() if not found or found[0]["value"][1] == "NaN"]

        wait_until(lambda: not missing(), what="data for every panel")
        (tokens,) = ask(client, "djl_trtllm_generated_tokens_total")
        assert 0 < float(tokens["value"][1]) <= server.metric("generated_tokens_total")
        (up,) = ask(client, "up")
        assert up["value"][1] == "1"
        groups = client.get("/api/v1/rules").json()["data"]["groups"]
        assert len(groups) == 2
        assert all(rule["health"] in ("ok", "unknown") for group in groups for rule in group["rules"])


def firing(client: httpx.Client) -> set[str]:
    return {each["metric"]["alertname"] for each in ask(client, 'ALERTS{alertstate="firing"}')}


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed (Debian's package prometheus)")
def test_refusals_and_a_server_that_has_gone_ring(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {"steps_per_second": 5}, max_requests_per_client=1)
    with serving(model) as server, prometheus(tmp_path, server.port) as client:
        wait_until(lambda: ask(client, "djl_trtllm_ready == 1") != [], what="a scrape")
        assert "DjlTrtllmRefusals" not in firing(client)
        body = {**lmi("x", max_new_tokens=100_000), "stream": True}
        with server.http.stream("POST", "/invocations", json=body) as response:
            parts = response.iter_bytes()  # while it is there, the response is open
            next(parts)

            def refused() -> bool:
                assert server.http.post("/invocations", headers=JSON, json=lmi("x")).status_code == 429
                return "DjlTrtllmRefusals" in firing(client)

            wait_until(refused, what="the alert for refusals")
            assert not firing(client) & {"DjlTrtllmServerDown", "DjlTrtllmNothingScraped"}
            server.process.kill()
        wait_until(lambda: "DjlTrtllmServerDown" in firing(client), what="the alert for a server that has gone")
