"""What clients ask the server's own paths for and what it answers: the table is `dialogues.json`."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.api.registry import DIALECTS
from djl_trtllm.model import Tokenizer
from djl_trtllm.server import routes
from tests.support.dialogues import Dialogues
from tests.support.in_process import Hosts
from tests.support.plugin import Trial

DIALOGUES = Dialogues(__file__)


@pytest.mark.parametrize("rule", DIALOGUES.rules)
async def test_the_server_answers_as_in_the_dialogue(
    hosts: Hosts, tokenizer: Tokenizer, tmp_path: Path, rule: str
) -> None:
    await DIALOGUES.check(rule, hosts, tokenizer, tmp_path)


async def test_an_unknown_path_is_refused_beside_a_dialect_without_paths(
    hosts: Hosts, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a dialect of a package is served by gRPC only."""

    class WithoutPaths(Trial):
        paths = pages = actions = ()  # type: ignore[assignment]  # fewer than the trial has

    monkeypatch.setattr(routes, "DIALECTS", (WithoutPaths(), *DIALECTS))
    rule = "an unknown path is refused as the API does whose paths are like it"
    await DIALOGUES.check(rule, hosts, tokenizer, tmp_path)
