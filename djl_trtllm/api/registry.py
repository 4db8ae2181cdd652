"""The dialects that are served, a line for each of this package, and those that other packages' entry points name.

It also has the kinds of bodies on the paths that take bodies of several dialects.
"""

import pkgutil
from collections.abc import Iterator

from djl_trtllm.api.base import Dialect
from djl_trtllm.api.dialects.embeddings import EMBEDDINGS, TEI
from djl_trtllm.api.dialects.lmi.dialect import Body, Lmi
from djl_trtllm.api.dialects.messages import MESSAGES
from djl_trtllm.api.dialects.openai.dialect import OPENAI
from djl_trtllm.api.dialects.rerank import RERANK
from djl_trtllm.api.dialects.responses import RESPONSES
from djl_trtllm.api.dialects.tgi import TGI
from djl_trtllm.api.dialects.triton.dialect import TRITON
from djl_trtllm.api.dialects.truss import TRUSS
from djl_trtllm.config import Task
from djl_trtllm.errors import ConfigError
from djl_trtllm.plugins import API_DIALECTS, plugins


def _installed() -> Iterator[Dialect]:
    """The dialects of other packages. Raises ConfigError for one that is not usable."""
    for name, place in plugins(API_DIALECTS).items():
        point = f"the entry point {name} = {place} ({API_DIALECTS})"
        try:
            found = pkgutil.resolve_name(place)
        except Exception as error:
            raise ConfigError(
                f"{point} cannot be loaded: {type(error).__name__}: {error}; update or uninstall its package"
            ) from error
        if not isinstance(found, Dialect):
            raise ConfigError(
                f"{point} is a {type(found).__name__}: expected an object of a class derived from Dialect"
            )
        yield found


BODIES = (
    Body("prompt", OPENAI, "/v1/completions"),
    Body("messages", MESSAGES, "/v1/messages", mark="anthropic_version"),
    Body("messages", MESSAGES, "/v1/messages", mark="anthropic-version"),
    Body("messages", OPENAI, "/v1/chat/completions"),
    Body("input", RESPONSES, "/v1/responses"),
    Body("inputs"),
    Body("input", EMBEDDINGS, "/v1/embeddings", task=Task.EMBED),
    Body("inputs", task=Task.EMBED),
    Body("query", RERANK, "/rerank", task=Task.SCORE),
    Body("text_1", RERANK, "/score", task=Task.SCORE),
)
"""The bodies that each path of LMI takes, and DJL's handlers: a request is what its members say (`Body`)."""

LMI = Lmi(BODIES)

DIALECTS: list[Dialect] = [
    LMI,
    EMBEDDINGS,
    MESSAGES,
    OPENAI,
    RERANK,
    RESPONSES,
    TEI,
    TGI,
    TRITON,
    TRUSS,
    *_installed(),
]
"""The server mounts the paths of all of them."""

DEFAULT: Dialect = LMI
"""The dialect inside DJL Serving, and the format of errors on paths that belong to no dialect."""
