from __future__ import annotations

from typing import Any


def expand_batch_to_tokens(x: Any, cu_num_tokens: Any, num_tokens: int) -> Any:
    raise NotImplementedError
