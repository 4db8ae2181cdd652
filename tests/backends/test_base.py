from __future__ import annotations

from pathlib import Path

from djl_trtllm.model import inspect
from tests.backends.echo.backend import EchoBackend
from tests.engines.helpers import CPU_ONLY


def test_a_backend_is_not_selected_by_auto_unless_it_says_so(checkpoint: Path) -> None:
    backend = EchoBackend()
    assert (backend.offer(inspect(checkpoint), CPU_ONLY), backend.usual(CPU_ONLY)) == ((None, ""), None)
