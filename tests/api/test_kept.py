"""What is kept of responses: it expires, and no API key drives out what others have."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from djl_trtllm.api.base import RawRequest, Reply
from djl_trtllm.api.dialects.responses import RESPONSES
from djl_trtllm.api.kept import Kept
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError, UnknownPathError
from tests.api.models import EOS, TEXT, PlayedModel, answer
from tests.support.virtual_time import Clock

PARTS = (b"a" * 400, b"b" * 88)
SIZE = 1000
"""What an entry of these parts takes."""
SECONDS = 60.0


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def kept(clock: Clock) -> Kept:
    return Kept(bounded(3 * SIZE), clock)


def bounded(memory: int) -> Options:
    return Options(stored_responses_memory=memory, stored_responses_timeout=SECONDS)


def keep(kept: Kept, key: str, name: str) -> None:
    kept.keep(key, name, PARTS)


def names(kept: Kept, key: str, *of: str) -> str:
    """Which of these names are found, looked for in another order than that of their age."""
    return "".join(name for name in sorted(of) if kept.find(key, name))


def test_only_its_own_key_finds_and_removes_an_entry(kept: Kept) -> None:
    keep(kept, "one", "a")
    assert kept.find("one", "a") == PARTS and kept.size == SIZE
    assert kept.find("two", "a") is None
    assert not kept.remove("two", "a") and kept.remove("one", "a") and not kept.remove("one", "a")
    assert kept.find("one", "a") is None and kept.size == 0


def test_an_entry_expires_after_its_last_use(kept: Kept, clock: Clock) -> None:
    keep(kept, "one", "a")
    keep(kept, "one", "b")
    clock.now = SECONDS - 1
    assert names(kept, "one", "a") == "a"
    clock.now = SECONDS + 1
    assert names(kept, "one", "a", "b") == "a"
    clock.now = 3 * SECONDS
    keep(kept, "two", "c")
    assert kept.size == SIZE  # those of other keys too


def test_the_oldest_of_the_key_with_the_most_makes_room(kept: Kept) -> None:
    for name in "abc":
        keep(kept, "one", name)
    assert names(kept, "one", "a") == "a"  # `b` was used longest ago
    keep(kept, "two", "x")
    assert names(kept, "one", "a", "b", "c") == "ac" and names(kept, "two", "x") == "x"
    keep(kept, "two", "y")
    assert names(kept, "two", "x", "y") == "xy" or names(kept, "one", "a", "c") == "ac"
    assert kept.size == 3 * SIZE


def test_what_does_not_fit_is_not_kept(kept: Kept) -> None:
    keep(kept, "one", "a")
    kept.keep("two", "b", (b"x" * 9 * SIZE,))
    assert kept.size == SIZE and names(kept, "one", "a") == "a"
    nothing = Kept(bounded(0))
    keep(nothing, "one", "a")
    assert nothing.size == 0


KEYS = st.sampled_from(["one", "two", "three"])
CALLS: st.SearchStrategy[tuple[str, str, int]] = st.tuples(KEYS, st.sampled_from("abcdef"), st.integers(0, 3))


@given(st.lists(CALLS, max_size=60))
def test_the_memory_is_bounded_and_is_that_of_what_is_found(calls: list[tuple[str, str, int]]) -> None:
    kept, made = Kept(bounded(3000), lambda: 0.0), 0
    acts: tuple[Callable[[str, str], object], ...] = (kept.remove, lambda key, name: kept.find(key, name))
    for key, name, act in calls:
        if act < len(acts):
            acts[act](key, name)
            continue
        made += 1
        kept.keep(key, f"{name}{made}", (b"x" * 100 * act,))
        assert kept.find(key, f"{name}{made}")
        assert kept.size <= 3000
    for key in ("one", "two", "three"):
        for name in "abcdef":
            for number in range(made + 1):
                kept.remove(key, f"{name}{number}")
    assert kept.size == 0


# -- responses of /v1/responses ----------------------------------------------------------------------------------------


def ask(model: PlayedModel, given: Any = "The wolf", **body: Any) -> tuple[list[Any], dict[str, Any]]:
    """What the model reads, as roles and texts, and the response."""
    sent = json.dumps({"input": given, **body}).encode()
    call = RESPONSES.parse(RawRequest(sent, {}, "/v1/responses", key="one"), model)
    response = json.loads(answer(call.encoder, EOS))
    return [(each["role"], each["content"]) for each in call.requests[0].messages or ()], response


@pytest.mark.parametrize(
    ("memory", "body", "stored"),
    [(1, {}, True), (1, {"store": True}, True), (1, {"store": False}, False), (0, {}, False)],
)
def test_a_response_is_stored_unless_its_request_or_the_options_say_no(
    memory: int, body: dict[str, bool], stored: bool
) -> None:
    model = PlayedModel(bounded(memory))
    _, response = ask(model, **body)
    assert response["store"] is stored
    assert (model.kept.find("one", response["id"]) is not None) == stored


def test_a_stored_response_is_shown_and_removed_for_its_key_alone() -> None:
    model = PlayedModel()
    response = ask(model)[1]

    def asked(act: Callable[..., Reply], key: str) -> Any:
        named = RawRequest(b"", {}, parameters={"response": response["id"]}, key=key)
        return json.loads(act(named, [SimpleNamespace(context=None), SimpleNamespace(context=model)]).body)

    assert asked(RESPONSES.page, "one") == response
    for act, key in ((RESPONSES.page, "two"), (RESPONSES.remove, "two"), (RESPONSES.page, "one")):
        with pytest.raises(UnknownPathError, match=response["id"]):
            asked(act, key)
        if act == RESPONSES.remove:
            assert asked(act, "one") == {"id": response["id"], "object": "response", "deleted": True}


def test_a_conversation_goes_on_from_what_is_stored_of_it() -> None:
    model = PlayedModel()
    _, first = ask(model, instructions="Be kind.")
    _, second = ask(model, "And then?", previous_response_id=first["id"])
    turns = [("user", "The wolf"), ("assistant", TEXT), ("user", "And then?"), ("assistant", TEXT), ("user", "?")]
    assert ask(model, "?", previous_response_id=second["id"])[0] == turns
    item = {"type": "item_reference", "id": first["output"][0]["id"]}
    assert ask(model, [{"role": "user", "content": "The wolf"}, item])[0] == turns[:2]


def test_stored_items_are_read_up_to_the_size_of_a_body() -> None:
    model = PlayedModel()
    _, response = ask(model)
    entry = model.kept.find("one", response["id"])
    assert entry is not None
    _, own, output, _ = entry
    item = {"type": "item_reference", "id": response["output"][0]["id"]}
    for size, items, body in (
        (len(own) + len(output), "?", {"previous_response_id": response["id"]}),
        (2 * len(output), [item, item], {}),
    ):
        ask(PlayedModel(Options(max_request_size=size), kept=model.kept), items, **body)
        with pytest.raises(InvalidRequestError, match="max_request_size"):
            ask(PlayedModel(Options(max_request_size=size - 1), kept=model.kept), items, **body)
