"""A server with API keys, TLS, clients' certificates and a management port, and its clients."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.typing import Origin

from djl_trtllm.api.dialects.triton import rpc
from tests.support.client import JSON, body, opened
from tests.support.models import scripted_model
from tests.support.processes import PATIENCE
from tests.support.server import Certificates, Server, free_port, running, serving

pytestmark = pytest.mark.slow

KEYS = "".join(
    f"- {{name: {name}, key: {name}-secret, roles: [{role}]}}\n"
    for name, role in (("app", "infer"), ("admin", "manage"), ("prometheus", "metrics"))
)
ALL = "everything-secret"


class SecureServer(Server):
    """Its own client has a certificate and a key that may do everything."""

    def __init__(self, model: Path, certificates: Certificates, **environ: str) -> None:
        self.certificates = certificates
        super().__init__(model, environ)

    def tls(self, *, client: bool = True) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.certificates.authority)
        if client:
            context.load_cert_chain(self.certificates.client, self.certificates.client_key)
        return context

    def client(self, key: str = "", port: int = 0) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = f"https://127.0.0.1:{port or self.port}"
        return httpx.Client(base_url=url, verify=self.tls(), headers=headers, timeout=PATIENCE, trust_env=False)

    def _client(self) -> httpx.Client:
        return self.client(ALL)


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return {"management": free_port(), "grpc": free_port()}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, ports: dict[str, int]) -> Iterator[SecureServer]:
    folder = tmp_path_factory.mktemp("access")
    certificates = Certificates(folder)
    (folder / "keys.yaml").write_text(KEYS)
    environ = {
        "SERVING_API_KEY": ALL,
        "SERVING_API_KEYS_FILE": str(folder / "keys.yaml"),
        "SERVING_CERTIFICATE_FILE": str(certificates.certificate),
        "SERVING_PRIVATE_KEY_FILE": str(certificates.key),
        "SERVING_CLIENT_CA_FILE": str(certificates.authority),
        "SERVING_MANAGEMENT_PORT": str(ports["management"]),
        "SERVING_TRITON_GRPC_PORT": str(ports["grpc"]),
    }
    secure = SecureServer(scripted_model(folder / "model"), certificates, **environ)
    with running(secure):
        yield secure


def test_a_connection_needs_tls_and_a_certificate(secure: SecureServer) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{secure.port}/ping", trust_env=False)
    bare = httpx.Client(verify=secure.tls(client=False), trust_env=False)
    with bare, pytest.raises(httpx.TransportError):
        bare.get(f"https://127.0.0.1:{secure.port}/ping")


def test_each_key_may_do_what_its_roles_say(secure: SecureServer) -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
    for key, generates, scrapes in (("", 401, 401), ("app-secret", 200, 403), ("prometheus-secret", 403, 200)):
        with secure.client(key) as client:
            assert client.get("/ping").status_code == 200
            assert client.post("/invocations", json=body).status_code == generates
            assert client.get("/metrics").status_code == scrapes


def test_the_management_api_is_on_its_own_port(secure: SecureServer, ports: dict[str, int]) -> None:
    with secure.client("admin-secret") as client:
        assert client.get("/models").status_code == 404
    with secure.client("admin-secret", ports["management"]) as client:
        assert client.get("/models").json()["models"][0]["status"] == "READY"
        assert client.get("/ping").status_code == 200
        refused = client.post("/invocations", json={"inputs": "a"})
        assert (refused.status_code, "management API only" in refused.json()["message"]) == (404, True)
    with secure.client("app-secret", ports["management"]) as client:
        assert client.get("/models").status_code == 403


def test_openais_client_streams_with_its_api_key(secure: SecureServer) -> None:
    import openai  # half a second, which only this test needs

    address = f"https://127.0.0.1:{secure.port}/v1"
    http_client = openai.DefaultHttpxClient(verify=secure.tls())
    client = openai.OpenAI(base_url=address, api_key="app-secret", http_client=http_client, max_retries=0)
    chunks = list(client.completions.create(model="", prompt="a", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").completions.create(model="", prompt="a")


def test_grpc_has_the_same_keys_and_certificates(secure: SecureServer, ports: dict[str, int]) -> None:
    files = (secure.certificates.authority, secure.certificates.client_key, secure.certificates.client)
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
    with grpc.secure_channel(f"127.0.0.1:{ports['grpc']}", credentials) as channel:
        ready = channel.unary_unary(f"/{rpc.SERVICE}/ServerReady")(b"", timeout=PATIENCE)
        assert rpc.message_class("ServerReadyResponse").FromString(ready).ready
        metadata = channel.unary_unary(f"/{rpc.SERVICE}/ServerMetadata")
        assert metadata(b"", timeout=PATIENCE, metadata=[("authorization", "Bearer app-secret")])
        for pairs, code in (
            ([], grpc.StatusCode.UNAUTHENTICATED),
            ([("x-api-key", "admin-secret")], grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                metadata(b"", timeout=PATIENCE, metadata=pairs)
            assert caught.value.code() is code
            stream = channel.stream_stream(f"/{rpc.SERVICE}/ModelStreamInfer")
            with pytest.raises(grpc.RpcError) as caught:
                list(stream(iter([]), timeout=PATIENCE, metadata=pairs))
            assert caught.value.code() is code


def test_no_key_is_in_the_log(secure: SecureServer) -> None:
    assert not [line for line in secure.log if "-secret" in line]


def test_no_process_of_the_server_has_the_key(secure: SecureServer) -> None:
    started = secure.process.children(recursive=True)
    assert started
    assert not [process for process in started if ALL in process.environ().values()]


def test_a_websocket_needs_a_key_too(secure: SecureServer) -> None:
    def opened_with(key: str) -> ClientConnection:
        headers = {"x-api-key": key} if key else {}
        return opened(secure.port, scheme="wss", ssl=secure.tls(), additional_headers=headers)

    for key, status in (("", 401), ("another", 401), ("admin-secret", 403)):
        with pytest.raises(InvalidStatus) as refused:
            opened_with(key)
        assert refused.value.response.status_code == status
    with opened_with("app-secret") as websocket:
        websocket.send(body(3))
        assert b"generated_text" in websocket.recv()


# -- Web pages in a browser of the server's own machine, without keys --------------------------------------------------

PAGE = "https://chat.example.com"


def test_a_web_page_from_elsewhere_does_not_use_a_laptops_server(server: Server) -> None:
    for headers in ({"origin": PAGE}, {"host": "evil.example"}):
        for method, path in (("POST", "/invocations"), ("GET", "/v1/models"), ("GET", "/metrics")):
            refused = server.http.request(method, path, content=body(2), headers={**JSON, **headers})
            assert refused.status_code == 403, path
        assert server.http.get("/ping", headers=headers).status_code == 200
    # So does a proxy on this machine that forwards nothing, for all its clients.
    assert server.http.get("/monitor/events", headers={"host": "localhost"}).status_code == 401
    preflight = {"origin": PAGE, "access-control-request-method": "POST"}
    assert server.http.options("/invocations", headers=preflight).status_code in (403, 405)
    with pytest.raises(InvalidStatus) as caught:
        opened(server.port, origin=Origin(PAGE))
    assert caught.value.response.status_code == 403
    with opened(server.port, origin=Origin(server.url)) as socket:
        socket.send(body(2))
        assert b"generated_text" in socket.recv()


def test_pages_that_the_operator_names_may_use_it_and_read_its_responses(tmp_path: Path) -> None:
    with serving(scripted_model(tmp_path / "model"), SERVING_CORS_ALLOWED_ORIGIN=PAGE) as server:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        allowed = server.http.options("/invocations", headers={"origin": PAGE, **asked})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
        other = server.http.options("/invocations", headers={"origin": "https://evil.example", **asked})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)
        with server.http.stream(
            "POST", "/invocations", content=body(5, stream=True), headers={**JSON, "origin": PAGE}
        ) as answer:
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
            assert len(list(answer.iter_lines())) == 5
        assert server.http.post("/invocations", headers={"origin": "https://evil.example"}).status_code == 403
        proxied = server.http.post("/invocations", content=body(2), headers={**JSON, "host": "chat.example.com"})
        assert proxied.status_code == 200
        with opened(server.port, origin=Origin(PAGE)):
            pass
