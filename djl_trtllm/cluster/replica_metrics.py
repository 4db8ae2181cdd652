"""`GET /metrics` of a gateway: the samples of all replicas on one page, each with its deployment and replica.

Replicas behind a gateway have no port that Prometheus could ask. The labels are those of Ray's own metrics.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any

from djl_trtllm.api import Reply
from djl_trtllm.cluster.forwarding import ForwardedRequest, Head
from djl_trtllm.cluster.known_replicas import replicas_of
from djl_trtllm.cluster.replica_call import ReplicaCall
from djl_trtllm.errors import NotReadyError, OverloadedError
from djl_trtllm.server.metric_families import PREFIX
from djl_trtllm.service.worker_threads import run_by_size

logger = logging.getLogger(__name__)

_REPLICA = b"x-replica"
_REPLICA_SECONDS = 3.0
"""What a replica has to answer in."""
_PAGE_SECONDS = 8.0
"""What all have together: Prometheus waits for ten by default."""
_REPLICAS_AT_ONCE = 16
_PAGES_AT_ONCE = 4
_MOST_BYTES = 64 * 1024 * 1024
"""Of a page: more than a thousand replicas have."""

_HEAD = re.compile(rb"^(# HELP (\S+) .*\n# TYPE .*\n)", re.MULTILINE)
_NAME = re.compile(rb"^([a-zA-Z_:][\w:]*)(\{)?", re.MULTILINE)

Pages = dict[tuple[str, str], Head | None]
"""The answers of replicas by deployment and replica; None where there is none."""


class ReplicaMetrics:
    """Asks the replicas of `models`, by name of their deployment: its handle."""

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models = models
        self._pages = 0
        self._places = asyncio.Semaphore(_REPLICAS_AT_ONCE)

    async def reply(self, request: ForwardedRequest) -> Reply:
        """The page that the client of `request` gets: the replicas check its key. Raises RequestError."""
        if self._pages >= _PAGES_AT_ONCE:
            raise OverloadedError(
                f"{self._pages} pages of metrics are being made, and no more than {_PAGES_AT_ONCE} may",
                queue_depth=self._pages,
                capacity=_PAGES_AT_ONCE,
                retry_after=1,
            )
        self._pages += 1
        try:
            asked = _Asked(self._places, request)
            models = (asked.all(name, handle) for name, handle in self._models.items())
            try:
                await asyncio.wait_for(asyncio.gather(*models), _PAGE_SECONDS)
            except asyncio.TimeoutError:
                logger.warning("a page of metrics has not all replicas after %s s", _PAGE_SECONDS)
            return await run_by_size(asked.size, lambda: _page(asked.pages))
        finally:
            self._pages -= 1


@dataclass
class _Asked:
    """The replicas that were asked for a page, and what they said."""

    places: asyncio.Semaphore
    request: ForwardedRequest
    pages: Pages = field(default_factory=dict)
    size: int = 0

    def __post_init__(self) -> None:
        # In Prometheus' own format, which has no last line: pages of OpenMetrics cannot be put together.
        headers = [(name, value) for name, value in self.request.scope["headers"] if name.lower() != b"accept"]
        self.request = replace(self.request, scope={**self.request.scope, "headers": headers})

    async def all(self, deployment: str, handle: Any) -> None:
        """Ask all replicas of a deployment."""
        if not replicas_of(deployment):
            await self._one(deployment, "", handle)  # then Ray has said which there are
        there = [replica for replica in replicas_of(deployment) if (deployment, replica) not in self.pages]
        self.pages |= dict.fromkeys(((deployment, replica) for replica in there), None)
        # Ray takes calls in the context of one request for one call, which has one replica.
        calls = (Context().run(asyncio.ensure_future, self._one(deployment, replica, handle)) for replica in there)
        await asyncio.gather(*calls)

    async def _one(self, deployment: str, replica: str, handle: Any) -> None:
        async with self.places:
            call = ReplicaCall(deployment, handle, replace(self.request, replica=replica))
            try:
                head = await asyncio.wait_for(call.whole(), _REPLICA_SECONDS)
            except Exception as error:  # Ray raises whatever has become of the replica
                logger.warning("replica %s of %s gives no metrics: %r", replica or "any", deployment, error)
                return
            finally:
                call.cancel()
        self.size += len(head.body)
        if self.size > _MOST_BYTES:
            logger.warning("a page of metrics has more than %d bytes without replica %s", _MOST_BYTES, replica)
        else:
            self.pages[deployment, head.header(_REPLICA) or replica] = head


def _page(pages: Pages) -> Reply:
    """Raises NotReadyError if no replica has answered."""
    answers = [head for head in pages.values() if head is not None]
    given = {of: head.body for of, head in pages.items() if head is not None and head.status == 200}
    if not answers:
        raise NotReadyError("no replica has answered", retry_after=1)
    if not given:  # such as the key that is missing
        worst = max(answers, key=lambda head: head.status)
        return Reply(worst.status, worst.header(b"content-type"), worst.body)
    text = joined(given) + _whether_there(pages, given)
    return Reply(200, next(head for head in answers if head.status == 200).header(b"content-type"), text)


def joined(pages: Mapping[tuple[str, str], bytes]) -> bytes:
    """Texts for Prometheus as one, in which each sample has the labels of its text, deployment and replica.

    A replica's text takes a millisecond; prometheus_client's parser alone would take ten.
    """
    heads: dict[bytes, bytes] = {}
    samples: dict[bytes, list[bytes]] = {}
    for of, text in pages.items():
        _, *parts = _HEAD.split(text)
        # Of each family: its head, the name in it, and its samples.
        for head, name, lines in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            heads.setdefault(name, head)
            samples.setdefault(name, []).append(_labelled(lines, _labels(*of)))
    return b"".join(part for name, head in heads.items() for part in (head, *samples[name]))


def _labelled(lines: bytes, labels: bytes) -> bytes:
    return _NAME.sub(lambda found: found[1] + b"{" + labels + (b"," if found[2] else b"}"), lines)


def _labels(deployment: str, replica: str) -> bytes:
    values = (value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for value in (deployment, replica))
    return 'deployment="{}",replica="{}"'.format(*values).encode()


def _whether_there(pages: Pages, given: Mapping[tuple[str, str], bytes]) -> bytes:
    name = f"{PREFIX}replica_scraped"
    lines = [
        f"# HELP {name} 1 if the samples of the replica are on this page, 0 if it has not answered.",
        f"# TYPE {name} gauge",
        *(f"{name}{{{_labels(*of).decode()}}} {int(of in given)}.0" for of in pages),
    ]
    return "\n".join(lines).encode() + b"\n"
