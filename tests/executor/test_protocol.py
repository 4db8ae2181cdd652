from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.executor.protocol import (
    MAX_FRAME,
    Cancel,
    Deframer,
    Delta,
    Failed,
    FromEngine,
    Limits,
    Ping,
    Pong,
    Ready,
    Shutdown,
    Start,
    Step,
    Submit,
    ToEngine,
    decode_from_engine,
    frame,
)
from djl_trtllm.request import Sampling
from tests.support import models


def body_of(framed: bytes) -> bytes:
    (body,) = Deframer().feed(framed)
    return body


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_any_chopping_of_the_stream_gives_the_same_bodies(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    deframer = Deframer()
    got: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += deframer.feed(stream[start:end])
    assert got == bodies


def test_a_frame_above_the_bound_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match=str(MAX_FRAME + 1)):
        Deframer().feed(struct.pack("<I", MAX_FRAME + 1))
    assert Deframer().feed(struct.pack("<I", MAX_FRAME)) == []
    assert MAX_FRAME == 256 * 1024 * 1024


def test_a_message_for_the_other_direction_is_refused() -> None:
    with pytest.raises(Exception, match="ping"):
        decode_from_engine(body_of(frame(Ping())))


def test_a_message_is_a_length_and_a_list_that_begins_with_its_name() -> None:
    """Little: what goes over the socket for each token."""
    assert frame(Ping()) == b"\x06\x00\x00\x00" + msgspec.msgpack.encode(["ping"])
    messages: dict[str, ToEngine | FromEngine] = {
        "start": Start(models.SCRIPTED, {}),
        "submit": Submit(1, [5], Sampling(9)),
        "cancel": Cancel(1),
        "ping": Ping(),
        "shutdown": Shutdown(),
        "ready": Ready(Limits(1, 2, 3, 4)),
        "step": Step.of([Delta(1, [5]), Delta(2, [6])]),
        "pong": Pong(),
        "failed": Failed("lost"),
    }
    decoded = {name: msgspec.msgpack.decode(body_of(frame(message))) for name, message in messages.items()}
    assert {name: fields[0] for name, fields in decoded.items()} == {name: name for name in messages}
    assert decoded["step"][1:7] == [[1, 2], [5, 6], [], [], [], {}]


ROWS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.lists(st.integers(0, 9), max_size=3),
        st.booleans(),
    ),
    max_size=6,
)


@given(ROWS)
def test_columns_have_every_row_as_it_was_added(rows: list[tuple[int, list[int], bool]]) -> None:
    step = Step()
    for request_id, token_ids, wanted in rows:
        step.add(request_id, token_ids, [-token / 10 for token in token_ids] if wanted else None)
    read = decode_from_engine(body_of(frame(step)))
    assert isinstance(read, Step)
    found = list(read.rows())
    assert [row[:2] for row in found] == [row[:2] for row in rows]
    for (_, token_ids, wanted), (_, _, logprobs) in zip(rows, found, strict=True):
        values = [-token / 10 if wanted else None for token in token_ids]
        assert logprobs == values or (logprobs is None and not any(wanted and ids for _, ids, wanted in rows))


@pytest.mark.parametrize(
    "columns",
    [
        {"ids": [1], "tokens": []},
        {"ids": [1, 2], "tokens": [5, 6], "counts": [2]},
        {"ids": [1, 2], "tokens": [5, 6], "counts": [1, 2]},
        {"ids": [1, 2], "tokens": [5, 6], "counts": [3, -1]},
        {"ids": [1], "tokens": [5], "logprobs": [-0.5, -0.5]},
    ],
)
def test_columns_that_do_not_fit_together_are_refused(columns: dict[str, Any]) -> None:
    step = Step()
    for name, values in columns.items():
        setattr(step, name, values)
    with pytest.raises(ValueError, match="a step"):
        decode_from_engine(body_of(frame(step)))
