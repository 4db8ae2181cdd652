"""Files of prompts."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.offline.prompt_file import read_entries


def sampling_of(line: dict[str, Any], **defaults: Any) -> Any:
    (entry,) = read_entries(json.dumps(line).encode(), "prompts", defaults, json_lines=True)
    return entry.request.sampling


def test_a_lines_own_parameters_win_under_every_name() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert sampling_of({"prompt": "a", "parameters": {"temperature": 0.2}}, temperature=0.9).temperature == 0.2
    assert sampling_of({"prompt": "a", "parameters": {"temperature": None}}, temperature=0.9).temperature == 0.9
    assert sampling_of({**chat, "max_completion_tokens": 5}, max_new_tokens=9).max_new_tokens == 5
    assert sampling_of(chat, max_new_tokens=9).max_new_tokens == 9
    (entry,) = read_entries(
        b'{"prompt": "a", "parameters": {"stop_sequences": ["b"]}}', "", {"stop": ["c"]}, json_lines=True
    )
    assert entry.request.stop == ("b",)


def test_defaults_are_those_of_the_lmi_schema() -> None:
    bodies = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}]
    entries = read_entries(b"\n".join(map(msgspec.json.encode, bodies)), "", {}, json_lines=True)
    assert [entry.request.sampling.max_new_tokens for entry in entries] == [0, 0]
    assert [entry.request.default_new_tokens for entry in entries] == [30, 0]
    assert not sampling_of({"prompt": "a"}, seed=3).do_sample
    assert sampling_of({"prompt": "a"}, top_p=0.5).do_sample


def test_many_bad_lines_are_counted() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_entries(b"{}\n" * 25, "prompts.jsonl", {}, json_lines=True)
    told = str(refused.value).splitlines()
    assert len(told) == 11
    assert told[-1] == "and 15 lines more"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", "the line is not JSON"),
        (b"[1]", r"the line is \[1\]"),
        (b"{}", "exactly one of"),
        (b'{"prompt": "a", "inputs": "b"}', "exactly one of"),
        (b'{"prompt": ""}', "any content"),
        (b'{"prompt": 5}', "must be a string"),
        (b'{"prompt": "a", "id": [1]}', "'id' is"),
        (b'{"prompt": "a", "parameters": 3}', "'parameters' is 3"),
        (b'{"prompt": "a", "parameters": {"temprature": 1}}', "did you mean 'temperature'"),
        (b'{"prompt": "a", "source": "x"}', "unknown field"),
        (b'{"prompt": "a", "stream": true}', "'stream' shapes"),
        (b'{"prompt": "a", "parameters": {"details": true}}', "'details' shapes"),
        (b'{"messages": []}', "'messages' is"),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": 1, "parameters": {"n": 2}}', "'n' stands in"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^prompts.jsonl:3: .*{message}"):
        read_entries(b'{"prompt": "a"}\n\n' + line + b"\n", "prompts.jsonl", {}, json_lines=True)


def test_lines_have_their_own_ids_or_their_numbers() -> None:
    entries = read_entries(
        b'{"prompt": "a", "id": "x"}\n\n{"prompt": "b", "id": 0}\n{"prompt": "c"}', "", {}, json_lines=True
    )
    assert [(entry.id, entry.request.prompt) for entry in entries] == [("x", "a"), (0, "b"), (4, "c")]


def test_a_line_of_text_is_a_prompt_as_it_stands() -> None:
    data = '\ufeffdie erste\r\n\n \n{"prompt": 1}\u2028 \n'.encode()
    entries = read_entries(data, "", {"max_new_tokens": 4}, json_lines=False)
    assert [(entry.id, entry.request.prompt) for entry in entries] == [(1, "die erste"), (4, '{"prompt": 1}\u2028 ')]
    assert {entry.request.sampling.max_new_tokens for entry in entries} == {4}


def test_a_parameter_that_is_named_twice_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'n' stands in 'parameters' and beside 'messages'"):
        read_entries(
            b'{"messages": [{"role": "user", "content": "a"}], "n": 1, "parameters": {"n": 2}}', "", {}, json_lines=True
        )


def test_wrong_parameters_of_all_lines_are_refused_without_a_line() -> None:
    with pytest.raises(InvalidRequestError, match=r"^'top_p' is 2"):
        read_entries(b"a\nb", "prompts", {"top_p": 2}, json_lines=False)
