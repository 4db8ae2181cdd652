"""Which running sequences give their places to another client.

A client that is alone may take all places. When another one comes, of which nothing runs, that client gives some of
them back: its sequences are cancelled in the executor and go on later, as after the loss of an engine process
(`resuming`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from djl_trtllm.batching.places import Places
from djl_trtllm.batching.resuming import can_resume
from djl_trtllm.batching.slot import Slot

_MOST_MOVES = 2
"""How often a sequence gives its place away."""


def to_move(running: Mapping[int, Slot], starving: Slot, places: Places, clients: int) -> dict[int, Slot]:
    """Those of the client with most places that make room for `starving`, the last ones first; none if not enough can.

    A client keeps its share of the places, `clients` being how many have requests.
    """
    most = max((slot.client for slot in running.values()), key=lambda client: client.running, default=None)
    if most is None:
        return {}
    available = places.executor.limits.kv_blocks or math.inf
    sequences = places.sequences + starving.beams - places.max_running
    blocks = places.blocks + starving.blocks * starving.beams - available
    left = most.running - max(1, places.max_running // max(1, clients))
    found: dict[int, Slot] = {}
    for request_id in reversed(list(running)):
        if sequences <= 0 and blocks <= 0:
            return found
        slot = running[request_id]
        if len(found) < left and slot.client is most and slot.places is places and _can_move(slot, places):
            found[request_id] = slot
            sequences -= 1
            blocks -= slot.blocks
    return found if sequences <= 0 and blocks <= 0 else {}


def _can_move(slot: Slot, places: Places) -> bool:
    """Whether it can go on later, however many tokens come before its cancellation takes effect."""
    message, limits, generated = slot.message, places.executor.limits, len(slot.sequence.token_ids)
    return (
        slot.movable
        and slot.moves < _MOST_MOVES
        and slot.sequence.finished is None
        and can_resume(message, max(1, generated), limits)
        and can_resume(message, message.sampling.max_new_tokens, limits)
    )
