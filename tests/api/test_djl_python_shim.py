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


# -- requests and answers ----------------------------------------------------------------------------------------------


def request(content: bytes = b"{}") -> Input:
    found = Input()
    found.properties, found.content = {"Team": "blue"}, {"data": content}
    return found


@by_rows(
    ("read", "found"),
    [
        (lambda item: (item.get_function_name(), item.is_batch(), item.get_batch_size()), ("handle", False, 1)),
        (lambda item: item.get_batches() == [item], True),
        (lambda item: (item.is_empty(), Input().is_empty()), (False, True)),
        (lambda item: (item.contains_key("data"), item.contains_key("other")), (True, False)),
        (lambda item: (item.get_property("TEAM"), item.get_property("other")), ("blue", None)),
        (lambda item: (item.get_properties(), Input().get_properties()), ({"Team": "blue"}, {})),
        (lambda item: (item.get_as_bytes(), item.get_as_bytes("data"), item.get_as_string()), (b"{}", b"{}", "{}")),
        (lambda item: (Input().get_as_bytes(), Input().get_as_string()), (None, "")),
        (lambda item: request("é".encode()).get_as_string(), "é"),
        (lambda item: request(b'{"a": [1]}').get_as_json(), {"a": [1]}),
        (lambda item: request(b"a,b\n1,2\n").get_as_csv(), [{"a": "1", "b": "2"}]),
    ],
)
def test_an_input_is_read_by_its_documented_methods(read: Any, found: object) -> None:
    assert read(request()) == found


def test_the_content_is_read_by_its_key_or_as_it_comes() -> None:
    item = request()
    for others, first in (({"first": b"1", "data": b"2"}, b"2"), ({"first": b"1", "second": b"2"}, b"1")):
        item.content = others
        assert (item.get_as_bytes(), item.get_as_bytes("first")) == (first, b"1")
    with pytest.raises(KeyError):
        item.get_as_bytes("third")


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


@by_rows(
    ("token", "shown", "shown_as_tgi"),
    [
        (
            Token(1, "a", -0.5),
            {"id": 1, "text": "a", "log_prob": -0.5},
            {"id": 1, "text": "a", "logprob": -0.5},
        ),
        (
            Token(-1, "", -1.0, True, "broken"),
            {"id": -1, "text": "", "log_prob": -1.0, "special_token": True, "error_msg": "broken"},
            {"id": -1, "text": "", "logprob": -1.0, "special": True},
        ),
    ],
)
def test_a_token_is_shown_by_the_requests_schema(token: Token, shown: object, shown_as_tgi: object) -> None:
    assert token.request_id is None
    for tgi_compat, schema in ((False, shown), (True, shown_as_tgi)):
        found = TextGenerationOutput(7, TextInput(tgi_compat=tgi_compat))
        found.set_next_token(token, sequence_index=2)
        found.prompt_tokens_details = [token]
        assert found.get_tokens_as_dict(2) == found.get_prompt_tokens_as_dict() == [schema]
        assert found.get_tokens_as_dict() == []


@pytest.mark.parametrize(("kind", "indexed"), [(Sequence, True), (ThreeValueSequence, False)])
def test_a_sequence_is_read_token_by_token_to_the_last(kind: type[Sequence], indexed: bool) -> None:
    first, second, sequence = Token(1, "a"), Token(2, "b"), kind()

    def read(token: Token | None, at: int, *ends: bool) -> bool:
        return sequence.get_next_token() == (token, *[at] * indexed, *ends)

    assert not sequence.has_next_token() and read(None, 0, False, False) and sequence.get_last_token() is None
    sequence.set_next_token(first)
    assert sequence.has_next_token() and sequence.get_last_token() is None
    assert read(first, 0, True, False)
    sequence.set_next_token(second, True)
    assert read(second, 1, False, True) and read(None, 0, False, False)
    assert sequence.get_last_token() is second
    assert (sequence.cumulative_log_prob, sequence.finish_reason, sequence.stop_reason) == (0.0, None, None)


def test_an_output_has_a_best_sequence_from_the_start_and_adds_tokens_to_theirs() -> None:
    found = TextGenerationOutput(7, TextInput(input_text="The wolf"))
    assert list(found.sequences) == [found.best_sequence_index] == [0]
    assert (found.request_id, found.finished, found.input) == (7, False, TextInput(input_text="The wolf"))
    assert (found.prompt_tokens_details, found.other_sequences_indices) == ([], [])
    found.set_next_token(Token(1, "a"))
    assert found.sequences[0].get_last_token() is None
    found.set_next_token(last := Token(2, "b"), 0, True, "length")
    found.set_next_token(Token(3, "c"), sequence_index=2)
    assert [token.text for token in found.sequences[0].tokens] == ["a", "b"]
    assert found.sequences[0].get_last_token() is last
    assert [sequence.finish_reason for sequence in found.sequences.values()] == ["length", None]


def test_requests_have_the_documented_fields() -> None:
    text, nothing = TextInput(), (None,) * 6
    assert (text.request_id, text.client_request_id, text.output_formatter, text.input_text, text.adapters) == nothing[
        1:
    ]
    assert (text.parameters, text.server_parameters, text.tgi_compat, text.tokenizer) == ({}, {}, False, None)
    assert not RequestOutput(1, RequestInput()).finished
