"""The part of djl_python that formatters import."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from djl_trtllm.api.dialects.lmi import djl_python_shim
from djl_trtllm.api.dialects.lmi.djl_python_shim import (
    Input,
    RequestInput,
    RequestOutput,
    Sequence,
    TextGenerationOutput,
    TextInput,
    ThreeValueSequence,
    Token,
    decode,
    init_handler,
    input_formatter,
    output_formatter,
    prediction_handler,
)
from tests.support.tables import by_rows

pytestmark = pytest.mark.usefixtures("clean_imports")


# -- modules -----------------------------------------------------------------------------------------------------------


def test_an_installed_djl_python_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("djl_python")
    # Other tests may have installed the shim before.
    for name in [name for name in sys.modules if name.startswith("djl_python.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "djl_python", real)
    assert not djl_python_shim.install()
    assert sys.modules["djl_python"] is real
    assert "djl_python.inputs" not in sys.modules


def test_one_that_could_be_imported_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "djl_python.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert not djl_python_shim.install()
    assert "djl_python" not in sys.modules


def test_the_shim_can_be_installed_twice() -> None:
    assert djl_python_shim.install()
    assert djl_python_shim.install()


def test_every_documented_import_finds_its_name() -> None:
    djl_python_shim.install()
    names = {
        "djl_python": "Input Output",
        "djl_python.inputs": "Input",
        "djl_python.outputs": "Output",
        "djl_python.encode_decode": "decode",
        "djl_python.input_parser": "input_formatter prediction_handler init_handler Input RequestInput TextInput",
        "djl_python.output_formatter": "output_formatter RequestOutput TextGenerationOutput",
        "djl_python.request_io": "Token Sequence RequestInput TextInput RequestOutput TextGenerationOutput",
    }
    for module, members in names.items():
        for name in members.split():
            assert getattr(importlib.import_module(module), name) is getattr(djl_python_shim, name), (module, name)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'djl_python\.nothing'$"):
        importlib.import_module("djl_python.nothing")
    package = sys.modules["djl_python"]
    assert package.inputs is sys.modules["djl_python.inputs"]
    assert package.__doc__ == "Replaces DJL Serving's djl_python."


def test_decorators_mark_their_function() -> None:
    marks = {
        "is_input_formatter": input_formatter,
        "is_output_formatter": output_formatter,
        "is_prediction_handler": prediction_handler,
        "is_init_handler": init_handler,
    }
    for mark, decorator in marks.items():

        def function() -> None: ...

        assert decorator(function) is function
        assert [name for name in marks if getattr(function, name, False) is True] == [mark]


# -- requests ----------------------------------------------------------------------------------------------------------


def request(content: bytes | None = b"{}", **properties: str) -> Input:
    found = Input()
    found.properties = properties
    if content is not None:
        found.content["data"] = content
    return found


def test_an_input_is_one_request() -> None:
    item = request(b"a")
    assert (item.get_function_name(), item.is_batch(), item.get_batch_size()) == ("handle", False, 1)
    assert item.get_batches() == [item]
    assert (item.is_empty(), request(None).is_empty()) == (False, True)
    assert (item.contains_key("data"), item.contains_key("other")) == (True, False)


def test_a_property_is_found_in_any_case() -> None:
    item = request(Team="blue")
    assert (item.get_property("TEAM"), item.get_property("other")) == ("blue", None)
    assert item.get_properties() == {"Team": "blue"}
    assert Input().get_properties() == {}


def test_the_content_is_read_by_its_key_or_as_it_comes() -> None:
    item = request(b"data")
    item.content = {"first": b"1", "data": b"2"}
    assert (item.get_as_bytes(), item.get_as_bytes("first")) == (b"2", b"1")
    item.content = {"first": b"1", "second": b"2"}
    assert item.get_as_bytes() == b"1"
    with pytest.raises(KeyError):
        item.get_as_bytes("third")
    assert request(None).get_as_bytes() is None
    assert request(None).get_as_string() == ""


def test_the_content_is_text_json_or_csv() -> None:
    assert request("é".encode()).get_as_string() == "é"
    assert request(b'{"a": [1]}').get_as_json() == {"a": [1]}
    assert request(b"a,b\n1,2\n").get_as_csv() == [{"a": "1", "b": "2"}]


@by_rows(
    ("content_type", "content", "decoded"),
    [
        ("application/json", b'{"inputs": "a"}', {"inputs": "a"}),
        ("application/json; charset=utf-8", b'{"inputs": "a"}', {"inputs": "a"}),
        (None, b'{"inputs": "a"}', {"inputs": "a"}),
        ("", b"", {"inputs": ""}),
        ("text/csv", b"a\n1\n", {"inputs": [{"a": "1"}]}),
        ("text/plain", b"a", {"inputs": ["a"]}),
        ("application/x-www-form-urlencoded", b"a=1", {"inputs": "a=1"}),
        ("image/png", b"\x89", {"inputs": b"\x89"}),
    ],
)
def test_a_payload_is_decoded_by_its_type(content_type: str | None, content: bytes, decoded: object) -> None:
    assert decode(request(content), content_type) == decoded


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_token_is_shown_by_its_schema() -> None:
    token = Token(1, "a", -0.5)
    assert (token.as_dict(), token.as_tgi_dict()) == (
        {"id": 1, "text": "a", "log_prob": -0.5},
        {"id": 1, "text": "a", "logprob": -0.5},
    )
    failed = Token(-1, "", -1.0, True, "broken")
    assert failed.as_dict() == {"id": -1, "text": "", "log_prob": -1.0, "special_token": True, "error_msg": "broken"}
    assert failed.as_tgi_dict() == {"id": -1, "text": "", "logprob": -1.0, "special": True}
    assert token.request_id is None


def test_a_sequence_is_read_token_by_token_to_the_last() -> None:
    first, second = Token(1, "a"), Token(2, "b")
    sequence = Sequence()
    assert not sequence.has_next_token()
    assert sequence.get_next_token() == (None, 0, False, False)
    assert sequence.get_last_token() is None
    sequence.set_next_token(first)
    assert sequence.has_next_token() and sequence.get_last_token() is None
    sequence.set_next_token(second, True)
    assert sequence.get_next_token() == (first, 0, True, False)
    assert sequence.get_next_token() == (second, 1, False, True)
    assert sequence.get_next_token() == (None, 0, False, False)
    assert sequence.get_last_token() is second
    assert (sequence.cumulative_log_prob, sequence.finish_reason, sequence.stop_reason) == (0.0, None, None)


def test_a_sequence_of_the_older_form_gives_three_values() -> None:
    token = Token(1, "a")
    sequence = ThreeValueSequence()
    assert sequence.get_next_token() == (None, False, False)
    sequence.set_next_token(token, True)
    assert sequence.get_next_token() == (token, True, True)


def output(**input_fields: Any) -> TextGenerationOutput:
    return TextGenerationOutput(7, TextInput(**input_fields))


def test_an_output_has_a_best_sequence_from_the_start() -> None:
    found = output(input_text="The wolf")
    assert list(found.sequences) == [found.best_sequence_index] == [0]
    assert (found.request_id, found.finished, found.input) == (7, False, TextInput(input_text="The wolf"))
    assert (found.prompt_tokens_details, found.other_sequences_indices) == ([], [])


def test_tokens_are_added_to_their_sequence() -> None:
    found = output()
    first, last = Token(1, "a"), Token(2, "b")
    found.set_next_token(first)
    assert found.sequences[0].get_last_token() is None
    found.set_next_token(last, 0, True, "length")
    found.set_next_token(Token(3, "c"), sequence_index=2)
    assert found.sequences[0].tokens == [first, last]
    assert found.sequences[0].get_last_token() is last
    assert [sequence.finish_reason for sequence in found.sequences.values()] == ["length", None]
    assert found.get_tokens_as_dict(2) == [{"id": 3, "text": "c", "log_prob": None}]


def test_tokens_are_shown_by_the_requests_schema() -> None:
    for tgi_compat, name in ((False, "log_prob"), (True, "logprob")):
        found = output(tgi_compat=tgi_compat)
        found.set_next_token(Token(1, "a", -0.5))
        found.prompt_tokens_details = [Token(2, "b", -0.25)]
        assert found.get_tokens_as_dict() == [{"id": 1, "text": "a", name: -0.5}]
        assert found.get_prompt_tokens_as_dict() == [{"id": 2, "text": "b", name: -0.25}]


def test_requests_have_the_documented_fields() -> None:
    request_input = RequestInput()
    assert (request_input.request_id, request_input.client_request_id, request_input.output_formatter) == (None,) * 3
    assert (request_input.parameters, request_input.server_parameters, request_input.tgi_compat) == ({}, {}, False)
    text_input = TextInput()
    assert (text_input.input_text, text_input.adapters, text_input.tokenizer) == (None,) * 3
    assert not RequestOutput(1, request_input).finished
