from __future__ import annotations

import threading

import pytest

from djl_trtllm.engines.lease import Lease
from djl_trtllm.errors import DownloadError
from tests.engines.helpers import wait_until
from tests.support.s3_server import BUCKET, Fault, Request, Store

QUICK = 0.04
"""Seconds of a lease that is renewed at once; by the store's clock, which stands still, it does not expire."""


def lease(seconds: float = 60.0) -> Lease:
    return Lease(BUCKET, "lease", seconds)


def refused(request: Request) -> int | None:
    raise Fault(403, "AccessDenied")


def test_of_all_machines_one_has_it(store: Store) -> None:
    first, second = lease(), lease()
    assert first.acquire()
    assert not second.acquire()
    assert not first.acquire()


def test_it_says_whose_it_is(store: Store) -> None:
    contents = set()
    for _ in range(2):
        assert lease().acquire()
        contents.add(store.objects.pop("lease").path.read_bytes())
    assert len(contents) == 2


def test_it_expires_by_the_stores_clock(store: Store) -> None:
    first, second = lease(), lease()
    assert first.acquire()
    store.seconds += 60
    assert not second.acquire()
    store.seconds += 1
    assert second.acquire()
    assert not first.acquire()


def test_of_two_that_find_it_expired_one_gets_it(store: Store) -> None:
    assert lease().acquire()
    store.seconds += 61

    def overtaken(request: Request) -> None:
        if (request.method, request.count) == ("PUT", 2):
            store.put("lease", b"another's")

    store.fault = overtaken
    assert not lease().acquire()


def test_one_that_is_given_back_at_that_moment_is_had(store: Store) -> None:
    assert lease().acquire()

    def given_back(request: Request) -> None:
        if request.method == "HEAD":
            store.objects.clear()
            raise Fault(404, "NoSuchKey")

    store.fault = given_back
    assert lease().acquire()


@pytest.mark.parametrize("status", [409, 412])
def test_one_that_another_machine_is_just_taking_is_not_had(store: Store, status: int) -> None:
    def refuse(request: Request) -> None:
        if request.method == "PUT":
            raise Fault(status, "ConditionalRequestConflict")

    store.fault = refuse
    store.put("lease", b"another's")
    assert not lease().acquire()


def test_of_two_that_find_it_given_back_one_gets_it(store: Store) -> None:
    assert lease().acquire()

    def overtaken(request: Request) -> None:
        if request.method == "HEAD":
            raise Fault(404, "NoSuchKey")

    store.fault = overtaken
    assert not lease().acquire()


def test_renewing_has_ended_before_it_is_given_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Watched(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            order.append(f"{self.name} joined")
            super().join(timeout)

    def note(request: Request) -> None:
        order.append(request.method)

    first = lease()
    assert first.acquire()
    store.fault = note
    monkeypatch.setattr(threading, "Thread", Watched)
    with first.held():
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "lease")
        assert thread.daemon  # the end of the process does not wait for it
    assert order == ["lease joined", "DELETE"]


def test_it_is_renewed_while_it_is_held_and_given_back(store: Store) -> None:
    first = lease(QUICK)
    assert first.acquire()
    with first.held():
        for _ in range(2):
            store.seconds += 100
            wait_until(lambda: store.objects["lease"].modified == store.seconds)
            assert not lease(QUICK).acquire()
    assert store.objects == {}


def test_it_is_given_back_when_what_it_was_for_fails(store: Store) -> None:
    first = lease()
    assert first.acquire()
    with pytest.raises(RuntimeError), first.held():
        raise RuntimeError
    assert store.objects == {}


def test_one_that_was_taken_over_is_neither_renewed_nor_given_back(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    first = lease(QUICK)
    assert first.acquire()
    with first.held():
        store.put("lease", b"another's")
        wait_until(lambda: "another machine took over the lease s3://models/lease" in caplog.text)
    assert store.objects["lease"].path.read_bytes() == b"another's"


def test_it_is_renewed_four_times_in_its_time(store: Store) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 2

    first, done = lease(60.0), threading.Event()
    assert first.acquire()
    done.wait = wait  # type: ignore[assignment,method-assign]
    first._renew(done)
    assert waits == [15.0] * 3


def test_a_store_that_fails_for_a_while_does_not_end_it(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    first = lease(QUICK)
    assert first.acquire()
    with first.held():
        store.fault = refused
        wait_until(lambda: "cannot renew the lease: s3://models/lease: access is denied" in caplog.text)
        store.fault = None
        store.seconds += 100
        wait_until(lambda: store.objects["lease"].modified == store.seconds)
    assert store.objects == {}


def test_one_that_cannot_be_given_back_expires(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    first = lease()
    assert first.acquire()
    with first.held():
        store.fault = refused
    assert "the lease was not released: s3://models/lease: access is denied" in caplog.text


def test_a_store_that_cannot_be_used_is_reported(store: Store) -> None:
    store.fault = refused
    with pytest.raises(DownloadError, match="s3://models/lease: access is denied"):
        lease().acquire()


def test_one_that_cannot_be_looked_at_is_reported(store: Store) -> None:
    assert lease().acquire()
    store.fault = lambda request: refused(request) if request.method == "HEAD" else None
    with pytest.raises(DownloadError, match="s3://models/lease: access is denied"):
        lease().acquire()


def test_where_the_bucket_is_missing_nobody_has_it(store: Store) -> None:
    assert not Lease("no-such-bucket", "lease", 60.0).acquire()
