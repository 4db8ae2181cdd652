"""The router that Ray's HAProxy asks for each POST which replica answers it (docs/ray.md).

HAProxy sends the beginning of the body to `POST /internal/route`, gets the replica's id, and passes the request on:
tokens go from the replica to HAProxy and to the client. Ray has such a router for its own LLM servers. It takes bodies
with `messages` or `prompt` only, remembers all prompts without end by default, and comes with a package that imports
engines; ours takes each dialect, is bounded, and knows which requests have ended replicas.
"""

from __future__ import annotations

from typing import Any

import orjson
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from djl_trtllm.cluster import ray_names
from djl_trtllm.routing.fleet import Fleet, Load, Question

_SESSION = "x-session-id"
_TRUNCATED = "x-body-truncated"


class Router:
    """The deployment that HAProxy asks; `replicas` is the handle of the one that has the replicas."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray calls it when the router starts."""
        return Starlette(routes=[Route("/{path:path}", self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        headers = request.headers
        question = Question.of(await request.body(), headers.get(_SESSION, ""), headers.get(_TRUNCATED, ""))
        await self._ask(question)
        said = {ray_names.CHOSEN: question.replica, ray_names.DIGEST: question.digest}
        if question.refused_for:
            said[ray_names.REFUSED] = f"{question.refused_for:.0f}"
        answer = orjson.dumps({"replica_id": question.replica, "request_headers": said})
        return Response(answer, media_type="application/json")

    async def moved(self, digest: str, replica: str) -> None:
        """HAProxy has given a request to this replica, because the chosen one had died or did not take it."""
        await self._ask(Question((), "", digest, replica))

    async def _ask(self, question: Question) -> None:
        async with self._replicas.choose_replica(question, **ray_names.UNDISPATCHED):
            pass


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Any to mypy, which does not read Ray
    """Ray's extension that chooses a replica, for a `Fleet`.

    Ray sends all of this module with it, and so has each of its classes twice: `Question` is in another one.
    """

    def initialize_state(self, slack: int) -> None:
        """`slack` is that of `Affinity`. Ray calls it with `request_router_kwargs`."""
        self._fleet = Fleet(slack)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray calls it when replicas have come or gone."""
        super().update_replicas(replicas)
        addresses = {replica.replica_id.to_full_id_str(): ray_names.address(replica) for replica in replicas}
        self._fleet.update({name: address for name, address in addresses.items() if address is not None})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica for a `Question`, and all of them for another call."""
        question = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(question, Question) or not candidate_replicas:
            return [candidate_replicas]
        there = {replica.replica_id.to_full_id_str(): replica for replica in candidate_replicas}
        self._fleet.route(question, {name: Load(**replica.routing_stats) for name, replica in there.items()})
        return [[there.get(question.replica, candidate_replicas[0])]]
