"""The process that renders chat templates: its messages. `tests/service/test_chat_renderer.py` runs it."""

from __future__ import annotations

import pickle
import socket
from pathlib import Path

import pytest

from djl_trtllm.model.chat_process import REFUSED, RENDERED, _read, answer, framed
from djl_trtllm.model.chat_template import ChatTemplate

USER = [{"role": "user", "content": "a wolf \ud800"}]


@pytest.fixture
def template() -> ChatTemplate:
    source = "{{ bos }}{{ messages[0].content }}{% if fail %}{{ raise_exception(fail) }}{% endif %}"
    return ChatTemplate({"default": source}, {"bos": "<s>"}, Path("here"))


def test_a_conversation_is_rendered(template: ChatTemplate) -> None:
    assert answer(template, pickle.dumps((USER, {}))) == RENDERED + "<s>a wolf \ud800".encode("utf-8", "surrogatepass")


@pytest.mark.parametrize(
    "keywords", [{"fail": "not so"}, {"chat_template": "other"}, {"messages": 1}, {"chat_template": []}]
)
def test_what_is_refused_has_its_reason(template: ChatTemplate, keywords: dict[str, object]) -> None:
    response = answer(template, pickle.dumps((USER, keywords)))
    assert response[:1] == REFUSED
    assert b"template" in response


def test_messages_have_their_lengths_before_them() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(framed(b"a" * 70_000) + framed(b""))
        here.shutdown(socket.SHUT_WR)
        assert (_read(there), _read(there)) == (b"a" * 70_000, b"")
        with pytest.raises(EOFError):
            _read(there)
