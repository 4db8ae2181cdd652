"""A gateway's call of one of a model's replicas."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from djl_trtllm.cluster.forwarding import ForwardedRequest, Head, IncompleteResponseError
from djl_trtllm.cluster.known_replicas import has_replica, is_waiting, replicas_of, waits_for_replica
from djl_trtllm.errors import NotReadyError

_NO_REPLICA_SECONDS = 30.0
"""How long a request waits while its model has no replica: one that is replaced may be there soon."""
_LOOK_SECONDS = 1.0


class ReplicaCall:
    """A call of `handle`, which begins at once. First the response's `head` is read, then `rest`, its other bytes.

    `cancel` must be called in the end, whatever has become of the call.
    """

    def __init__(self, model: str, handle: Any, request: ForwardedRequest) -> None:
        self._model = model
        self._request = replace(request)  # one of its own: the same request may be for several models
        waits_for_replica(self._request)
        self.rest: Any = handle.remote(self._request)

    def cancel(self) -> None:
        has_replica(self._request)
        self.rest.cancel()

    async def head(self) -> Head:
        """Raises NotReadyError if the model has had no replica for 30 s, and what the call raises."""
        first: asyncio.Future[Head] = asyncio.ensure_future(anext(self.rest))
        first.add_done_callback(_read)
        try:
            await self._accepted(first)
            return await first
        except StopAsyncIteration:
            raise IncompleteResponseError("the response has no beginning") from None
        finally:
            first.cancel()

    async def _accepted(self, first: asyncio.Future[Head]) -> None:
        """Until a replica has the request, or the call has failed. One that is to end still answers what it has."""
        clock = asyncio.get_running_loop().time
        there_at = clock()
        while not (await asyncio.wait({first}, timeout=_LOOK_SECONDS))[0] and is_waiting(self._request):
            if replicas_of(self._model):
                there_at = clock()
            elif clock() - there_at >= _NO_REPLICA_SECONDS:
                reason = "it is being loaded, or Ray has no room for it (`serve status`)"
                raise NotReadyError(f"model {self._model} has no replica: {reason}", retry_after=10)


def _read(first: asyncio.Future[Head]) -> None:
    """Take the error of a call that was given up, which nobody else reads."""
    if not first.cancelled():
        first.exception()
