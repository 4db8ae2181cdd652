"""The engine process's end of the socket, and the output of iterations as messages and as lines."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from djl_trtllm.executor import process
from djl_trtllm.executor.process import (
    Channel,
    Disconnected,
    HeldOutput,
    MarkedOutput,
    StepBuffer,
)
from djl_trtllm.executor.protocol import (
    MAX_FRAME,
    Cancel,
    Deframer,
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
    split_mark,
)
from djl_trtllm.logs import RequestContext
from djl_trtllm.request import FinishReason, Sampling
from tests.executor.kit import Server
from tests.support import models
from tests.support.steps import Delta, deltas_of, step_of
from tests.support.tables import by_rows, by_table


class Ends:
    """Both ends of a socket."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.server = Server(ours)
        self.channel = Channel(self.theirs)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.server.connection.close()
    made.theirs.close()


# -- messages to the engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_first", "block", "rest", "got"),
    [
        # How many bytes of two messages are there at first; the others come a moment later.
        (99, False, False, 2),
        (99, True, True, 2),
        (0, False, True, 0),
        (0, True, False, 2),
        (5, False, False, 0),
        (5, False, True, 2),
        (5, True, False, 2),
    ],
)
def test_waiting_for_messages_and_for_the_rest_of_one(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, at_first: int, block: bool, rest: bool, got: int
) -> None:
    monkeypatch.setattr(process, "_REST_SECONDS", 60)
    messages: list[ToEngine] = [Cancel(3), Cancel(4)]
    sent = b"".join(map(frame, messages))
    ends.server.connection.sendall(sent[:at_first])
    later = threading.Timer(0.05, ends.server.connection.sendall, [sent[at_first:]])
    later.start()
    asked = {"block": block} | ({"rest": True} if rest else {})
    assert list(ends.channel.receive(**asked)) == messages[:got]
    later.join()


@pytest.mark.parametrize("block", [False, True])
def test_messages_that_were_not_taken_come_the_next_time(ends: Ends, block: bool) -> None:
    ends.server.send(Cancel(1), Cancel(2))
    assert next(ends.channel.receive(block=True)) == Cancel(1)
    ends.server.send(Shutdown())
    assert list(ends.channel.receive(block=block)) == [Cancel(2), Shutdown()]


@pytest.mark.parametrize("unread", [False, True])
def test_a_connection_that_ends_or_is_reset_has_ended(ends: Ends, unread: bool) -> None:
    if unread:
        ends.channel.send(Pong())
    ends.server.connection.close()
    for block in (True, False):
        with pytest.raises(Disconnected):
            list(ends.channel.receive(block=block))
    with pytest.raises(Disconnected):
        ends.channel.send(Pong())
    ends.channel.send_last(Failed("lost"))  # no error


# -- messages to the server --------------------------------------------------------------------------------------------


def big(number: int) -> Step:
    """A message larger than what lies in a socket."""
    return step_of([Delta(number, [1 << 30] * 200_000)])


@pytest.mark.parametrize("blocking", [False, True])
def test_a_message_is_sent_whole_however_slow_the_server_is(ends: Ends, blocking: bool) -> None:
    """Where an event loop reads from the socket it does not block, and room is waited for."""
    assert ends.channel.fileno() == ends.theirs.fileno()
    ends.theirs.setblocking(blocking)
    sending = threading.Thread(target=ends.channel.send, args=[big(1)], daemon=True)
    sending.start()
    sending.join(0.05)
    assert sending.is_alive()
    assert ends.server.receive() == big(1)
    sending.join(60)
    assert not sending.is_alive()


def test_the_last_word_arrives_unless_the_server_does_not_read(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.theirs.setblocking(False)
    ends.channel.send_last(Failed("lost"))
    assert ends.server.receive() == Failed("lost")
    assert ends.theirs.gettimeout() == 1.0
    monkeypatch.setattr(process, "_LAST_WORD_SECONDS", 0.01)
    Channel(ends.theirs).send_last(Failed("x" * 1_000_000))


# -- several iterations as one message ---------------------------------------------------------------------------------


@by_rows(
    ("iterations", "seconds", "sent"),
    [
        # After which iterations, each of a quarter of a second, the tokens of a sequence are sent.
        (1, 0.0, [1, 2, 3, 4]),
        (2, 0.0, [1, 2, 4, 6]),
        (3, 0.0, [1, 3, 6, 9]),
        (1, 0.75, [1, 3, 6, 9]),
        (4, 0.5, [1, 4, 8]),
        (2, 1.0, [1, 4, 8]),
    ],
)
def test_output_waits_for_iterations_and_seconds(iterations: int, seconds: float, sent: list[int]) -> None:
    now = 100.0
    held = HeldOutput(iterations, seconds, lambda: now)
    tokens: list[list[int]] = []
    for number in range(1, sent[-1] + 1):
        now += 0.25
        tokens += [delta.token_ids for delta in deltas_of(held.add(step_of([Delta(1, [number])])))]
    ends = [0, *sent]
    assert tokens == [list(range(before + 1, end + 1)) for before, end in zip(ends, sent, strict=False)]


@pytest.mark.parametrize(
    ("steps", "sent"),
    [
        # Iterations, with the sequences that have a token, "!" where it is the last one.
        ("1 12 12 12", "1:1|2:2||1:234,2:34"),
        ("12 12 1!2 2 2", "1:1,2:1||1:23|2:234|"),
        ("1 1! 1 1", "1:1|1:2|1:3|1:4"),
        ("1! 1 1", "1:1|1:2|"),
    ],
)
def test_beginnings_and_ends_do_not_wait(steps: str, sent: str) -> None:
    held = HeldOutput(4, 0.0)
    found = []
    for number, step in enumerate(steps.split(), 1):
        deltas = []
        for sequence in step.replace("!", ""):
            finish = FinishReason.LENGTH if f"{sequence}!" in step else None
            deltas.append(Delta(int(sequence), [number], None, finish))
        out = deltas_of(held.add(step_of(deltas)))
        assert all(bool(delta.finish) == (f"{delta.request_id}!" in step) for delta in out)
        found.append(",".join(f"{delta.request_id}:{''.join(map(str, delta.token_ids))}" for delta in out))
    assert "|".join(found) == sent


def test_what_is_merged_has_all_log_probabilities_and_the_last_reason_and_can_be_taken() -> None:
    def add(*deltas: Delta) -> list[Delta]:
        return deltas_of(held.add(step_of(deltas)))

    held = HeldOutput(9, 0.0)
    first = Delta(1, [1], [-0.1], cached_tokens=4)
    assert add(first) == [first]
    assert [add(Delta(1, [token], [-token / 10])) for token in (2, 3)] == [[], []]
    last = add(Delta(1, [], None, FinishReason.ERROR, "lost"))
    assert last == [Delta(1, [2, 3], [-0.2, -0.3], FinishReason.ERROR, "lost")]
    held = HeldOutput(3, 0.0)
    assert [bool(add(Delta(1, [token]))) for token in (1, 2)] == [True, False]
    assert (held.take_all().tokens, held.take_all().tokens) == ([2], [])
    assert [bool(add(Delta(1, [3]))) for _ in range(3)] == [False, False, True], "the count begins anew"


# -- one wake-up of an event loop as one message -----------------------------------------------------------------------


def backlog(buffer: StepBuffer) -> None:
    buffer.step.add(7, [1], [-0.1])
    buffer.step.cached[7] = 4
    buffer.step.add(7, [2, 3], [-0.2, -0.3])
    buffer.step.end(7, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("put_in", "sent"),
    [
        (lambda buffer: [buffer.step.add(each, [each]) for each in range(2)], [Delta(0, [0]), Delta(1, [1])]),
        (backlog, [Delta(7, [1, 2, 3], [-0.1, -0.2, -0.3], FinishReason.LENGTH, None, 4)]),
        (StepBuffer.flush, []),  # a sign of life
    ],
)
def test_what_one_wake_up_brings_is_one_message(put_in: Callable[[StepBuffer], object], sent: list[Delta]) -> None:
    steps: list[Step] = []

    async def main() -> None:
        buffer = StepBuffer(steps.append, lambda: Stats(running=2))
        for turn in (1, 2):
            put_in(buffer)
            for _ in range(3):
                await asyncio.sleep(0)
            assert buffer.sent == len(steps) == turn

    asyncio.run(main())
    assert [(deltas_of(step), step.stats) for step in steps] == [(sent, Stats(running=2))] * 2


# -- lines that are printed for a request ------------------------------------------------------------------------------


@contextmanager
def printing() -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """What this process prints inside, as the server reads it."""
    stream = io.StringIO()
    with redirect_stdout(MarkedOutput(stream)), redirect_stderr(MarkedOutput(stream)):
        yield lambda: [split_mark(line) for line in stream.getvalue().removesuffix("\n").split("\n")]


def test_a_line_has_the_id_of_the_request_that_it_is_printed_for() -> None:
    with printing() as printed:
        print("loading")
        with RequestContext("story-1"):
            print("one", "and", "the same line")
            logging.StreamHandler(sys.stderr).handle(logging.makeLogRecord({"msg": "by logging\nof two lines"}))
            with RequestContext("story-2"):
                print("inner")
            print()
        print("running")
        sys.stdout.write("progress: 1")
        with RequestContext("story-1"):
            assert sys.stdout.write("") == 0
            assert sys.stdout.write(", 2\n3\n") == 6
        assert printed() == [
            ("", "loading"),
            ("story-1", "one and the same line"),
            ("story-1", "by logging"),
            ("story-1", "of two lines"),
            ("story-2", "inner"),
            ("story-1", ""),
            ("", "running"),
            ("", "progress: 1, 2"),
            ("story-1", "3"),
        ]


def test_no_id_can_be_read_as_another_or_make_a_line() -> None:
    for name in ('a "quoted" \\ name', "two\nlines", "\x1e", "Grüße", '\x1e"other"\x1e'):
        with printing() as printed:
            with RequestContext(name):
                print("text")
            assert printed() == [(name, "text")]


def test_a_line_without_a_mark_is_left_as_it_is() -> None:
    unmarked = ["", "plain", "\x1e", '\x1e"open', '\x1e"no end"', "\x1eno quotes\x1e text", 'x\x1e"a"\x1e b']
    for line in (*unmarked, '\x1e"\\q"\x1e text'):
        assert split_mark(line) == ("", line)


# -- messages ----------------------------------------------------------------------------------------------------------


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
        "step": step_of([Delta(1, [5]), Delta(2, [6])]),
        "pong": Pong(),
        "failed": Failed("lost"),
    }
    decoded = {name: msgspec.msgpack.decode(body_of(frame(message))) for name, message in messages.items()}
    assert {name: fields[0] for name, fields in decoded.items()} == {name: name for name in messages}
    assert decoded["step"][1:7] == [[1, 2], [5, 6], [], [], [], {}]
    # What is not said.
    assert decoded["start"][1:] == [models.SCRIPTED, {}, 1, 0.0, "", ""]
    assert decoded["submit"][4:] == [[], [], [], None, None, False, 0, "", "", None, [], "", [], [], None]
    assert decoded["ready"][1:] == [
        [1, 2, 3, 4, 0, True, 0, True, 0, 0, False, 0, False, "generate", 0, True, False],
        {},
        [],
    ]


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


def test_log_probabilities_that_are_not_one_for_each_token_are_refused_and_leave_the_step_as_it_was() -> None:
    step = Step()
    step.add(1, [5], [-0.5])
    for values in ([-0.1], [-0.1, -0.2, -0.3]):
        with pytest.raises(ValueError, match=f"{len(values)} log-probabilities for 2 tokens"):
            step.add(2, [6, 7], values)
    assert list(step.rows()) == [(1, [5], [-0.5])]


@by_table("columns")
def test_columns_that_do_not_fit_together_are_refused(columns: dict[str, Any]) -> None:
    step = Step()
    for name, values in columns.items():
        setattr(step, name, values)
    with pytest.raises(ValueError, match="a step"):
        decode_from_engine(body_of(frame(step)))


def test_tokens_of_drafts_are_added_up_while_their_output_is_held_back() -> None:
    held, sent = HeldOutput(3, 0.0, lambda: 100.0), list[Step]()
    for accepted in (0, 2, 1, 3):
        step = step_of([Delta(1, [5] * (1 + accepted)), Delta(2, [6])])
        step.accepted = {1: accepted, 2: 0}
        sent.append(held.add(step))
    assert [step.accepted for step in sent] == [{1: 0, 2: 0}, {}, {1: 3, 2: 0}, {}]
    assert held.take_all().accepted == {1: 3, 2: 0}
