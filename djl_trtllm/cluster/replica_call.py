"""A gateway's call of one of a model's replicas."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError

from djl_trtllm.cluster.forwarding import ForwardedRequest, Head, IncompleteResponseError
from djl_trtllm.cluster.known_replicas import begin_waiting, end_waiting, is_waiting, replicas_of
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
        self._request = replace(request)  # its identity is that of this call: attempts and models share the original
        begin_waiting(self._request)
        try:
            self.rest: Any = handle.remote(self._request)
        except BaseException:
            end_waiting(self._request)
            raise

    def cancel(self) -> None:
        """End the call, if it has not ended."""
        end_waiting(self._request)
        self.rest.cancel()

    async def head(self) -> Head:
        """Raises NotReadyError if no replica comes for 30 s, or none can, and what the call raises."""
        first: asyncio.Future[Head] = asyncio.ensure_future(anext(self.rest))
        first.add_done_callback(_retrieve_error)
        try:
            await self._wait_for_replica(first)
            return await first
        except StopAsyncIteration:
            raise IncompleteResponseError("the response has no beginning") from None
        except DeploymentUnavailableError as error:
            raise NotReadyError(f"model {self._model} cannot be loaded (`serve status`)", retry_after=10) from error
        finally:
            first.cancel()

    async def whole(self) -> Head:
        """The response in one. Raises as `head` does."""
        head = await self.head()
        if head.whole:
            return head
        rest = [part async for part in self.rest]
        return replace(head, body=b"".join((head.body, *rest)), whole=True)

    async def _wait_for_replica(self, first: asyncio.Future[Head]) -> None:
        """Return once a replica has accepted the request, or the call has ended.

        From then on that replica answers, also if Ray no longer lists it.
        """
        clock = asyncio.get_running_loop().time
        there_at = clock()
        while not (await asyncio.wait({first}, timeout=_LOOK_SECONDS))[0] and is_waiting(self._request):
            if replicas_of(self._model):
                there_at = clock()
            elif clock() - there_at >= _NO_REPLICA_SECONDS:
                reason = "it is being loaded, or Ray has no room for it (`serve status`)"
                raise NotReadyError(f"model {self._model} has no replica: {reason}", retry_after=10)


def _retrieve_error(first: asyncio.Future[Head]) -> None:
    """Nobody else reads the error of a call that was given up."""
    if not first.cancelled():
        first.exception()
