"""Errors say what their reader needs, and clients get no more of them than that."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.errors import (
    BuildError,
    ConfigError,
    GenerationError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotReadyError,
    OverloadedError,
)
from tests.support.tables import by_table


def test_a_configuration_error_is_all_problems_and_what_else_was_noticed() -> None:
    assert str(ConfigError(["a"])) == "1 configuration problem:\n  - a"
    error = ConfigError(["a", "b"], ["c"])
    assert str(error) == "2 configuration problems:\n  - a\n  - b\nwarnings:\n  - c"
    assert (error.problems, error.warnings) == (("a", "b"), ("c",))


def test_a_failed_build_tells_the_advice_the_logs_end_and_where_it_is() -> None:
    assert str(BuildError("It failed.")) == "It failed."
    error = BuildError("It failed.", Path("/log"), ["one", "two"], "memory", "Use less.")
    assert str(error) == ("It failed.\nUse less.\nlast lines of the log:\n  | one\n  | two\nwhole log: /log")
    assert (error.log_path, error.tail, error.cause, error.advice) == (
        Path("/log"),
        ("one", "two"),
        "memory",
        "Use less.",
    )


def test_refusals_say_when_to_return() -> None:
    error = OverloadedError("full", queue_depth=3, capacity=4, retry_after=5)
    assert (str(error), error.queue_depth, error.capacity, error.retry_after) == ("full", 3, 4, 5)
    assert (NotReadyError("loading", retry_after=5).retry_after, NotReadyError("failed").retry_after) == (5, None)


def test_a_method_that_is_not_allowed_says_which_are() -> None:
    error = MethodNotAllowedError("/x takes GET, not PUT", allow="GET")
    assert (str(error), error.allow) == ("/x takes GET, not PUT", "GET")


def test_a_client_does_not_get_back_all_that_it_sent() -> None:
    told = str(InvalidRequestError(f"there is no model {'x' * 5_000_000}: name one of story, tale"))
    assert len(told) < 2100
    assert told.startswith("there is no model xxx") and told.endswith("xxx: name one of story, tale")
    assert str(InvalidRequestError("x" * 2000)) == "x" * 2000
    assert str(InvalidRequestError("x" * 2001)) == f"{'x' * 1500} [1 characters] {'x' * 500}"


@by_table("engine", "told")
def test_what_an_engine_says_reaches_clients_without_places_in_its_source(engine: str, told: str) -> None:
    assert str(GenerationError(engine)) == told
