"""A dialect that a program registers by one line, served as it is started from a shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.client import JSON, body
from tests.support.models import scripted_model
from tests.support.server import Server, running

PROGRAM = """
from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.cli import main
from tests.support.trial_dialect import TRIAL

DIALECTS.append(TRIAL)
main()
"""


@pytest.mark.parametrize(("path", "lines"), [("/trial", 2), ("/trial/scripted/stream", 6)])
def test_a_registered_dialect_is_served(path: str, lines: int, tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", {"steps_per_second": 20})
    with running(Server(model, program=("-c", PROGRAM))) as server:
        answer = server.http.post(path, content="the wolf\nred riding hood", headers={"tokens": "3"})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/lines")
        assert len(answer.text.splitlines()) == lines
        refused = server.http.post(path, content="")
        assert (refused.status_code, refused.text) == (400, "! no prompts for scripted\n")
        assert server.http.post("/invocations", content=body(3), headers=JSON).status_code == 200
