from __future__ import annotations

import struct

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
    Stats,
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
        "step": Step([Delta(1, [5])], Stats()),
        "pong": Pong(),
        "failed": Failed("lost"),
    }
    decoded = {name: msgspec.msgpack.decode(body_of(frame(message))) for name, message in messages.items()}
    assert {name: fields[0] for name, fields in decoded.items()} == {name: name for name in messages}
    assert decoded["step"][1] == [[1, [5], None, None, None, 0]]
