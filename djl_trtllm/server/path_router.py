"""Routing by path."""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send


class PathRouter(Router):
    """Finds a path without placeholders by one look-up; Starlette's router compares a request with every route.

    Of two paths with placeholders that match, the one with more fixed characters is meant: `{model}:predict` before
    `{model}`. `endpoints` are applications by path, `default` is the one for other paths.
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp], default: ASGIApp, lifespan: Lifespan[Router]) -> None:
        in_order = sorted(endpoints.items(), key=lambda item: -_fixed_characters(item[0]))
        routes = [Route(path, endpoint) for path, endpoint in in_order]
        super().__init__(routes, default=default, lifespan=lifespan, redirect_slashes=False)
        self._without_placeholders = {path: endpoint for path, endpoint in endpoints.items() if "{" not in path}

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Below another application's path, only Starlette knows which part of the path is ours.
        endpoint = None
        if scope["type"] == "http" and not scope.get("root_path"):
            endpoint = self._without_placeholders.get(scope["path"])
        if endpoint is None:
            await super().app(scope, receive, send)
            return
        scope.update(router=self, endpoint=endpoint, path_params=dict(scope.get("path_params", {})))
        await endpoint(scope, receive, send)


def _fixed_characters(path: str) -> int:
    return len(re.sub(r"\{.*?\}", "", path))
