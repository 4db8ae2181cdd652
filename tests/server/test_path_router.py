"""A path is found by itself before those with placeholders, wherever the application lies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from djl_trtllm.server.path_router import PathRouter

PATHS = ("/v2/{model}", "/v2/{model}:predict", "/v2/models", "/v2/models/ready", "/v2/models/{name}", "/{rest:path}")


class Named:
    """Answers with its name and the parameters of the path."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._name == "default" or scope["endpoint"] is self
        await send({"type": "http.response.start", "status": 200, "headers": []})
        text = f"{self._name} {sorted((scope['path_params'] if self._name != 'default' else {}).items())}"
        await send({"type": "http.response.body", "body": text.encode()})


@contextlib.asynccontextmanager
async def life(app: Router) -> AsyncIterator[None]:
    yield


def answer(application: ASGIApp, path: str, root_path: str = "") -> str:
    return asyncio.run(_answer(application, path, root_path))


async def _answer(application: ASGIApp, path: str, root_path: str) -> str:
    transport = httpx.ASGITransport(application, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return (await client.get(path)).text


@pytest.mark.parametrize("root_path", ["", "/app"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v2/models", "/v2/models []"),
        ("/v2/models/ready", "/v2/models/ready []"),
        ("/v2/models/story", "/v2/models/{name} [('name', 'story')]"),
        ("/v2/story:predict", "/v2/{model}:predict [('model', 'story')]"),
        ("/v2/story", "/v2/{model} [('model', 'story')]"),
        ("/elsewhere", "/{rest:path} [('rest', 'elsewhere')]"),
        ("/v2/models/", "/{rest:path} [('rest', 'v2/models/')]"),
    ],
)
def test_the_path_with_the_most_fixed_characters_answers(path: str, expected: str, root_path: str) -> None:
    router = PathRouter({path: Named(path) for path in PATHS}, Named("default"), life)
    assert answer(router, root_path + path, root_path) == expected


def test_below_another_applications_path_only_the_rest_counts() -> None:
    router = PathRouter({path: Named(path) for path in ("/models", "/v2/models")}, Named("default"), life)
    assert answer(router, "/v2/models", "/v2") == "/models []"


def test_parameters_of_an_outer_application_stay() -> None:
    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        await router({**scope, "path_params": {"tenant": "t"}}, receive, send)

    router = PathRouter({"/models": Named("models")}, Named("default"), life)
    assert answer(outer, "/models") == "models [('tenant', 't')]"


def test_a_path_with_a_placeholders_characters_is_not_looked_up() -> None:
    router = PathRouter({"/v2/{model}": Named("model")}, Named("default"), life)
    assert answer(router, "/v2/%7Bmodel%7D") == "model [('model', '{model}')]"


def test_another_path_is_the_defaults() -> None:
    router = PathRouter({"/v2/models": Named("models")}, Named("default"), life)
    assert answer(router, "/v2/model") == "default []"
    assert answer(router, "/v2/models/") == "default []"


def test_a_path_without_placeholders_is_compared_with_no_route() -> None:
    router = PathRouter({path: Named(path) for path in PATHS}, Named("default"), life)
    router.routes.clear()
    assert answer(router, "/v2/models/ready") == "/v2/models/ready []"
