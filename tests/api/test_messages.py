from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.api.messages import read_messages
from djl_trtllm.api.parameters import Problems


def read(raw: Any) -> tuple[list[dict[str, Any]], Problems]:
    problems = Problems()
    return read_messages(raw, problems), problems


def messages(*raw: dict[str, Any]) -> list[dict[str, Any]]:
    found, problems = read(list(raw))
    assert problems == Problems()
    return found


def user(content: object, **fields: object) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def text(value: object) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_messages_go_through_with_all_their_fields() -> None:
    given = [{"role": "system", "content": ""}, user("Hello", name="Anna"), {"role": "weather", "content": "dry"}]
    assert messages(*given) == given


def test_text_parts_are_joined_by_newlines() -> None:
    assert messages(user([text("a"), text("b")], name="Anna")) == [user("a\nb", name="Anna")]
    assert messages(user([])) == [user("")]


def test_a_call_of_tools_needs_no_content() -> None:
    calls = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    assert messages(calls) == [calls | {"content": None}]
    assert messages(calls | {"content": None}) == [calls | {"content": None}]


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ([], "'messages' is []: expected a list of at least one message"),
        ("Hello", "'messages' is \"Hello\": expected a list of at least one message"),
        ({}, "'messages' is {}: expected a list of at least one message"),
        (["Hello"], "'messages[0]' is \"Hello\": expected an object with 'role' and 'content'"),
        ([{"content": "a"}], "'messages[0].role' is null: expected a string such as \"user\""),
        ([{"role": "", "content": "a"}], '\'messages[0].role\' is "": expected a string such as "user"'),
        ([{"role": 3, "content": "a"}], "'messages[0].role' is 3: expected a string such as \"user\""),
        ([{"role": "user"}], "'messages[0].content' is null: expected a string or a list of text parts"),
        ([user(3)], "'messages[0].content' is 3: expected a string or a list of text parts"),
        ([user(None, tool_calls=[])], "'messages[0].content' is null: expected a string or a list of text parts"),
        ([user(3, tool_calls=[1])], "'messages[0].content' is 3: expected a string or a list of text parts"),
        ([user("a"), user(["b"])], '\'messages[1].content[0]\' is "b": expected {"type": "text", "text": string}'),
        (
            [user([text("a"), text(3)])],
            '\'messages[0].content[1]\' is {"type":"text","text":3}: expected {"type": "text", "text": string}',
        ),
        (
            [user([{"type": "video"}])],
            '\'messages[0].content[0]\' is {"type":"video"}: expected {"type": "text", "text": string}',
        ),
    ],
)
def test_a_message_of_another_form_is_reported_with_its_place(raw: object, told: str) -> None:
    found, problems = read(raw)
    assert (problems.invalid, problems.unsupported) == ([told], [])
    assert type(found) is list


def test_what_is_no_text_is_refused_by_name() -> None:
    kinds = ("image_url", "image", "input_audio", "audio_url", "video_url", "file")
    found, problems = read([user([text("a"), *({"type": kind} for kind in kinds)])])
    assert problems.unsupported == [
        f"'messages[0].content[{index}]' is of type \"{kind}\", and this model takes text only"
        for index, kind in enumerate(kinds, 1)
    ]
    assert problems.invalid == [] and found == [user("a")]


def test_every_message_is_looked_at() -> None:
    found, problems = read([3, {"role": 3, "content": 4}, user("a")])
    assert len(problems.invalid) == 3
    assert found == [{"role": 3, "content": 4}, user("a")]
