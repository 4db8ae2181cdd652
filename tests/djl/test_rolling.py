"""Rolling batch mode: DJL's list of requests, call by call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest

from djl_trtllm.djl import worker as worker_module
from djl_trtllm.djl.worker import Item, RollingWorker
from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.model import Tokenizer
from djl_trtllm.service.lifecycle import State
from tests.server.application import body
from tests.support.djl import Input
from tests.support.in_process import PROMPT, Hosts, played_model
from tests.support.processes import wait_until

JSON = {"Content-Type": "application/json"}
Make = Callable[..., "Djl"]


class Request:
    """A place in DJL's list, and what it has got."""

    def __init__(self, content: bytes, properties: Mapping[str, str] = JSON) -> None:
        self.content, self.properties = content, properties
        self.items: list[Item] = []

    @property
    def text(self) -> str:
        return b"".join(item.data for item in self.items).decode()

    @property
    def last(self) -> bool:
        return bool(self.items) and self.items[-1].last

    @property
    def refusal(self) -> tuple[int | None, str]:
        """Status and message of a request that got nothing else."""
        (item,) = self.items
        assert item.last
        return item.code, item.error


class Djl:
    """DJL's Java side: a list of requests, and a worker that is called with it."""

    def __init__(self, hosts: Hosts, worker: RollingWorker) -> None:
        self.hosts, self.worker = hosts, worker
        self.list: list[Request] = []

    def call(self, *new: bytes | Request, **properties: str) -> list[Request]:
        """A call, with new requests at the end of the list. Those that are complete leave it."""
        requests = [each if isinstance(each, Request) else Request(each) for each in new]
        known = len(self.list)
        self.list += requests
        places = {known + index: (each.content, each.properties) for index, each in enumerate(requests)}
        items = self.worker.step(Input.batch(len(self.list), places, **properties))
        for request, item in zip(self.list, items, strict=True):
            if item is not None:
                assert not request.last
                request.items.append(item)
        self.list = [request for request in self.list if not request.last]
        self.settle()
        return requests

    def begin(self, *new: bytes | Request) -> list[Request]:
        """New requests, which have reached the model afterwards."""
        return self.call(*new)

    def until(self, condition: Callable[[], bool]) -> None:
        """Call until a condition holds."""

        def called() -> bool:
            self.call()
            return condition()

        wait_until(called)

    def generate(self, steps: int = 1) -> None:
        """Iterations of the engine, and a call for what has come of them."""
        self.on_loop(lambda: self.hosts.last.step(steps))
        self.call()

    def on_loop(self, work: Callable[[], object]) -> None:
        """Do something in the model's thread."""
        self.worker.call(lambda _: work())

    def settle(self) -> None:
        """Whatever was handed to the model's thread is done there."""
        for _ in range(3):
            self.worker.call(lambda _: None)


@pytest.fixture
def make(hosts: Hosts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """`make(**options)`: a worker whose model is `story`. Its thread ends with the test."""
    monkeypatch.setattr(worker_module, "settle_garbage_collector", lambda: None)
    made: list[RollingWorker] = []

    def make_one(**options: Any) -> Djl:
        made.append(RollingWorker(played_model(tokenizer, **options)))
        return Djl(hosts, made[-1])

    yield make_one
    for worker in made:
        asyncio.run_coroutine_threadsafe(worker.service.close(), worker.loop).result(60)
        worker.loop.call_soon_threadsafe(worker.loop.stop)
        wait_until(lambda worker=worker: not worker.loop.is_running(), what="the end of the loop")  # type: ignore[misc]
        worker.loop.close()


def text(tokenizer: Tokenizer, first: int, last: int) -> str:
    """Tokens of what the scripted executor makes of the prompt."""
    ids = tokenizer.encode(PROMPT)
    return tokenizer.decode(ids[:last])[len(tokenizer.decode(ids[:first])) :]


def plain(tokens: int) -> bytes:
    """A streamed request that is answered with nothing but its text."""
    return body(tokens, stream=True, output_formatter="none")


# -- answers -----------------------------------------------------------------------------------------------------------


def test_each_call_brings_what_has_come_up(make: Make, tokenizer: Tokenizer) -> None:
    djl = make()
    (request,) = djl.begin(plain(4))
    djl.generate(2)
    assert request.items == [Item(text(tokenizer, 0, 2).encode(), properties=(("Content-Type", "text/plain"),))]
    djl.call()
    assert len(request.items) == 1
    djl.generate(2)
    assert request.items[1:] == [Item(text(tokenizer, 2, 4).encode())]
    djl.call()
    assert request.items[2:] == [Item(last=True)]
    assert djl.list == []


def test_requests_come_and_go_and_keep_their_places(make: Make, tokenizer: Tokenizer) -> None:
    djl = make()
    short, long = djl.begin(plain(1), plain(3))
    djl.generate()
    djl.call()
    assert (short.last, long.last) == (True, False)
    (new,) = djl.begin(plain(2))
    djl.generate(2)
    djl.call()
    assert (long.last, new.last) == (True, True)
    assert [short.text, long.text, new.text] == [text(tokenizer, 0, tokens) for tokens in (1, 3, 2)]


def test_a_call_keeps_djl_neither_spinning_nor_waiting(make: Make) -> None:
    class Patience(threading.Event):
        waits: ClassVar[list[float | None]] = []

        def wait(self, timeout: float | None = None) -> bool:
            self.waits.append(timeout)
            return super().wait(timeout)

    djl = make()
    djl.worker.arrived = patience = Patience()
    djl.call()
    assert patience.waits == [0.008]
    djl.begin(plain(1))
    assert not patience.is_set()
    djl.on_loop(djl.hosts.last.step)
    assert patience.is_set(), "a call does not wait for what is there"


def test_headers_are_the_requests_own(make: Make) -> None:
    djl = make()
    fine, refused = djl.begin(Request(b"a wolf", {"Content-Type": "text/plain"}), b"a wolf")
    djl.until(lambda: refused.last)
    assert refused.refusal[0] == 424
    assert (fine.items, len(djl.hosts.last.submitted)) == ([], 1)


# -- lists that differ -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False])
def test_a_list_that_djl_has_dropped_is_cancelled(make: Make, caplog: pytest.LogCaptureFixture, told: bool) -> None:
    djl = make()
    djl.begin(plain(9), plain(9))
    djl.list.clear()
    (new,) = djl.call(plain(9), **({"reset_rollingbatch": "true"} if told else {}))
    assert djl.hosts.last.cancelled == [0, 1]
    assert "DJL dropped 2 running requests; they are cancelled" in caplog.text
    djl.generate(2)
    assert new.text


def test_a_list_that_is_dropped_is_so_even_if_the_next_is_as_long(make: Make) -> None:
    djl = make()
    djl.begin(plain(9))
    djl.list.clear()
    djl.worker.step(Input.batch(1, {}, reset_rollingbatch="true"))
    djl.settle()
    assert djl.hosts.last.cancelled == [0]


def test_requests_that_are_not_known_here_are_lost_and_nothing_else(make: Make) -> None:
    djl = make()
    djl.begin(plain(9))
    lost = [Request(b""), Request(b"")]
    djl.list += lost
    (new,) = djl.call(plain(9))
    told = "the request was lost between DJL Serving and its worker; it may be repeated"
    # The one that was known is not any more: nothing says which of them it was.
    assert [request.refusal for request in lost] == [(500, told)] * 2
    assert djl.hosts.last.cancelled == [0]
    djl.generate(2)
    assert new.text


def test_an_empty_list_drops_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    djl = make()
    assert djl.call(reset_rollingbatch="true") == []
    assert caplog.records == []


def test_a_request_that_is_dropped_while_its_prompt_is_tokenised_is_cancelled(
    make: Make, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, free = threading.Event(), threading.Event()
    encode = tokenizer.encode

    def slow(text: str, special: bool = True, most: int | None = None) -> list[int]:
        begun.set()
        assert free.wait(60)
        return encode(text, special, most)

    djl = make(max_input_len=8000)
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer, "encode", slow)
        djl.call(b'{"inputs": "' + b"a wolf " * 2000 + b'"}')
        assert begun.wait(60)
        djl.list.clear()
        djl.call(reset_rollingbatch="true")
        free.set()
        djl.until(lambda: djl.hosts.last.cancelled == [0])


# -- the model ---------------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_load_is_an_error_and_is_not_tried_again(
    make: Make, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_RESTART_SECONDS", 0.0)
    hosts.failures = [ExecutorStartError("no such engine")]
    with pytest.raises(ExecutorStartError, match="no such engine"):
        make()
    assert len(hosts.made) == 1


def test_a_model_that_has_failed_is_started_anew(
    make: Make, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "_RESTART_SECONDS", 0.01)
    djl = make(retry_threshold=0)
    (lost,) = djl.begin(plain(9))
    failed = djl.worker.service
    hosts.failures = [ExecutorStartError("no room yet")]
    djl.on_loop(hosts.last.die)
    djl.call()
    assert lost.refusal[0] == 424
    # Once it fails again, and then it serves.
    wait_until(lambda: len(hosts.made) == 3 and djl.worker.call(lambda service: service.state) is State.READY)
    assert caplog.text.count("restarting model story in 0.01 seconds") == 2
    (request,) = djl.begin(plain(1))
    djl.generate()
    assert request.last
    assert djl.worker.metrics.lines() != []
    assert failed.batch is None, "it is closed"


def test_a_model_that_is_to_start_again_by_itself_is_not_started_anew(
    make: Make, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_RESTART_SECONDS", 0.0)
    monkeypatch.setattr("djl_trtllm.service.engine._FIRST_PAUSE_SECONDS", 0.1)
    djl = make(retry_threshold=1)
    service = djl.worker.service
    hosts.failures = [ExecutorStartError("no room yet")]
    djl.on_loop(hosts.last.die)
    wait_until(lambda: len(hosts.made) == 3 and djl.worker.call(lambda service: service.state) is State.READY)
    assert djl.worker.service is service


def test_metrics_are_printed_now_and_then(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_module, "METRICS_SECONDS", 0.01)
    djl = make()
    djl.begin(plain(9))
    printed: list[str] = []

    def again() -> bool:
        printed.append(capsys.readouterr().out)
        return "".join(printed).count("[METRICS]Running.Count:1|#Model:story") >= 2

    wait_until(again, what="metrics, twice")
