from __future__ import annotations

from typing import Any, NamedTuple


class LogprobsLists(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any


class LogprobsTensors(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
