from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.executor.protocol import (
    MAX_FRAME,
    Cancel,
    Deframer,
    Delta,
    Failed,
    Finish,
    Limits,
    Ping,
    Pong,
    Ready,
    Sampling,
    Shutdown,
    Start,
    Stats,
    Step,
    Submit,
    decode_from_host,
    decode_to_host,
    frame,
)

ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)
samplings = st.builds(
    Sampling,
    max_new_tokens=st.integers(1, 2**31),
    do_sample=st.booleans(),
    temperature=finite,
    top_p=finite,
    seed=st.integers(0, 2**64 - 1),
    ignore_eos=st.booleans(),
    logprobs=st.booleans(),
)
to_host = st.one_of(
    st.builds(Start, st.text(), st.dictionaries(st.text(), st.one_of(st.none(), st.integers(0, 9), st.text()))),
    st.builds(Submit, st.integers(0, 2**63), ids, samplings, ids),
    st.builds(Cancel, st.integers(0, 2**63)),
    st.just(Ping()),
    st.just(Shutdown()),
)
deltas = st.builds(
    Delta,
    st.integers(0, 2**63),
    ids,
    st.none() | st.lists(finite, max_size=20),
    st.sampled_from([0, *(int(finish) for finish in Finish)]),
    st.none() | st.text(),
    st.integers(0, 2**31),
)
from_host = st.one_of(
    st.builds(
        Ready,
        st.builds(Limits, *[st.integers(0, 2**31)] * 4, lookahead=st.integers(0, 64)),
        st.dictionaries(st.text(), st.text()),
    ),
    st.builds(Step, st.lists(deltas, max_size=5), st.builds(Stats, st.integers(0, 999), finite)),
    st.just(Pong()),
    st.builds(Failed, st.text()),
)


def body_of(framed: bytes) -> bytes:
    (body,) = Deframer().feed(framed)
    return body


@given(to_host)
def test_every_message_to_the_host_arrives_as_it_was(message: object) -> None:
    assert decode_to_host(body_of(frame(message))) == message  # type: ignore[arg-type]


@given(from_host)
def test_every_message_from_the_host_arrives_as_it_was(message: object) -> None:
    assert decode_from_host(body_of(frame(message))) == message  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_any_chopping_of_the_stream_gives_the_same_bodies(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    deframer = Deframer()
    got: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += deframer.feed(stream[start:end])
    assert got == bodies


def test_one_byte_at_a_time_is_enough() -> None:
    deframer = Deframer()
    got = [body for byte in frame(Cancel(7)) + frame(Ping()) for body in deframer.feed(bytes([byte]))]
    assert [decode_to_host(body) for body in got] == [Cancel(7), Ping()]


def test_a_frame_above_the_bound_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match=str(MAX_FRAME + 1)):
        Deframer().feed(struct.pack("<I", MAX_FRAME + 1))
    assert Deframer().feed(struct.pack("<I", MAX_FRAME)) == []


def test_a_message_for_the_other_direction_is_refused() -> None:
    with pytest.raises(Exception, match="ping"):
        decode_from_host(body_of(frame(Ping())))
