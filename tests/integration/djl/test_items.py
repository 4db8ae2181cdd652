"""Items, and how they travel in async mode."""

from __future__ import annotations

import asyncio
import re
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.djl.item import QUIET, Item, take
from djl_trtllm.djl.streams import Stream, Streams
from djl_trtllm.djl.worker import Metrics, load_status
from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.service import ModelService
from tests.integration.djl.socket_engine import Reader


def decoded(encoded: bytes) -> dict[str, str]:
    reader = Reader(encoded)
    pairs = {reader.text(): reader.text() for _ in range(reader.short())}
    with pytest.raises(EOFError):
        reader.text()
    return pairs


@given(st.text(), st.booleans())
def test_an_item_is_pairs_of_texts(text: str, last: bool) -> None:
    text = text.encode(errors="replace").decode()
    assert decoded(Item(text.encode(), last).encode()) == {"data": text, "last": str(last).lower()}


def test_an_error_has_a_code_and_no_data() -> None:
    encoded = decoded(Item(b"lost", True, 424, "wrong: ü").encode())
    assert encoded == {"code": "424", "error": "wrong: ü", "data": "", "last": "true"}


def test_nothing_new_is_an_empty_item() -> None:
    assert decoded(QUIET) == {"data": "", "last": "false"}


def test_items_travel_together_and_errors_alone() -> None:
    items = deque([Item(b"a", properties=(("k", "v"),)), Item(b"b"), Item(b"", True, 500, "gone")])
    assert take(items) == Item(b"ab", False, None, "", (("k", "v"),))
    assert take(items) == Item(b"", True, 500, "gone")
    assert not items


class Socket:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)

    def frames(self) -> list[tuple[str, str, bool]]:
        """Tracking id, data and last of every frame."""
        found = []
        for data in self.sent:
            reader = Reader(data)
            while reader._at < len(data):
                assert (reader.short(), reader.text()) == (200, "OK")
                properties = {reader.text(): reader.text() for _ in range(reader.short())}
                assert reader.short() == 1
                reader.text()
                item = decoded(reader.data())
                found.append((properties["request_tracking_id"], item["data"], item["last"] == "true"))
        return found


@pytest.mark.parametrize("backlog", [1, 3, 1000])
def test_every_token_arrives_once_and_in_order(backlog: int) -> None:
    """djl_python's side: a queue, and a sender that takes one thing of it now and then."""

    async def run() -> tuple[Socket, int]:
        streams, queue, connection = Streams(), asyncio.Queue[Streams](), Socket()
        mine = [Stream(streams, f"id-{number}") for number in range(5)]

        async def carry(stream: Stream) -> None:
            async for carried in stream.carry():
                await queue.put(carried)

        tasks = [asyncio.ensure_future(carry(stream)) for stream in mine]
        most = 0
        for step in range(50):
            for stream in mine:
                stream.put(Item(f"{step};".encode(), step == 49))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            most = max(most, queue.qsize())
            if step % backlog == 0:
                while not queue.empty():
                    queue.get_nowait().send(connection)  # type: ignore[arg-type]
        await asyncio.gather(*tasks)
        while not queue.empty():
            queue.get_nowait().send(connection)  # type: ignore[arg-type]
        return connection, most

    connection, most = asyncio.run(run())
    assert most <= 1
    whole = "".join(f"{step};" for step in range(50))
    for number in range(5):
        own = [(data, last) for name, data, last in connection.frames() if name == f"id-{number}"]
        assert "".join(data for data, _ in own) == whole
        assert [last for _, last in own] == [False] * (len(own) - 1) + [True]
    assert len(connection.sent) <= 52 if backlog == 1 else len(connection.sent) <= 50 // backlog + 3


def test_metrics_are_lines_that_djl_reads() -> None:
    async def run() -> tuple[list[str], list[str]]:
        service = ModelService("story")
        metrics = Metrics(service)
        nothing = metrics.lines()
        service.statistics.requests, service.statistics.generated_tokens = 3, 70
        return nothing, metrics.lines()

    nothing, lines = asyncio.run(run())
    assert nothing == []
    # ai.djl.metric.Metric's pattern.
    pattern = re.compile(r"\[METRICS\]\s*([\w\s]+)\.([\w\s]+):([0-9\-,.e]+)(?:\|#([^|]*))?(?:\|(\d+))?(?:\|([cgh]))?")
    values = {found[1]: int(found[3]) for line in lines if (found := pattern.fullmatch(line))}
    assert values == {"Requests": 3, "GeneratedTokens": 70, "Running": 0, "Waiting": 0}


def test_memory_that_ran_out_has_djls_own_status() -> None:
    assert load_status(ExecutorStartError("CUDA error: out of memory")) == 507
    assert load_status(ExecutorStartError("no such engine")) == 500
