"""`python -m tests.backends.echo.server ...`: `djl-trtllm` with one backend more."""

from __future__ import annotations

from djl_trtllm.backends.registry import register
from djl_trtllm.cli import main
from tests.backends.echo.backend import EchoBackend

if __name__ == "__main__":
    register(EchoBackend())
    main()
