"""Shared by the tests of the fake."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.installation import Observer, call


@pytest.fixture(scope="session")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Observer:
    return Observer(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="session")
def engine(observe: Observer, tiny_stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory of 1.2.1."""
    directory = tmp_path_factory.mktemp("engine") / "saved"
    observe(call("build_and_save", model=tiny_stories, engine=directory))
    return directory
