"""The dialects that this package serves: a line for each."""

from __future__ import annotations

from djl_trtllm.api.base import Dialect
from djl_trtllm.api.lmi.dialect import LMI
from djl_trtllm.api.openai.dialect import OPENAI
from djl_trtllm.api.tgi.dialect import TGI
from djl_trtllm.api.triton.dialect import TRITON
from djl_trtllm.api.truss.dialect import TRUSS

DIALECTS: list[Dialect] = [
    LMI,
    OPENAI,
    TGI,
    TRITON,
    TRUSS,
]
"""The server mounts the paths of all of them."""

DEFAULT: Dialect = LMI
"""The dialect inside DJL Serving, and the format of errors on paths that belong to no dialect."""
