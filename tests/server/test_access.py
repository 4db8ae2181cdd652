from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.config import Options
from djl_trtllm.errors import AuthenticationError, ConfigError, ForbiddenError
from djl_trtllm.server.access import Access, ApiKey, Role, WrongPort, read_access
from djl_trtllm.server.app import Handshake, tls_arguments
from djl_trtllm.server.connections import Connections
from djl_trtllm.server.context import ServerContext
from djl_trtllm.telemetry import ServedRequest, Telemetry
from tests.server.application import application
from tests.support.asgi import JSON, Connection
from tests.support.server import Certificates
from tests.support.tables import by_rows, by_table

INFER = ApiKey.of("app", "generate-please", frozenset({Role.INFER}))
MANAGE = ApiKey.of("admin", "manage-please", frozenset({Role.MANAGE}))
METRICS = ApiKey.of("prometheus", "scrape-please", frozenset({Role.METRICS}))
ACCESS = Access((INFER, MANAGE, METRICS))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_keys_everybody_may_do_everything() -> None:
    for role in Role:
        assert Access().check(role, {}) is None


@by_table("headers")
def test_a_key_is_a_bearer_token_or_a_header_of_its_own(headers: dict[str, str]) -> None:
    assert ACCESS.check(Role.INFER, headers) is INFER


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer "}, {"authorization": "Basic generate-please"}])
def test_a_request_without_a_key_says_how_to_send_one(headers: dict[str, str]) -> None:
    with pytest.raises(AuthenticationError, match="Authorization: Bearer KEY"):
        ACCESS.check(Role.INFER, headers)


@pytest.mark.parametrize("key", ["generate-pleas", "generate-please2", "Generate-please", "\udcff", "é"])
def test_another_key_is_none_and_is_not_repeated(key: str) -> None:
    with pytest.raises(AuthenticationError) as caught:
        ACCESS.check(Role.INFER, bearer(key))
    assert key not in str(caught.value)


SHOWN = "********"


@by_rows(
    ("text", "shown"),
    [
        ("generate-please", SHOWN),
        ("/v1/models/generate-please", f"/v1/models/{SHOWN}"),
        ("/models/manage-please/adapters/generate-please", f"/models/{SHOWN}/adapters/{SHOWN}"),
        ("my-scrape-please-1", f"my-{SHOWN}-1"),
        ("key=scrape-please", f"key={SHOWN}"),
        ("/v1/models/with/slash+and==/load", f"/v1/models/{SHOWN}/load"),
        ("$7.50", SHOWN),
        ("/v1/models/generate-please2", "/v1/models/generate-please2"),
        ("/\ud800/generate-please/" + "x" * 9000, f"/\ud800/{SHOWN}/" + "x" * 1005),
    ],
)
def test_a_key_that_a_client_writes_elsewhere_is_not_shown(text: str, shown: str) -> None:
    keys = (*ACCESS.keys, ApiKey.of("base64", "with/slash+and=="), ApiKey.of("signs", "$7.50"))
    assert Access(keys).without_keys(text) == shown
    assert Access(tuple(replace(key, length=None) for key in keys)).without_keys(text) == shown, (
        "by their digests alone"
    )
    assert Access().without_keys(text) == text


async def test_a_key_in_a_path_a_name_or_an_id_reaches_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    context = ServerContext.open(Options(api_key="my-key"))
    identifier = context.request_id({"x-request-id": "my-key"})
    assert identifier != context.request_id({"x-request-id": "my-key"}), "it has a new one"
    assert context.request_id({"x-request-id": "my-keys"}) == "my-keys"
    context.telemetry.ended(ServedRequest(identifier, "POST", "/models/my-key/invoke", model="my-key", status=404))
    (line,) = caplog.records
    assert SHOWN in line.getMessage() and "my-key" not in repr(vars(line))


def test_a_key_needs_the_role() -> None:
    with pytest.raises(ForbiddenError, match="the API key 'app' has no role 'manage'"):
        ACCESS.check(Role.MANAGE, bearer("generate-please"))


def test_what_needs_no_role_needs_no_key() -> None:
    assert ACCESS.check(None, {}) is None


def test_every_key_is_compared_with_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append(first)
        return first == second

    monkeypatch.setattr("hmac.compare_digest", compare)
    ACCESS.check(Role.INFER, bearer("generate-please"))
    assert compared == [key.digest for key in ACCESS.keys], "a match in the first place ends nothing"


@by_rows(
    ("role", "port", "refused"),
    [
        (Role.MANAGE, 8081, False),
        (Role.MANAGE, 8080, True),
        (Role.INFER, 8080, False),
        (Role.INFER, 8081, True),
        (Role.INFER, None, False),
        (Role.METRICS, 8080, False),
        (Role.METRICS, 8081, False),
        (None, 8080, False),
        (None, 8081, False),
    ],
)
def test_the_management_port_has_the_management_api_alone(role: Role | None, port: int | None, refused: bool) -> None:
    access = Access(management_port=8081)
    server = None if port is None else ("10.0.0.1", port)
    if refused:
        with pytest.raises(WrongPort, match="management_port"):
            access.check(role, {}, server)
    else:
        access.check(role, {}, server)


LOOPBACK = ("127.0.0.1", 8080)
FOREIGN = {"host": "localhost:8080", "origin": "https://evil.example"}


@by_rows(
    "headers",
    [
        {},
        {"host": ""},
        {"host": "LOCALHOST:8080"},
        {"host": "story.localhost"},
        {"host": "127.0.0.1:8080"},
        {"host": "[::1]:8080"},
        {"host": "0.0.0.0:8080"},
        {"host": socket.gethostname()},
        {"host": "localhost:8080", "origin": "http://localhost:8080"},
        {"host": "localhost:8080", "origin": "https://Chat.example.com"},
        {"host": "chat.example.com", "origin": "https://chat.example.com"},
    ],
)
def test_on_loopback_this_machine_and_the_operators_pages_need_no_key(headers: dict[str, str]) -> None:
    Access(origins=("https://chat.example.com",)).check(Role.INFER, headers, LOOPBACK)


@by_rows("server", [LOOPBACK, ("::1", 8080), ("::ffff:127.0.0.1", 8080), ("127.8.9.1", 80)])
@by_table("headers", "named")
def test_on_loopback_without_keys_a_web_page_from_elsewhere_is_refused(
    server: tuple[str, int], headers: dict[str, str], named: str
) -> None:
    access = Access(origins=("https://chat.example.com",))
    with pytest.raises(ForbiddenError, match=re.escape(named)) as caught:
        access.check(Role.INFER, headers, server)
    assert "SERVING_CORS_ALLOWED_ORIGIN=" in str(caught.value)
    access.check(None, headers, server)
    access.check(Role.INFER, headers, ("10.0.0.1", 8080))
    access.check(Role.INFER, headers, ("/run/socket", None))
    Access(origins=("*",)).check(Role.INFER, headers, server)
    ACCESS.check(Role.INFER, {**headers, **bearer("generate-please")}, server)


def test_the_origins_of_pages_are_read_from_the_options() -> None:
    given = ("https://Chat.example.com", "http://localhost:3000", "*")
    assert read_access(Options(cors_allowed_origin=given)).origins == tuple(map(str.lower, given))
    for wrong in ("chat.example.com", "https://chat.example.com/", "https://*.example.com", "null"):
        with pytest.raises(ConfigError, match=re.escape(f"cors_allowed_origin={wrong}: expected")):
            read_access(Options(cors_allowed_origin=(wrong,)))


def test_a_management_port_that_is_the_servers_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="management_port=8080 is inference_port too"):
        read_access(Options(management_port=8080))
    assert read_access(Options(management_port=8081)).management_port == 8081
    for name in ("triton_http_port", "triton_grpc_port", "triton_metrics_port"):
        with pytest.raises(ConfigError, match=f"management_port=8001 is {name} too"):
            read_access(Options(**{"management_port": 8001, name: 8001}))


@pytest.mark.parametrize("key", ["\u00e9", " a", "a ", "a\nb", "\x7f"])
def test_a_key_that_no_header_can_have_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"api_key \(SERVING_API_KEY\): expected printable ASCII"):
        read_access(Options(api_key=key))


def test_one_key_may_do_everything() -> None:
    access = read_access(Options(api_key="open"))
    for role in Role:
        found = access.check(role, bearer("open"))
        assert found is not None and found.name == "SERVING_API_KEY"


def test_a_file_has_keys_or_their_digests_with_roles(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret two").hexdigest()
    file = tmp_path / "keys.yaml"
    file.write_text(
        f"- {{name: one, key: 'secret one', roles: [infer]}}\n- {{name: two, sha256: '{digest}', roles: [manage]}}\n"
    )
    access = read_access(Options(api_keys_file=file, api_key="three"))
    assert [key.name for key in access.keys] == ["SERVING_API_KEY", "one", "two"]
    assert access.check(Role.INFER, bearer("secret one")) is access.keys[1]
    assert access.check(Role.MANAGE, bearer("secret two")) is access.keys[2]


ROW = "- {name: a, key: secret, roles: [infer]}"


@by_rows(
    ("text", "problem"),
    [
        ("secret: [", "this is not YAML"),
        ("\x00secret", "this is not YAML"),
        ("[" * 100_000, "this is not YAML"),
        ("secret", "expected a list of keys"),
        ("[]", "expected a list of keys"),
        ("- secret", "key 1: expected name, key"),
        ("- {name: a, key: secret, roles: [infer], rolse: 1}", "key 1: unknown member 'rolse'"),
        ("- {key: secret, roles: [infer]}", "key 1: name: expected a text in one line"),
        ("- {name: '', key: secret, roles: [infer]}", "key 1: name: expected a text in one line"),
        ('- {name: "a\\nb", key: secret, roles: [infer]}', "key 1: name: expected"),
        ("- {name: a, key: secret}", "key 1: roles: expected a list of infer, manage, metrics"),
        ("- {name: a, key: secret, roles: [admin]}", "key 1: roles: expected"),
        ("- {name: a, key: secret, roles: [[infer]]}", "key 1: roles: expected"),
        ("- {name: a, key: secret, roles: infer}", "key 1: roles: expected"),
        ("- {name: a, roles: [infer]}", "key 1: expected either key or sha256"),
        ("- {name: a, key: secret, sha256: secret, roles: [infer]}", "key 1: expected either key or sha256"),
        ("- {name: a, key: 12345, roles: [infer]}", "key 1: expected either key or sha256, a text in quotation marks"),
        ("- {name: a, key: '', roles: [infer]}", "key 1: expected either key or sha256"),
        ("- {name: a, key: secr\u00e9t, roles: [infer]}", "key 1: key: expected printable ASCII"),
        ("- {name: a, key: 'secret ', roles: [infer]}", "key 1: key: expected printable ASCII"),
        ("- {name: a, sha256: secret, roles: [infer]}", "key 1: sha256: expected 64 hexadecimal digits"),
        (f"{ROW}\n{ROW}", "a: names are there twice"),
        (f"{ROW}\n- 1", "key 2: expected"),
        ("#" * (1 << 20) + "#", "larger than 1048576 bytes"),
    ],
)
def test_a_wrong_file_is_refused_without_its_secrets(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_access(Options(api_keys_file=file))
    assert f"api_keys_file={file}" in str(caught.value)
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value).replace("sha256: secret", "")


def test_all_that_is_wrong_in_a_file_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: a, key: s}\n- {name: b, roles: [infer]}\n")
    with pytest.raises(ConfigError) as caught:
        read_access(Options(api_keys_file=file))
    assert len(caught.value.problems) == 2


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.yaml: cannot be read: No such file"):
        read_access(Options(api_keys_file=tmp_path / "keys.yaml"))


OPEN = {
    "/ping",
    "/monitor",
    "/monitor/{file}",
    "/version",
    "/openapi.json",
    "/docs",
    "/health",
    "/v1/models/{model}/loaded",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/{model}/ready",
    "/v2/models/{model}/versions/{version}/ready",
}
HEALTH = ("/ping", "/health", "/live", "/loaded", "/ready")
"""Ends of the open paths that health checks ask."""
ROLES = {
    "/metrics": Role.METRICS,
    "/monitor/events": Role.METRICS,
    **dict.fromkeys(
        ("/models", "/models/{model}", "/adapters", "/adapters/{adapter}", "/models/{model}/adapters"), Role.MANAGE
    ),
    "/models/{model}/adapters/{adapter}": Role.MANAGE,
}
"""The role of a path, where it is not INFER."""


def status_of(answer: Connection) -> int:
    """The status, also where SageMaker's runtime has another one around it."""
    status = answer.json.get("OriginalStatusCode", answer.status) if answer.status == 424 else answer.status
    return int(status)


async def test_every_path_needs_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet: dict[str, bool] = {}
    monkeypatch.setattr(Telemetry, "ended", lambda _, request: quiet.update({request.path: request.quiet}))
    paths = {*OPEN, *ROLES, "/", *(path for dialect in DIALECTS for path in dialect.pages)}
    generating = {path for dialect in DIALECTS for path in (*dialect.paths, *dialect.actions)}
    async with application(access=ACCESS, monitor=False) as app:
        for method, path in [*(("GET", path) for path in paths), *(("POST", path) for path in generating)]:
            address = path.replace("{", "").replace("}", "")
            statuses = {}
            for key in ("none", "generate-please", "manage-please", "scrape-please"):
                answer = await app.client.begin(method, address, b"{}", {**JSON, **bearer(key)}).end()
                statuses[key] = status_of(answer) if answer.headers["content-type"] == "application/json" else 200
            if path in OPEN:
                assert not {401, 403} & set(statuses.values()), path
                continue
            allowed = {Role.INFER: "generate-please", Role.MANAGE: "manage-please", Role.METRICS: "scrape-please"}
            mine = statuses.pop(allowed[ROLES.get(path, Role.INFER)])
            assert mine not in (401, 403), path
            assert statuses.pop("none") == 401, path
            assert set(statuses.values()) == {403}, path
    checks = {path.replace("{", "").replace("}", "") for path in OPEN if path.endswith(HEALTH)}
    assert {path for path, is_quiet in quiet.items() if is_quiet} == checks, "health checks leave no line in the log"


async def test_a_refusal_names_the_scheme_and_is_in_the_dialects_form() -> None:
    async with application(access=ACCESS) as app:
        answer = await app.client.post("/v1/chat/completions", b"{}")
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json["error"]["code"] == "invalid_api_key"
        answer = await app.client.post("/invocations", b"{}", {**JSON, **bearer("manage-please")})
        assert (answer.status, answer.json["type"]) == (403, "ForbiddenException")


async def test_the_description_says_what_needs_a_key() -> None:
    async with application(access=ACCESS) as app:
        described = (await app.client.get("/openapi.json")).json
    schemes = described["components"]["securitySchemes"]
    header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    assert [*schemes.values()] == [{"type": "http", "scheme": "bearer"}, header]
    assert described["security"] == [{name: []} for name in schemes], "either of them"
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert (operation.get("security") == []) == (path in OPEN), path
    async with application() as app:
        described = (await app.client.get("/openapi.json")).json
    assert "security" not in described
    assert "securitySchemes" not in described["components"]


def test_roles_have_the_names_of_the_page() -> None:
    assert {role.value for role in Role} == {"infer", "manage", "metrics"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def test_without_a_certificate_there_is_no_tls() -> None:
    assert tls_arguments(Options()) == {}


def test_certificate_and_key_are_uvicorns_arguments(certificates: Certificates) -> None:
    options = Options(certificate_file=certificates.certificate, private_key_file=certificates.key)
    expected = {"ssl_certfile": str(certificates.certificate), "ssl_keyfile": str(certificates.key)}
    assert tls_arguments(options) == expected
    with_clients = options.updated({"client_ca_file": certificates.authority})
    of_clients = {"ssl_ca_certs": str(certificates.authority), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    assert tls_arguments(with_clients) == {**expected, **of_clients}


@by_table("given", "problem")
def test_files_that_cannot_be_used_are_refused(
    given: dict[str, str], problem: str, certificates: Certificates, tmp_path: Path
) -> None:
    files: dict[str, Any] = {name: getattr(certificates, file, tmp_path / "missing") for name, file in given.items()}
    with pytest.raises(ConfigError, match=problem):
        tls_arguments(Options(**files))


# Connections during their TLS handshake are bounded as all others.


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    """uvicorn takes uvloop where it is installed, which reads at another time than asyncio."""
    made: asyncio.AbstractEventLoop = pytest.importorskip(request.param).new_event_loop()
    yield made
    made.run_until_complete(made.shutdown_asyncgens())
    made.close()


class Echo(asyncio.Protocol):
    """Says what it gets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Listening:
    """Connections of a port with TLS."""

    def __init__(self, certificates: Certificates, **options: Any) -> None:
        self.connections = Connections(ServerContext(Options(**options)))
        self.trusting = ssl.create_default_context(cafile=certificates.authority)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.certificate, certificates.key)

    async def run(self, clients: Callable[[Listening], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Handshake(self.connections, self._context, Echo), "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        try:
            await asyncio.wait_for(clients(self), 60)
        finally:
            server.close()

    async def connect(self, context: ssl.SSLContext | None = None) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self._port, ssl=context)

    async def until_idle(self, count: int) -> None:
        while len(self.connections.idle) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_handshakes_that_do_not_end_are_idle_connections_and_make_room(
    certificates: Certificates, loop: asyncio.AbstractEventLoop
) -> None:
    async def clients(listening: Listening) -> None:
        opened = []
        for number in range(5):
            opened.append(await listening.connect())
            await listening.until_idle(min(number + 1, 3))
        for reader, _ in opened[:2]:
            assert await reader.read() == b""
        reader, writer = await listening.connect(listening.trusting)
        writer.write(b"wolf")
        assert await reader.readexactly(4) == b"wolf"
        assert await opened[2][0].read() == b""
        for _, writer in opened[3:]:
            writer.close()
        await listening.until_idle(0)

    loop.run_until_complete(Listening(certificates, max_connections=3).run(clients))


def test_a_handshake_has_a_time(certificates: Certificates, loop: asyncio.AbstractEventLoop) -> None:
    async def clients(listening: Listening) -> None:
        reader, _ = await listening.connect()
        assert await reader.read() == b""
        assert not listening.connections.idle

    loop.run_until_complete(Listening(certificates, header_read_timeout=0.05).run(clients))


def test_what_is_no_handshake_ends_the_connection(certificates: Certificates, loop: asyncio.AbstractEventLoop) -> None:
    async def clients(listening: Listening) -> None:
        reader, writer = await listening.connect()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        await listening.until_idle(0)

    loop.run_until_complete(Listening(certificates).run(clients))


def test_its_deadline_is_that_of_an_idle_connection(
    certificates: Certificates, loop: asyncio.AbstractEventLoop
) -> None:
    async def clients(listening: Listening) -> None:
        reader, _ = await listening.connect()
        await listening.until_idle(1)
        (handshake,) = listening.connections.idle
        assert 50 < handshake.deadline - asyncio.get_running_loop().time() <= 75
        handshake.expire()
        assert not listening.connections.idle
        assert await reader.read() == b""

    loop.run_until_complete(Listening(certificates).run(clients))


def test_what_comes_together_with_the_end_of_a_handshake_is_not_lost(
    certificates: Certificates, loop: asyncio.AbstractEventLoop
) -> None:
    async def clients(listening: Listening) -> None:
        reader, writer = await listening.connect()
        received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = listening.trusting.wrap_bio(received, sent, server_hostname="127.0.0.1")
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(sent.read())
                received.write(await reader.read(65536))
        client.write(b"wolf")
        writer.write(sent.read())
        found = b""
        while not found:
            received.write(await reader.read(65536))
            try:
                found = client.read()
            except ssl.SSLWantReadError:
                continue  # session tickets
        assert found == b"wolf"

    loop.run_until_complete(Listening(certificates).run(clients))
