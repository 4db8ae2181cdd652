from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.config import Options
from djl_trtllm.errors import AuthenticationError, ConfigError, ForbiddenError
from djl_trtllm.server.access import Access, ApiKey, Role, WrongPort, read_access
from tests.server.application import application
from tests.support.asgi import JSON, Connection
from tests.support.virtual_time import in_virtual_time

INFER = ApiKey.of("app", "generate-please", frozenset({Role.INFER}))
MANAGE = ApiKey.of("admin", "manage-please", frozenset({Role.MANAGE}))
METRICS = ApiKey.of("prometheus", "scrape-please", frozenset({Role.METRICS}))
ACCESS = Access((INFER, MANAGE, METRICS))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_keys_everybody_may_do_everything() -> None:
    for role in Role:
        assert Access().check(role, {}) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer generate-please"},
        {"authorization": "bearer  generate-please "},
        {"x-api-key": "generate-please"},
        {"x-api-key": "generate-please", "authorization": "AWS4-HMAC-SHA256 Credential=..."},
    ],
)
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


@pytest.mark.parametrize(
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
    if refused:
        with pytest.raises(WrongPort, match="management_port"):
            access.check(role, {}, port)
    else:
        access.check(role, {}, port)


def test_a_management_port_that_is_the_servers_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="management_port=8080 is inference_port too"):
        read_access(Options(management_port=8080))
    assert read_access(Options(management_port=8081)).management_port == 8081
    for name in ("triton_http_port", "triton_grpc_port", "triton_metrics_port"):
        with pytest.raises(ConfigError, match=f"management_port=8001 is {name} too"):
            read_access(Options.model_validate({"management_port": 8001, name: 8001}))


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


@pytest.mark.parametrize(
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


@in_virtual_time
async def test_every_path_needs_its_role() -> None:
    paths = {*OPEN, *ROLES, "/", *(path for dialect in DIALECTS for path in dialect.pages)}
    generating = {path for dialect in DIALECTS for path in (*dialect.paths, *dialect.actions)}
    async with application(access=ACCESS) as app:
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


@in_virtual_time
async def test_a_refusal_names_the_scheme_and_is_in_the_dialects_form() -> None:
    async with application(access=ACCESS) as app:
        answer = await app.client.post("/v1/chat/completions", b"{}")
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json["error"]["code"] == "invalid_api_key"
        answer = await app.client.post("/invocations", b"{}", {**JSON, **bearer("manage-please")})
        assert (answer.status, answer.json["type"]) == (403, "ForbiddenException")


@in_virtual_time
async def test_the_description_says_what_needs_a_key() -> None:
    async with application(access=ACCESS) as app:
        described = (await app.client.get("/openapi.json")).json
    schemes = described["components"]["securitySchemes"]
    assert {scheme.get("scheme") or scheme["name"] for scheme in schemes.values()} == {"bearer", "x-api-key"}
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
