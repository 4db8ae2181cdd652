from __future__ import annotations

import asyncio
import logging

from djl_trtllm.logs.context import RequestContext, current_request_id, mark, of_request, request_id_of


def record(**extra: object) -> logging.LogRecord:
    return logging.getLogger("x").makeRecord("x", logging.INFO, "", 0, "text", (), None, extra=extra)


def test_what_runs_inside_belongs_to_the_request_and_nothing_after_it() -> None:
    assert current_request_id() == ""
    with RequestContext("a"):
        with RequestContext("b"):
            assert current_request_id() == "b"
        assert current_request_id() == "a"
    assert current_request_id() == ""


def test_a_task_that_is_started_inside_belongs_to_the_request() -> None:
    async def main() -> str:
        with RequestContext("a"):
            task = asyncio.create_task(identifier())
        return await task

    async def identifier() -> str:
        return current_request_id()

    assert asyncio.run(main()) == "a"


def test_a_line_keeps_the_id_of_the_request_for_which_it_is_made() -> None:
    line = record()
    with RequestContext("a"):
        mark(line)
    assert request_id_of(line) == "a"


def test_an_id_that_is_given_with_a_line_counts_more_than_the_place_that_writes_it() -> None:
    line = record(**of_request("given"))
    with RequestContext("a"):
        mark(line)
    assert request_id_of(line) == "given"


def test_a_line_of_no_request_has_no_id() -> None:
    line = record()
    mark(line)
    assert request_id_of(line) == ""
    assert not hasattr(line, "request_id")
