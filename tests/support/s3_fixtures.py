"""A store in S3 for the tests of a folder: its conftest.py imports these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.s3_server import Store, s3_server, variables


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, str]]:
    """A store for all tests, because each endpoint costs a client of its own."""
    store = Store(tmp_path_factory.mktemp("store"))
    with s3_server(store) as endpoint:
        yield store, endpoint


@pytest.fixture
def store(s3: tuple[Store, str], monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store, of which this process is a client."""
    store, endpoint = s3
    store.clear()
    for name, value in variables(endpoint).items():
        monkeypatch.setenv(name, value)
    return store
