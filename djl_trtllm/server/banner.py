"""What `serve` prints on a terminal when its models are ready: where it is, and a request to try."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from djl_trtllm.logs.formats import printable
from djl_trtllm.version import __version__

_EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104
_BODY = '{"inputs": "Once upon a time", "parameters": {"max_new_tokens": 64}, "stream": true}'


def banner(url: str, models: Sequence[str], pages: Sequence[tuple[str, str]], *, key: bool) -> str:
    """The lines. `pages` have a name and a path each; `key`: requests need an API key."""
    path = "/invocations" if len(models) == 1 else f"/predictions/{models[0]}"
    headers = ["-H 'Content-Type: application/json'", *(['-H "Authorization: Bearer $KEY"'] if key else [])]
    curl = " ".join(["curl -N", shlex.quote(url + path), *headers, "-d", shlex.quote(_BODY)])
    rows = [("address", url), *((name, url + place) for name, place in pages), ("try", curl)]
    lines = [f"djl-trtllm {__version__} serves {', '.join(models)}", *(f"  {name:<8} {text}" for name, text in rows)]
    return printable("\n".join(lines))


def address(scheme: str, host: str, port: int) -> str:
    """The server's address for a client on the same machine."""
    if host in _EVERYWHERE:
        host = "localhost"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
