"""One test's failure does not take the others' server down."""

from __future__ import annotations

import pytest

from tests.trtllm.conftest import START_SECONDS, Installation, ask
from tests.trtllm.kept import KeptServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_SECONDS)]


def test_a_server_that_was_left_broken_is_replaced(installation: Installation, kept_server: KeptServer) -> None:
    if not installation.is_fake:
        pytest.skip("it takes another start")
    first = kept_server.get()
    assert kept_server.get() is first
    first.process.kill()
    first.process.wait()
    second = kept_server.get()
    assert second is not first
    assert ask(second, "the wolf", max_new_tokens=4).status_code == 200
