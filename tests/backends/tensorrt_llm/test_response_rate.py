from __future__ import annotations

import pytest

from djl_trtllm.backends.tensorrt_llm.response_rate import ResponseRate


class Clocks:
    """An engine process that has spent a share of the time on responses."""

    def __init__(self, interval: int = 1) -> None:
        self.now = self.cpu = 1000.0
        self.responses = 5
        self.rate = ResponseRate(interval, lambda: self.now, lambda: self.cpu)
        self.rate.look(self.responses, 0)

    def window(self, share: float, of_stream: float, streams: int = 256, seconds: float = 30.0) -> str | None:
        """What is advised after this number of seconds, looked at twice per second."""
        advice = []
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            self.cpu += 0.5 * share
            self.responses += round(0.5 * of_stream * streams)
            advice.append(self.rate.look(self.responses, streams))
        assert not any(advice[:-1])
        return advice[-1]


def test_a_busy_process_is_told_the_interval_that_would_halve_its_share() -> None:
    clocks = Clocks()
    assert clocks.window(0.88, 110) == (
        "option.stream_interval=3 would pay: 28,160 TensorRT-LLM responses per second take 0.88 of the one core that "
        "reading them can use, with 110 iterations per second. With 3 iterations in a response it is about 0.29, and a "
        "stream still gets 37 chunks per second"
    )


@pytest.mark.parametrize(("share", "advised"), [(0.69, False), (0.71, True)])
def test_nothing_is_advised_while_the_process_keeps_up(share: float, advised: bool) -> None:
    assert (Clocks().window(share, 110) is not None) == advised


def test_it_takes_a_whole_window() -> None:
    clocks = Clocks()
    assert clocks.window(1.0, 110, seconds=29.5) is None
    clocks = Clocks()
    assert clocks.window(1.0, 110, seconds=30.0) is not None


def test_an_idle_window_does_not_dilute_the_next() -> None:
    clocks = Clocks()
    assert clocks.window(0.0, 0, streams=0) is None
    assert "28,160 TensorRT-LLM responses" in str(clocks.window(0.88, 110))


def test_what_is_set_counts() -> None:
    assert "option.stream_interval=6 would pay" in str(Clocks(interval=2).window(0.88, 55))
    assert "with 110 iterations per second" in str(Clocks(interval=2).window(0.88, 55))


def test_a_stream_keeps_ten_chunks_per_second() -> None:
    assert "option.stream_interval=2 would pay" in str(Clocks().window(1.0, 29))
    assert Clocks().window(1.0, 19) is None


def test_the_same_is_not_advised_again_but_more_is() -> None:
    clocks = Clocks()
    assert "option.stream_interval=3 " in str(clocks.window(0.8, 110))
    assert clocks.window(0.8, 110) is None
    assert clocks.window(0.0, 110) is None
    advice = str(clocks.window(1.3, 110))
    assert "option.stream_interval=4 " in advice
    assert "28,160 TensorRT-LLM responses per second take 1.30 of" in advice


def test_the_time_of_streams_is_that_of_the_window() -> None:
    for _ in range(2):
        clocks = Clocks()
        assert "with 110 iterations per second" in str(clocks.window(0.88, 110, streams=1))
