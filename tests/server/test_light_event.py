from __future__ import annotations

import asyncio

import pytest

from djl_trtllm.server.light_event import LightEvent


def run(event: LightEvent, *steps: str) -> list[str]:
    """What became of two that wait, after these steps: methods to call, the number of one to cancel, `turn`."""

    async def body() -> list[str]:
        waiting = [asyncio.ensure_future(event.wait()) for _ in range(2)]
        await asyncio.sleep(0)
        for step in steps:
            if step.isdecimal():
                waiting[int(step)].cancel()
            elif step == "turn":
                await asyncio.sleep(0)
            else:
                getattr(event, step)()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        found = ["cancelled" if each.cancelled() else "over" if each.done() else "waits" for each in waiting]
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return found

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ((), ["waits", "waits"]),
        (("set",), ["over", "over"]),
        (("set", "set", "clear"), ["over", "over"]),
        (("clear",), ["waits", "waits"]),
        (("0",), ["cancelled", "waits"]),
        (("0", "set"), ["cancelled", "over"]),
        (("0", "turn", "set"), ["cancelled", "over"]),
    ],
)
def test_all_wait_until_it_is_set(steps: tuple[str, ...], found: list[str]) -> None:
    event = LightEvent()
    assert run(event, *steps) == found
    assert event.is_set() is (steps[-1:] == ("set",))
    assert event._waiting == ()


def test_nobody_waits_for_one_that_is_set() -> None:
    assert run(LightEvent(is_set=True)) == ["over", "over"]
