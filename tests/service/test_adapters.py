"""The adapters of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.errors import InvalidRequestError, UnknownAdapterError
from djl_trtllm.service.adapters import Adapters


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("dutch", "french"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    (tmp_path / "adapters" / "notes").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "adapter_config.json").write_text("{}")
    return tmp_path / "adapters"


def test_adapters_of_the_models_folder_are_registered(folder: Path) -> None:
    assert [(adapter.name, adapter.path) for adapter in Adapters(folder)] == [
        ("dutch", str(folder / "dutch")),
        ("french", str(folder / "french")),
    ]


def test_a_model_without_adapters_has_none(tmp_path: Path) -> None:
    assert list(Adapters(tmp_path / "adapters")) == []


def test_an_unknown_adapter_is_told_with_those_that_are_there(folder: Path) -> None:
    with pytest.raises(UnknownAdapterError, match=r"'german': registered are dutch, french"):
        Adapters(folder).find("german")


def test_a_name_registered_anew_has_another_id(folder: Path) -> None:
    adapters = Adapters(folder)
    before = adapters.find("french").id
    adapters.unregister("french")
    assert adapters.register("french", "dutch").id not in (before, adapters.find("dutch").id)


@pytest.mark.parametrize("source", ["../outside", "/etc", "", ".", "notes", "missing"])
def test_only_adapters_of_the_models_own_folder_are_registered(folder: Path, source: str) -> None:
    with pytest.raises(InvalidRequestError):
        Adapters(folder).register("new", source)


def test_a_link_does_not_lead_out(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "outside")
    with pytest.raises(InvalidRequestError, match="own folder only"):
        Adapters(folder).register("new", "link")


def test_names_are_not_taken_twice(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="already"):
        Adapters(folder).register("french", "dutch")
