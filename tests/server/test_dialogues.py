"""What clients ask the server's own paths for and what it answers: the table is `dialogues.json`."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.model import Tokenizer
from tests.support.dialogues import Dialogues
from tests.support.in_process import Hosts

DIALOGUES = Dialogues(__file__)


@pytest.mark.parametrize("rule", DIALOGUES.rules)
async def test_the_server_answers_as_in_the_dialogue(
    hosts: Hosts, tokenizer: Tokenizer, tmp_path: Path, rule: str
) -> None:
    await DIALOGUES.check(rule, hosts, tokenizer, tmp_path)
