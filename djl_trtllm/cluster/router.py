"""The router that Ray's HAProxy asks for each POST which replica answers it (docs/ray.md)."""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any

import orjson
from ray import serve
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from djl_trtllm.cluster import ray_names
from djl_trtllm.routing.affinity import PromptKeys
from djl_trtllm.routing.fleet import Fleet, Load, Question, Sent

_SESSION = "x-session-id"
_TRUNCATED = "x-body-truncated"
_TOGETHER_SECONDS = 0.05
"""Seconds for each router of the fleet for which one collects news before it sends them to the others."""
_TELL_SECONDS = 5.0
_MOST_NEWS = 10_000

logger = logging.getLogger(__name__)


class Router:
    """The deployment that HAProxy asks: Ray starts one on each node that has a HAProxy.

    HAProxy sends the beginning of the body to `POST /internal/route`, gets the replica's id, and passes the request on:
    tokens go from the replica to HAProxy and to the client. Ray has such a router for its own LLM servers. It takes
    bodies with `messages` or `prompt` only, remembers all prompts without end by default, and comes with a package that
    imports engines; ours takes each dialect, is bounded, and knows which requests have ended replicas.

    `replicas` is the handle of the deployment that has the replicas.
    """

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas
        self._fleet = Fleet(on_death=self._accuse, on_sent=self._sent)
        self._news: deque[Sent] = deque(maxlen=_MOST_NEWS)
        self._name, self._routers = "", 1
        self._all: Any = None
        """The handle of all routers. Making one asks controller and head, and the event loop waits for both."""
        self._telling: set[asyncio.Task[None]] = set()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray calls it when the router starts."""
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._all = serve.get_deployment_handle(context.deployment, context.app_name)
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
        await self._ask(Question(PromptKeys(), "", digest, replica))

    async def accused(self, digests: list[str], replica: str) -> None:
        """Another router had sent these requests to a replica that died: they are suspects here, too."""
        self._fleet.accuse(digests, replica)

    async def _ask(self, question: Question) -> None:
        async with self._replicas.choose_replica(question, self._fleet, **ray_names.UNDISPATCHED):
            pass

    async def heard(self, router: str, news: list[Sent]) -> None:
        """Take in the requests that a router has sent to replicas."""
        if router != self._name:
            for sent in news:
                self._fleet.note(sent)

    def _accuse(self, digests: set[str], replica: str) -> None:
        self._background(self._tell("accused", list(digests), replica))

    def _sent(self, sent: Sent) -> None:
        self._news.append(sent)
        if len(self._news) == 1:
            self._background(self._tell_news())

    async def _tell_news(self) -> None:
        await asyncio.sleep(_TOGETHER_SECONDS * self._routers)
        news = list(self._news)
        self._news.clear()
        await self._tell("heard", self._name, news)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, method: str, *arguments: object) -> None:
        """Call a method of all routers. One that has died does not hear it, and keeps it from no other one."""
        try:
            said = self._all.broadcast(method, *arguments)
            self._routers = len(await said.results_async(timeout_s=_TELL_SECONDS, return_exceptions=True))
        except Exception as error:  # of Ray, whatever it is: requests are routed all the same
            logger.info("other routers were not told: %s", error)


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Any to mypy, which does not read Ray
    """The choice of a replica as Ray asks for it; the fleet of the router that asks makes it.

    Ray sends all of this module with the class, and so has each of its classes twice.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica for a request of a `Router`, and all replicas for another call."""
        question, fleet = pending_request.args if pending_request and len(pending_request.args) == 2 else (None, None)
        if not isinstance(question, Question) or not isinstance(fleet, Fleet) or not candidate_replicas:
            return [candidate_replicas]
        there = {replica.replica_id.to_full_id_str(): replica for replica in candidate_replicas}
        addresses = {name: ray_names.address(replica) for name, replica in there.items()}
        fleet.update({name: address for name, address in addresses.items() if address is not None}, there)
        fleet.route(question, {name: Load(**replica.routing_stats) for name, replica in there.items()})
        return [[there.get(question.replica, candidate_replicas[0])]]
