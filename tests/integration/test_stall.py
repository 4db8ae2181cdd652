"""Long prompts keep nobody waiting for /ping. (benchmarks/end_to_end.py measures how short the stalls are.)"""

from __future__ import annotations

import pytest

from djl_trtllm.model import Tokenizer
from tests.support.client import lmi
from tests.support.pinging import Pinging
from tests.support.prompts import story
from tests.support.server import Server

pytestmark = pytest.mark.slow

PROMPTS = 8


def test_ping_is_answered_while_long_prompts_are_read(server: Server, tokenizer: Tokenizer) -> None:
    prompts = [f"Story number {number}. {story(145, number)}" for number in range(PROMPTS)]
    assert all(2000 < len(tokenizer.encode(prompt)) < 2560 for prompt in prompts)
    with Pinging(server) as pinging:
        answers = server.together([lmi(prompt, stream=True, max_new_tokens=4) for prompt in prompts])
    assert all(answer.complete for answer in answers)
    assert set(pinging.statuses) == {200}
    begun, told = max(answer.asked for answer in answers), max(answer.arrivals[0] for answer in answers)
    # An engine that held the server up would let it answer once between two steps, of which there are few.
    assert sum(begun < at < told for at, _ in pinging.seen) > 10 * PROMPTS
