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
    Feature,
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
    decode_to_engine,
    frame,
)
from djl_trtllm.request import FinishReason, Guide, GuideKind, Sampling
from tests.support import executors

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
    st.sampled_from([None, *FinishReason]),
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
def test_every_message_to_the_engine_process_arrives_as_it_was(message: object) -> None:
    assert decode_to_engine(body_of(frame(message))) == message  # type: ignore[arg-type]


@given(from_host)
def test_every_message_from_the_engine_process_arrives_as_it_was(message: object) -> None:
    assert decode_from_engine(body_of(frame(message))) == message  # type: ignore[arg-type]


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
    assert [decode_to_engine(body) for body in got] == [Cancel(7), Ping()]


def test_a_frame_above_the_bound_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match=str(MAX_FRAME + 1)):
        Deframer().feed(struct.pack("<I", MAX_FRAME + 1))
    assert Deframer().feed(struct.pack("<I", MAX_FRAME)) == []


def test_a_message_for_the_other_direction_is_refused() -> None:
    with pytest.raises(Exception, match="ping"):
        decode_from_engine(body_of(frame(Ping())))


def test_what_a_message_does_not_say_is_neutral() -> None:
    assert Submit(1, [5], Sampling(9)) == Submit(1, [5], Sampling(9), [], [], [], None, None, False)
    assert Delta(1, [5]) == Delta(1, [5], None, None, None, 0)
    assert Stats() == Stats(0, *[None] * 8)
    assert Limits(1, 2, 3, 4).lookahead == 0
    assert Ready(Limits(1, 2, 3, 4)) == Ready(Limits(1, 2, 3, 4), {}, frozenset())
    assert Guide(GuideKind.JSON_OBJECT).value == ""


def test_the_words_of_the_protocol_are_what_they_are() -> None:
    """`djl-trtllm` shows them, and logs are searched for them."""
    assert [feature.value for feature in Feature] == [
        "logprobs",
        "beam_logprobs",
        "free_logprobs",
        "json",
        "regex",
        "grammar",
        "adapters",
    ]
    assert [kind.value for kind in GuideKind] == ["json_object", "json_schema", "regex", "grammar"]
    assert MAX_FRAME == 256 * 1024 * 1024


def test_a_message_is_a_length_and_a_list_that_begins_with_its_name() -> None:
    """Little: what goes over the socket for each token."""
    assert frame(Ping()) == b"\x06\x00\x00\x00" + msgspec.msgpack.encode(["ping"])
    messages: dict[str, ToEngine | FromEngine] = {
        "start": Start(executors.SCRIPTED, {}),
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
