from __future__ import annotations

import json
from typing import Any

import pytest

from djl_trtllm.routing.affinity import PromptKeys
from tests.support.tables import by_rows


def prefix_keys(body: bytes) -> tuple[bytes, ...]:
    return PromptKeys.of(body).beginnings


def keys(**body: Any) -> tuple[bytes, ...]:
    return prefix_keys(json.dumps(body).encode())


def common(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    """The number of keys that both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("name", ["prompt", "inputs", "input", "text_input"])
def test_prompts_that_begin_alike_have_their_first_keys_in_common(name: str) -> None:
    short, long = keys(**{name: "a" * 1024}), keys(**{name: "a" * 1024 + "b" * 1024})
    assert len(short) == 6  # 128, 256, 384, 512, 768 and 1024 bytes
    assert common(short, long) == 6 < len(long)
    assert common(short, keys(**{name: "b" + "a" * 1023})) == 0
    assert keys(stream=True, **{name: "a" * 1024}) == short, "the prompt counts, not where it is in the body"
    assert {len(key) for key in short} == {8}


def test_the_next_turn_of_a_conversation_has_the_keys_of_the_one_before() -> None:
    said = [{"role": "user", "content": f"{number} " * 100} for number in range(3)]
    first, second = keys(messages=said[:2], temperature=0), keys(model="m", messages=said, stream=True)
    assert common(first, second) == len(first)


@by_rows("added", [1, 10, 31])
@by_rows("length", [1, 5, 100])
def test_the_prompt_that_another_one_goes_on_from_is_known_by_its_end(length: int, added: int) -> None:
    shorter, longer = "a" * 128 * length, "b" * 128 * added
    first, second = (PromptKeys.of(json.dumps({"prompt": text}).encode()) for text in (shorter, shorter + longer))
    assert first.ends[-1] in second.ends[:-1]
    assert second.ends[-1] not in first.ends
    assert len(second.ends) <= 33


def test_at_least_two_thirds_of_what_prompts_share_have_common_keys() -> None:
    # Bytes of the beginnings that keys stand for: two thirds is what is left between 4 blocks and 6, 8 and 12, ...
    for shared in (128, 200, 500, 1000, 3000, 70_000):
        one, other = keys(prompt="a" * shared + "b" * 200_000), keys(prompt="a" * shared + "c" * 200_000)
        covered = len(keys(prompt="a" * shared))
        assert common(one, other) == covered
        assert covered > len(keys(prompt="a" * (shared * 2 // 3 - 128)))


def test_a_prompt_of_any_length_has_few_keys() -> None:
    assert keys(prompt="a" * 127) == ()
    assert len(keys(prompt="a" * 6_000_000)) < 40


def test_prompts_of_other_adapters_and_tools_share_nothing() -> None:
    prompt, tools = "a" * 1000, [{"type": "function", "function": {"name": "f" * 200}}]
    plain, french = keys(prompt=prompt), keys(prompt=prompt, adapters="french")
    assert common(plain, french) == common(french, keys(prompt=prompt, adapters="german")) == 0
    for before in ({"tools": tools}, {"system": "s" * 200}, {"instructions": "i" * 200}):
        assert common(plain, keys(prompt=prompt, **before)) == 0, before
        assert len(keys(prompt="a" * 100, **before)) > 0, "it is a part of the beginning"
    nested = keys(inputs=prompt, parameters={"adapters": "french"})
    assert nested == french


def test_requests_for_an_adapter_have_its_key_however_short_their_prompts_are() -> None:
    assert len(keys(prompt="a", adapters="french")) == 1
    assert keys(prompt="a", adapters="french") == keys(prompt="b", adapter_id="french")


@pytest.mark.parametrize(
    "body", [b"x" * 300, b'{"a":' + b"1" * 300, b"[" + b"1," * 200 + b"1]", b'{"other": "' + b"x" * 300 + b'"}']
)
def test_a_body_without_a_known_prompt_is_taken_as_it_is(body: bytes) -> None:
    assert len(prefix_keys(body)) >= 2
    assert prefix_keys(body)[0] == prefix_keys(body + b" " * 500)[0]


def test_json_that_is_too_much_to_read_is_taken_as_it_is() -> None:
    assert len(prefix_keys(b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}")) >= 2
