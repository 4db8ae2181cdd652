"""The model of a DJL worker process."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import socket
from collections import deque
from pathlib import Path
from typing import Any, cast

import pytest

from djl_trtllm.api.base import Call
from djl_trtllm.config import Options
from djl_trtllm.djl import worker
from djl_trtllm.djl.worker import (
    Item,
    ItemWriter,
    Metrics,
    Stream,
    Streams,
    is_passive,
    load_status,
    open_worker_model,
    require_mode,
    take,
)
from djl_trtllm.errors import (
    DjlTrtllmError,
    ExecutorStartError,
    GenerationError,
    InvalidRequestError,
    ModelError,
    OverloadedError,
)
from djl_trtllm.executor.protocol import Feature
from djl_trtllm.logs import RequestContext
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import GenerationRequest, OutputChunk, Sampling
from djl_trtllm.service.lifecycle import ModelService
from djl_trtllm.service.model import Model, ModelSource
from djl_trtllm.telemetry import ServedRequest, Telemetry
from tests.support.djl import Input, Reader, Socket
from tests.support.in_process import Hosts, ask, played_model
from tests.support.models import WordEncoder, chunk, scripted_model


@pytest.mark.parametrize(("rank", "passive"), [(None, False), ("0", False), ("1", True)])
def test_of_mpis_processes_the_first_has_the_model(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, passive: bool
) -> None:
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    assert is_passive() is passive


# -- the model ---------------------------------------------------------------------------------------------------------


def test_the_model_is_that_of_djls_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(log := io.StringIO())])
    path = scripted_model(tmp_path / "model")
    assert open_worker_model({"model_dir": str(path)}).directory == path
    with RequestContext("r-1"):
        logging.warning("a wolf")
    assert log.getvalue() == "[r-1] a wolf\n"
    monkeypatch.chdir(path)
    assert open_worker_model({}).directory == path


def test_the_engine_process_is_no_part_of_djls_mpi_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PRTE_X"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("COMPILE_MODE", "kept")
    open_worker_model({"model_dir": scripted_model(tmp_path / "model")})
    assert not [name for name in os.environ if name.startswith(("OMPI_", "PMIX_", "PMI_", "PRTE_"))]
    assert os.environ["COMPILE_MODE"] == "kept"


def test_where_djl_has_put_a_model_that_it_fetched_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = scripted_model(tmp_path / "fetched")
    sources: list[ModelSource] = []
    monkeypatch.setattr(worker, "prepare", lambda source, under_djl: sources.append(source))
    options = {"option.model_id": "acme/story", "option.max_input_len": 77}
    path = scripted_model(tmp_path / "model", None, **options)
    open_worker_model({"model_dir": str(path), "model_id": str(fetched)})
    open_worker_model({"model_dir": str(path), "model_id": "acme/elsewhere"})
    open_worker_model({"model_dir": str(path)})
    assert [source.config.options.model_id for source in sources] == [str(fetched), "acme/story", "acme/story"]
    assert [(source.name, source.directory) for source in sources] == [("scripted", path)] * 3
    assert [source.config.options.max_input_len for source in sources] == [77] * 3
    own = scripted_model(tmp_path / "own", None, **{"option.model_id": str(fetched)})
    open_worker_model({"model_dir": str(own), "model_id": str(fetched)})
    assert "serving.properties" in str(sources[-1].config.origin("model_id")), "it keeps its origin"


# -- modes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("properties", [{"rolling_batch": "enable"}, {"rolling_batch": "auto"}])
def test_each_handler_is_for_its_mode(properties: dict[str, str]) -> None:
    require_mode(properties, rolling=True)
    with pytest.raises(ModelError, match=r"djl_trtllm\.async_handler is for DJL's async mode: set option\.async_mode"):
        require_mode(properties, rolling=False)


@pytest.mark.parametrize(("message", "status"), [("CUDA error: Out Of Memory", 507), ("no such engine", 500)])
def test_djl_has_a_status_for_memory_that_ran_out(message: str, status: int) -> None:
    error: DjlTrtllmError = ExecutorStartError(message)
    assert load_status(error) == status


# -- metrics -----------------------------------------------------------------------------------------------------------


_DJLS_PATTERN = re.compile(r"\[METRICS\]\s*([\w\s]+)\.([\w\s]+):([0-9\-,.e]+)(?:\|#([^|]*))?(?:\|(\d+))?(?:\|([cgh]))?")
"""Of `ai.djl.metric.Metric`."""


def values(lines: list[str]) -> dict[str, int]:
    """The figures of lines that all have the unit and the dimensions they should have, as DJL reads them."""
    found = [_DJLS_PATTERN.fullmatch(line) for line in lines]
    parts = [match.groups() for match in found if match is not None]
    assert [(unit, dimensions) for _, unit, _, dimensions, _, _ in parts] == [
        ("Count", f"Model:story,Host:{socket.gethostname()}") for _ in lines
    ]
    return {name: int(value) for name, _, value, *_ in parts}


async def test_metrics_are_what_happened_since_the_last_ones(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    metrics = Metrics(service)
    assert metrics.lines() == []
    model: Model = played_model(tokenizer, max_rolling_batch_size=1)
    await service.load(model)
    assert metrics.lines() == []
    for tokens in (3, 2):
        await ask(service, tokens)
    hosts.last.step(2)
    assert values(metrics.lines()) == {"Requests": 2, "GeneratedTokens": 2, "Running": 1, "Waiting": 1}
    hosts.last.step()
    assert values(metrics.lines()) == {"Requests": 0, "GeneratedTokens": 1, "Running": 1, "Waiting": 0}
    assert values(metrics.lines()) == {"Requests": 0, "GeneratedTokens": 0, "Running": 1, "Waiting": 0}
    hosts.last.step(2)
    assert values(metrics.lines()) == {"Requests": 0, "GeneratedTokens": 2, "Running": 0, "Waiting": 0}
    assert metrics.lines() == []
    await service.close()


async def test_what_only_waits_or_came_and_went_is_news(hosts: Hosts, tokenizer: Tokenizer) -> None:
    service = ModelService("story")
    metrics = Metrics(service)
    await service.load(played_model(tokenizer))
    asked = await ask(service)
    service.cancel(asked.generations)
    hosts.last.step()
    assert values(metrics.lines()) == {"Requests": 1, "GeneratedTokens": 0, "Running": 0, "Waiting": 0}
    assert service.batch is not None
    service.batch.admit(1)
    assert values(metrics.lines()) == {"Requests": 0, "GeneratedTokens": 0, "Running": 0, "Waiting": 1}
    await service.close()


def test_the_log_does_not_say_that_what_djl_serving_reads_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"option.async_mode": "true", "minWorkers": 1, "option.skip_tokenizer_init": "true"}
    path = scripted_model(tmp_path / "model", None, **options)
    with caplog.at_level("INFO"):
        open_worker_model({"model_dir": str(path)})
    assert "option.skip_tokenizer_init = true" in caplog.text
    assert "option.async_mode" not in caplog.text and "minWorkers" not in caplog.text


# -- LoRA adapters -----------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("dutch", "more/greek"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    return tmp_path


async def test_adapters_are_registered_and_unregistered_or_it_is_said_why_not(
    hosts: Hosts, tokenizer: Tokenizer, directory: Path
) -> None:
    hosts.features |= {Feature.ADAPTERS}
    service = ModelService("story")
    await service.load(played_model(tokenizer, directory))
    for change, properties, told in (
        (worker.register, {"name": "greek", "src": str(directory / "adapters" / "more" / "greek")}, "greek registered"),
        (worker.register, {}, "needs a name"),
        (worker.register, {"name": "dutch"}, "'dutch' already"),
        (worker.unregister, {"name": "german"}, "'german': registered are dutch"),
        (worker.unregister, {}, "no adapter ''"),
        (worker.unregister, {"name": "dutch"}, "dutch unregistered"),
        (worker.register, {"name": "dutch"}, "dutch registered"),  # from the folder of its name
    ):
        item = change(service, Input(b"", **properties))
        if told.endswith("registered"):
            assert item == Item(f"Adapter {told}".encode(), True)
        else:
            assert (item.data, item.last, item.code) == (b"", True, 424) and told in item.error
    assert service.adapters.find("greek").path.endswith("more/greek")
    assert [adapter.name for adapter in service.adapters] == ["greek", "dutch"]
    await service.close()


# -- async mode --------------------------------------------------------------------------------------------------------

NUMBER = "request_tracking_id"


class Carried:
    """A stream, and what it has brought into djl_python's queue."""

    def __init__(self, streams: Streams, number: str, queue: asyncio.Queue[Streams] | None = None) -> None:
        self.number = number
        self.stream = Stream(streams, number)
        self.brought: list[Streams] = []
        self._queue = queue
        self.task = asyncio.ensure_future(self._carry())

    async def _carry(self) -> None:
        async for streams in self.stream.carry():
            self.brought.append(streams)
            if self._queue is not None:
                await self._queue.put(streams)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def sent(streams: Streams) -> Socket:
    """What one turn of djl_python's sender writes."""
    connection = Socket()
    streams.send(cast(Any, connection))
    return connection


async def test_an_item_is_framed_with_its_requests_number() -> None:
    streams = Streams()
    carried = Carried(streams, "r1")
    carried.stream.put(Item(b"a", properties=(("Content-Type", "text/plain"),)))
    (frame,) = sent(streams).frames
    assert (frame.code, frame.message) == (200, "OK")
    assert frame.properties == {NUMBER: "r1", "Content-Type": "text/plain"}
    assert frame.contents == [{"data": "a", "last": "false"}]
    carried.stream.put(Item(b"b", True))
    (frame,) = sent(streams).frames
    assert frame.properties == {NUMBER: "r1"}
    assert frame.contents == [{"data": "b", "last": "true"}]
    await carried.task


async def test_a_request_ends_when_it_has_brought_its_last_item() -> None:
    streams = Streams()
    one, other = Carried(streams, "r1"), Carried(streams, "r2")
    one.stream.put(Item(b"a"))
    await settle()
    assert not one.task.done()
    other.stream.put(Item(b"b", True))
    await settle()
    # `one` has brought the queue's reference, in which the last item of `other` travels.
    assert (other.brought, other.task.done()) == ([], True)
    one.stream.put(Item(b"c", True))
    await settle()
    assert one.task.done()
    assert [frame.contents[0]["data"] for frame in sent(streams).frames] == ["a", "c", "b"]


@pytest.mark.parametrize("backlog", [1, 3, 1000])
async def test_every_token_arrives_once_and_in_order_however_long_the_backlog(backlog: int) -> None:
    """djl_python's sender takes all that is in its queue every `backlog` steps."""
    steps = 50
    streams, queue, connection = Streams(), asyncio.Queue[Streams](), Socket()
    carried = [Carried(streams, f"r{number}", queue) for number in range(5)]

    def take_all() -> None:
        while not queue.empty():
            queue.get_nowait().send(cast(Any, connection))

    longest = 0
    for step in range(steps):
        for each in carried:
            each.stream.put(Item(f"{step};".encode(), step == steps - 1))
        await settle()
        longest = max(longest, queue.qsize())
        if step % backlog == 0:
            take_all()
    await asyncio.gather(*(each.task for each in carried))
    take_all()
    assert longest == 1
    assert len(connection.writes) <= steps // backlog + 2
    for each in carried:
        own = [frame.contents[0] for frame in connection.frames if frame.properties == {NUMBER: each.number}]
        assert "".join(content["data"] for content in own) == "".join(f"{step};" for step in range(steps))
        assert [content["last"] for content in own] == ["false"] * (len(own) - 1) + ["true"]


END = Item(last=True)


def test_a_part_of_an_answer_is_two_pairs() -> None:
    encoded = Item("der böse Wolf".encode()).encode()
    assert encoded == (
        b"\x00\x02\x00\x00\x00\x04data\x00\x00\x00\x0eder b\xc3\xb6se Wolf\x00\x00\x00\x04last\x00\x00\x00\x05false"
    )
    assert Reader(Item(b"a wolf", True).encode()).pairs() == {"data": "a wolf", "last": "true"}


def test_an_error_is_four_pairs_without_data() -> None:
    encoded = Item(b"not sent", False, 503, "völlig voll").encode()
    assert Reader(encoded).pairs() == {"code": "503", "error": "völlig voll", "data": "", "last": "true"}
    assert list(Reader(encoded).pairs()) == ["code", "error", "data", "last"]


BROKEN = Item(b"", True, 500, "broken")


@pytest.mark.parametrize(
    ("items", "taken"),
    [
        (
            [Item(b"a", properties=(("A", "1"),)), Item(b" wolf"), Item(b".", properties=(("B", "2"),))],
            [Item(b"a wolf.", False, None, "", (("A", "1"), ("B", "2")))],
        ),
        ([Item(b"a"), Item(b"."), END], [Item(b"a."), END]),
        ([Item(b"a"), Item(b"b"), BROKEN], [Item(b"ab"), BROKEN]),
        ([BROKEN, Item(b"a")], [BROKEN, Item(b"a")]),
    ],
)
def test_items_of_a_request_travel_as_one_but_for_its_end_and_an_error(items: list[Item], taken: list[Item]) -> None:
    waiting = deque(items)
    assert [take(waiting) for _ in taken] == taken
    assert not waiting


JSON = ("Content-Type", "application/json")
WORDS = ("Content-Type", "text/words")


class Told(Telemetry):
    """Keeps what is reported: the status and the error at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int | str, str]] = []

    def ended_soon(self, request: ServedRequest) -> None:
        self.told.append((request.status, request.error))


class Answered:
    """An answer and its items."""

    def __init__(self, encoder: WordEncoder | None = None, *, sequences: int = 1) -> None:
        self.items: list[Item] = []
        self.encoder = encoder or WordEncoder()
        self.served = ServedRequest("r-1", "DJL", "/invocations")
        telemetry = Told()
        self.told = telemetry.told
        self.answer = ItemWriter(self.items.append, Options(throttle_error_http_code=529), self.served, telemetry)
        self.request = GenerationRequest(sampling=Sampling(n=sequences))
        self.expect()

    def expect(self, *headers: tuple[str, str]) -> None:
        self.answer.expect(Call((self.request,), self.encoder, headers))


class Silent(WordEncoder):
    def encode(self, chunk: object) -> bytes:
        return b""


FULL = OverloadedError("full", queue_depth=1, capacity=1, retry_after=7)


@pytest.mark.parametrize(
    ("sequences", "chunks", "items", "ended"),
    [
        (1, [chunk("a"), chunk(" wolf"), chunk(ends=True)], [b"a", b" wolf", b".", END], (200, "")),
        (1, [chunk("a", ends=True), chunk("b")], [b"a.", END], (200, "")),
        (2, [chunk("a", ends=True, index=1), chunk("b", ends=True)], [b"a.", b"b.", END], (200, "")),
        (1, [chunk("a"), chunk(" b", error=GenerationError("failed"))], [b"a", b" b?", END], (200, "")),
        (
            *(1, [chunk(error=FULL)]),
            *([Item(b"", True, 529, "full", (JSON, ("Retry-After", "7")))], (529, "OverloadedError")),
        ),
    ],
)
def test_every_chunk_is_an_item_until_the_response_is_complete_and_the_first_says_what_they_are(
    sequences: int,
    chunks: list[OutputChunk],
    items: list[bytes | Item],
    ended: tuple[int, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    answered, warning = Answered(sequences=sequences), ("Warning", "299 - ignored")
    answered.expect(warning)
    for each in chunks:
        answered.answer.deliver(each)
    answered.answer.fail(InvalidRequestError("late"))
    wanted = [item if isinstance(item, Item) else Item(item) for item in items]
    if wanted[0].code is None:
        wanted[0] = wanted[0]._replace(properties=(WORDS, warning))
    assert answered.items == wanted
    assert (answered.told, answered.answer.complete, caplog.records) == ([ended], True, [])


def test_a_chunk_without_bytes_is_no_item_unless_it_is_the_last() -> None:
    answered = Answered(Silent())
    answered.answer.deliver(chunk("a"))
    assert (answered.items, answered.answer.complete) == ([], False)
    answered.answer.deliver(chunk(ends=True))
    assert answered.items == [Item(b"", True, properties=(WORDS,))]


def test_a_request_that_could_not_be_read_is_refused() -> None:
    items: list[Item] = []
    served = ServedRequest("r-1", "DJL", "/invocations")
    telemetry = Told()
    ItemWriter(items.append, Options(), served, telemetry).fail(InvalidRequestError("no such field"))
    assert telemetry.told == [(424, "InvalidRequestError")]
    assert items == [Item(b"", True, 424, "no such field", (JSON,))]


@pytest.mark.parametrize("last", [b"!", b""], ids=["told by its dialect", "by DJL"])
def test_a_formatter_that_refuses_in_a_stream_has_its_last_word(last: bytes) -> None:
    answered = Answered(WordEncoder(last=last))
    answered.answer.deliver(chunk("a"))
    answered.encoder.failure = InvalidRequestError("no such field")
    answered.answer.deliver(chunk("b"))
    assert answered.answer.complete
    assert answered.items[1:] == ([Item(b"!"), END] if last else [Item(b"", True, 424, "no such field", (JSON,))])


@pytest.mark.parametrize("begun", [True, False])
def test_a_defect_is_for_the_log_and_not_for_the_client(caplog: pytest.LogCaptureFixture, begun: bool) -> None:
    answered = Answered()
    if begun:
        answered.answer.deliver(chunk("a"))
    answered.encoder.failure = KeyError("secret")
    answered.answer.deliver(chunk("b"))
    told = "Internal server error, see the server's log."
    assert answered.items[-1] == Item(b"", True, 500, told, (JSON,))
    assert "secret" in caplog.text
