"""What the integration tests of model-hosting-container-standards send, sent to this server.

Source: aws/model-hosting-container-standards (0.1.17, @d77870c), python/tests/integration. Each of its tests makes a
FastAPI application in its own process, so they cannot be pointed at a port: here are their requests and what they
expect of the responses, class by class. docs/verification.md lists what is left out, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.adapters import lora_tensors, write_adapter
from tests.support.models import scripted_model, tensorrt_llm_model
from tests.support.server import Server, serving

SESSION = "X-Amzn-SageMaker-Session-Id"
NEW = "X-Amzn-SageMaker-New-Session-Id"
CLOSED = "X-Amzn-SageMaker-Closed-Session-Id"
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
DISABLED = "Invalid payload. stateful sessions not enabled"
REQUEST = {"inputs": "the wolf", "parameters": {"max_new_tokens": 2}}


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stateful")
    given = {
        "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "true",
        "SAGEMAKER_SESSIONS_PATH": str(folder / "sessions"),
        "SAGEMAKER_SESSIONS_EXPIRATION": "600",
    }
    with serving(scripted_model(folder / "model", {}), folder, **given) as server:
        yield server


@pytest.fixture(scope="module")
def stateless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stateless")
    with serving(scripted_model(folder / "model", {}), folder) as server:
        yield server


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("adapting")
    model, fake = tensorrt_llm_model(folder / "model", {}, **{"option.enable_lora": "true"})
    for name in ("a", "b", "c"):
        write_adapter(model / "adapters" / "more" / name)
    (write_adapter(model / "adapters" / "more" / "bare") / "adapter_model.safetensors").unlink()
    write_adapter(model / "adapters" / "wide", lora_tensors(rank=128))
    with serving(model, folder, **fake) as server:
        yield server


def post(server: Server, content: Any, session: str | None = None) -> httpx.Response:
    return server.http.post("/invocations", json=content, headers={} if session is None else {SESSION: session})


def opened(server: Server) -> str:
    """The identifier of a new session: TestSessionCreation."""
    answer = post(server, {"requestType": "NEW_SESSION"})
    assert answer.status_code == 200
    assert "session" in answer.text.lower()
    identifier, _, expires = answer.headers[NEW].partition("; ")
    assert len(identifier) == 36
    assert expires.startswith("Expires=")
    return identifier


def closed(server: Server, session: str) -> None:
    """Close it: TestSessionClosure."""
    answer = post(server, {"requestType": "CLOSE"}, session)
    assert (answer.status_code, answer.headers[CLOSED]) == (200, session)


def test_sessions_live_beside_each_other_until_they_are_closed(stateful: Server) -> None:
    """TestSessionUsage, TestSessionEndToEndFlow."""
    sessions = [opened(stateful) for _ in range(3)]
    assert len(set(sessions)) == 3
    assert post(stateful, REQUEST).status_code == 200
    for session in (*sessions, *sessions):
        assert post(stateful, REQUEST, session).status_code == 200
    closed(stateful, sessions[0])
    assert post(stateful, REQUEST, sessions[0]).status_code == 400
    assert post(stateful, REQUEST, sessions[1]).status_code == 200
    for session in sessions[1:]:
        closed(stateful, session)


@pytest.mark.parametrize(
    ("content", "session", "statuses"),
    [
        (REQUEST, "invalid-session-id", {400}),
        ({"requestType": "CLOSE"}, "nonexistent-id", {400, 424}),
        ({"requestType": "CLOSE"}, None, {400, 424}),
        ({"requestType": "INVALID_TYPE"}, None, {400}),
        ({"requestType": "NEW_SESSION", "extra_field": "not_allowed"}, None, {400}),
    ],
)
def test_wrong_uses_of_sessions_are_refused(
    stateful: Server, content: Any, session: str | None, statuses: set[int]
) -> None:
    """TestSessionErrorCases."""
    assert post(stateful, content, session).status_code in statuses


def test_without_sessions_what_names_one_is_refused(stateless: Server) -> None:
    """TestSessionsDisabled."""
    for content, session in (
        ({"requestType": "NEW_SESSION"}, None),
        ({"requestType": "CLOSE"}, "some-session-id"),
        (REQUEST, "invalid-session"),
    ):
        answer = post(stateless, content, session)
        assert answer.status_code == 400
        assert DISABLED in answer.text
    assert post(stateless, REQUEST).status_code == 200


def test_ping_and_invocations_answer_by_themselves(stateless: Server) -> None:
    """TestHandlerOverrideIntegration: the framework's own handlers."""
    assert stateless.http.get("/ping").status_code == stateless.http.post("/ping").status_code == 200
    assert stateless.http.post("/invocations", content=b"{invalid json}").status_code in (400, 424)


@pytest.mark.parametrize("by", ["json", "params"])
def test_an_adapter_is_registered_used_and_unregistered(adapting: Server, by: str) -> None:
    """TestLoRARouterRedirection, TestLoRARequestResponseTransformation, TestLoRAEndToEndFlow."""
    for name in ("a", "b", "c"):
        given: dict[str, Any] = {by: {"name": name, "src": f"more/{name}"}}
        answer = adapting.http.post("/adapters", **given)
        assert answer.status_code == 200, answer.text
    for name in ("a", "b"):
        assert adapting.http.post("/invocations", json=REQUEST, headers={ADAPTER: name}).status_code == 200
    assert adapting.http.delete("/adapters/a").status_code == 200
    assert adapting.http.post("/invocations", json=REQUEST, headers={ADAPTER: "c"}).status_code == 200
    assert adapting.http.post("/invocations", json=REQUEST).status_code == 200
    for name in ("b", "c"):
        answer = adapting.http.delete(f"/adapters/{name}")
        assert answer.status_code == 200
        assert name in answer.text


def test_an_adapter_that_the_engine_could_not_load_never_reaches_it(adapting: Server) -> None:
    """TensorRT-LLM's worker would end with it."""
    answer = adapting.http.post("/adapters", json={"name": "bare", "src": "more/bare"})
    assert answer.status_code == 400
    assert "adapters/more/bare holds no weights of an adapter: expected adapter_model.safetensors" in answer.text
    answer = adapting.http.post("/invocations", json=REQUEST, headers={ADAPTER: "wide"})
    assert answer.status_code >= 400
    assert "is 128, the engine takes adapters of rank 64 at most (option.max_lora_rank=64" in answer.text
    assert adapting.http.post("/invocations", json=REQUEST).status_code == 200


def test_wrong_uses_of_adapters_are_refused(adapting: Server) -> None:
    """TestLoRAErrorCases."""
    for content in ({"name": "test-adapter"}, {}):
        assert adapting.http.post("/adapters", json=content).status_code in (400, 422)
    # A path that ends with a slash is another one here; FastAPI has a route there for other methods.
    assert adapting.http.delete("/adapters/").status_code in (404, 405)
