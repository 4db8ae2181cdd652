"""The adapters of a model."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError, UnknownAdapterError
from djl_trtllm.model.adapter import CONFIG_FILE, AdapterLimits
from djl_trtllm.request import Adapter
from djl_trtllm.service.adapters import Adapters, adapter_roots
from tests.support.adapters import write_adapter


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
    assert list(Adapters(folder)) == [
        Adapter("dutch", 1, str(folder / "dutch")),
        Adapter("french", 2, str(folder / "french")),
    ]


def test_an_adapter_is_found_by_its_name(folder: Path) -> None:
    assert Adapters(folder).find("french") == Adapter("french", 2, str(folder / "french"))


def test_a_model_without_adapters_has_none(tmp_path: Path) -> None:
    assert list(Adapters(tmp_path / "adapters")) == []


def test_an_unknown_adapter_is_reported_with_those_that_are_there(folder: Path) -> None:
    with pytest.raises(UnknownAdapterError, match=r"'german': registered are dutch, french$"):
        Adapters(folder).find("german")
    with pytest.raises(UnknownAdapterError, match="registered are none"):
        Adapters(folder / "notes").find("german")


@pytest.mark.parametrize(("count", "told"), [(10, "a8, a9$"), (11, "a8, a9, …$")])
def test_ten_adapters_are_reported_at_most(folder: Path, count: int, told: str) -> None:
    adapters = Adapters(folder / "notes")
    (folder / "notes" / "one").mkdir()
    (folder / "notes" / "one" / CONFIG_FILE).write_text("{}")
    for number in range(count):
        adapters.register(f"a{number}", "one")
    with pytest.raises(UnknownAdapterError, match=told):
        adapters.find("german")


def test_a_name_registered_anew_has_another_id(folder: Path) -> None:
    adapters = Adapters(folder)
    before = adapters.find("french").id
    adapters.unregister("french")
    assert adapters.register("french", "dutch").id not in (before, adapters.find("dutch").id)


def test_an_adapter_is_registered_and_taken_away(folder: Path) -> None:
    adapters = Adapters(folder)
    (folder / "notes" / "nested").mkdir()
    (folder / "notes" / "nested" / CONFIG_FILE).write_text("{}")
    added = adapters.register("new", "notes/nested")
    assert added == adapters.find("new") == Adapter("new", 3, str((folder / "notes" / "nested").resolve()))
    adapters.unregister("new")
    assert [adapter.name for adapter in adapters] == ["dutch", "french"]
    with pytest.raises(UnknownAdapterError):
        adapters.unregister("new")


@pytest.mark.parametrize("source", ["../outside", "/etc", "", "."])
def test_only_adapters_of_the_models_own_folder_are_registered(folder: Path, source: str) -> None:
    (folder / CONFIG_FILE).write_text("{}")
    with pytest.raises(InvalidRequestError, match=re.escape(f"the adapter's src is {source!r}")):
        Adapters(folder).register("new", source)


@pytest.mark.parametrize("source", ["notes", "missing"])
def test_what_holds_no_adapter_is_refused_by_its_place(folder: Path, source: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"adapters/{source} holds no adapter: adapter_config.json is"):
        Adapters(folder).register("new", source)


def test_an_adapter_has_a_name(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="needs a name"):
        Adapters(folder).register("", "dutch")


def test_a_link_does_not_lead_out(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "outside")
    with pytest.raises(InvalidRequestError, match="own folder only"):
        Adapters(folder).register("new", "link")


def test_names_are_not_taken_twice(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="already"):
        Adapters(folder).register("french", "dutch")


def test_an_adapter_of_another_root_is_registered_by_its_path(folder: Path) -> None:
    adapters = Adapters(folder, [folder.parent / "outside"])
    (folder.parent / "outside" / "greek").mkdir()
    (folder.parent / "outside" / "greek" / CONFIG_FILE).write_text("{}")
    (folder.parent / "outside" / "link").symlink_to(folder.parent)
    source = str(folder.parent / "outside" / "greek")
    assert adapters.register("greek", source) == Adapter("greek", 3, source)
    refused = {
        str(folder.parent / "outside"): "model's own folder, .*outside only",
        "../outside/../outside": "only",
        f"{source}/../link": "SERVING_ADAPTER_ROOTS",
        f"{source}/missing": "outside/greek/missing holds no adapter",
    }
    for src, told in refused.items():
        with pytest.raises(InvalidRequestError, match=told):
            adapters.register("new", src)


LIMITS = AdapterLimits(max_rank=8, rank_setting="option.max_lora_rank=8")


def test_an_adapter_that_the_engine_could_not_load_is_refused(folder: Path) -> None:
    adapters = Adapters(folder / "notes", limits=LIMITS)
    write_adapter(folder / "notes" / "wide", r=9)
    with pytest.raises(InvalidRequestError, match=r"the adapter 'new' cannot be used: .*adapter_config.json: r is 9"):
        adapters.register("new", "wide")
    write_adapter(folder / "notes" / "wide")
    assert adapters.register("new", "wide").id == 1


def test_what_the_engine_could_not_load_of_the_models_folder_is_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_adapter(folder / "french")
    adapters = Adapters(folder, limits=LIMITS)
    assert [adapter.name for adapter in adapters] == ["french"]
    assert "the adapter dutch is left out: " in caplog.text
    with pytest.raises(UnknownAdapterError, match=r"the adapter 'dutch' was not registered: .*: r is None"):
        adapters.find("dutch")
    write_adapter(folder / "dutch")
    assert adapters.register("dutch", "dutch") == adapters.find("dutch")
    adapters.unregister("dutch")
    with pytest.raises(UnknownAdapterError, match="there is no adapter 'dutch'"):
        adapters.find("dutch")


def test_roots_are_the_operators_or_sagemakers() -> None:
    named = Options(adapter_roots=("/a", "/b"))
    assert adapter_roots(named, {"SAGEMAKER_REGION": "x"}) == (Path("/a"), Path("/b"))
    assert adapter_roots(Options(), {"SAGEMAKER_REGION": "x"}) == (Path("/opt/ml"),)
    assert adapter_roots(Options(), {"HOME": "/"}) == ()


def test_of_two_that_register_a_name_at_the_same_time_one_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(folder / "notes" / "wide")
    adapters = Adapters(folder / "notes", limits=LIMITS)
    reading = threading.Barrier(2)
    monkeypatch.setattr("djl_trtllm.service.adapters.check_adapter", lambda *_: reading.wait(10))

    def register() -> str:
        try:
            return adapters.register("new", "wide").name
        except InvalidRequestError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        answers = [each.result() for each in [pool.submit(register), pool.submit(register)]]
    assert sorted(answers) == ["new", "there is an adapter 'new' already: unregister it first"]
