"""Long prompts keep nobody waiting for /ping. (benchmarks/end_to_end.py measures how short the stalls are.)"""

from __future__ import annotations

import threading
import time

from tests.support.harness import Server, body
from tests.support.prompts import story
from tests.support.reference import Reference


def test_ping_stays_fast_while_long_prompts_are_read(server: Server, reference: Reference) -> None:
    long = [reference.ids(f"Story number {number}. {story(200, number)}")[1:2100] for number in range(8)]
    prompts = [reference.tokenizer.decode(ids) for ids in long]
    assert all(2000 < len(reference.ids(prompt)) < 2560 for prompt in prompts)
    done = threading.Event()
    seconds: list[float] = []

    def ping() -> None:
        while not done.is_set():
            started = time.monotonic()
            assert server.ping() == 200
            seconds.append(time.monotonic() - started)
            time.sleep(0.005)

    pinging = threading.Thread(target=ping)
    pinging.start()
    try:
        answers = server.together([body(prompt, stream=True, max_new_tokens=4) for prompt in prompts])
    finally:
        done.set()
        pinging.join()
    assert all(answer.complete for answer in answers)
    assert len(seconds) > 20
    seconds.sort()
    assert seconds[len(seconds) * 9 // 10] < 0.1
    assert seconds[-1] < 1
