"""The watch on vLLM's ranks, with processes of the names that vLLM gives them."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.process import BaseProcess

import pytest

from djl_trtllm.backends.vllm.ranks import REASONS, RankError, Ranks
from tests.support.processes import wait_until
from tests.support.tables import by_table

Start = Callable[..., BaseProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process of that name, which sleeps or has nothing to do; it ends after the test."""
    with ExitStack() as stack:

        def started(name: str, seconds: float = 600.0) -> BaseProcess:
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(seconds,), name=name)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            return process

        yield started


def ended(ranks: Ranks) -> bool:
    try:
        ranks.check()
    except RankError:
        return True
    return False


def test_a_rank_that_ends_is_named_with_its_process_and_no_other(start: Start) -> None:
    ranks = Ranks()
    with ranks.loading():
        start("VllmWorker-0")
        killed = start("VllmWorker-1")
        start("another", 0.0)
    ranks.check()
    killed.kill()
    wait_until(lambda: ended(ranks), what="the end of a rank")
    with pytest.raises(RankError, match=rf"rank 1 of vLLM \(process {killed.pid}\)") as caught:
        ranks.check()
    assert "rank 0" not in str(caught.value)


def test_a_load_that_fails_after_a_rank_has_ended_names_the_rank(start: Start) -> None:
    with pytest.raises(RankError, match="rank 1 of vLLM") as caught, Ranks().loading():
        first, second = start("VllmWorker-0"), start("VllmWorker-1", 0.3)
        second.join()
        time.sleep(0.5)
        first.kill()  # as vLLM does with the others, before it raises
        first.join()
        time.sleep(0.5)
        raise ValueError("see the log")
    assert "rank 0" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_load_that_fails_of_itself_fails_as_it_did(start: Start) -> None:
    with pytest.raises(ValueError, match="no such model"), Ranks().loading():
        start("VllmWorker-0")
        raise ValueError("no such model")


def test_where_vllm_has_one_gpu_there_is_nothing_to_watch(start: Start) -> None:
    ranks = Ranks()
    with ranks.loading():
        start("another", 0.0).join()
    ranks.check()


@by_table("line", "is_reason")
def test_the_errors_of_ranks_are_the_reasons_of_a_load_that_fails(line: str, is_reason: bool) -> None:
    assert (re.search(REASONS, line) is not None) is is_reason
