from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.registry import this_machine


def files(directory: Path, **contents: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (directory / name.replace("__", ".")).write_text(content)
    return directory


Probe = Callable[[Path], list[Any]]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    """What a process sees that has a folder on its path; importing TensorRT-LLM there would fail."""

    def look(site: Path) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(site), *sys.path])
            importlib.invalidate_caches()
            found = this_machine()
        assert "tensorrt_llm" not in sys.modules
        return [found.tensorrt_llm, found.tensorrt, found.engine_backend, found.has_engine_backend]

    return look


def install(site: Path, *, engine_backend: bool, **versions: str) -> Path:
    """A TensorRT-LLM that cannot be imported, and the metadata of distributions, `_` for `-` in their names."""
    package = site / "tensorrt_llm"
    files(package, version__py='__version__ = "1.2.0rc8"\n')
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    if engine_backend:
        (package / "_tensorrt_engine").mkdir()
    for name, version in versions.items():
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        files(site / f"{name}-{version}.dist-info", METADATA=metadata)
    return site


def test_tensorrt_llm_is_found_without_importing_it(tmp_path: Path, probe: Probe) -> None:
    site = install(tmp_path, engine_backend=True, tensorrt_llm="1.2.1", tensorrt="10.14.1.48")
    assert probe(site) == ["1.2.1", "10.14.1.48", True, True]


def test_a_tensorrt_llm_without_the_engine_backend_is_reported_by_its_files(tmp_path: Path, probe: Probe) -> None:
    assert probe(install(tmp_path, engine_backend=False, tensorrt_llm="1.3.0")) == [
        "1.3.0",
        None,
        False,
        False,
    ]


def test_a_source_checkout_tells_its_version_in_a_file(tmp_path: Path, probe: Probe) -> None:
    assert probe(install(tmp_path, engine_backend=True, tensorrt_cu13="10.13"))[:2] == [
        "1.2.0rc8",
        "10.13",
    ]
    files(tmp_path / "tensorrt_cu12-10.12.dist-info", METADATA="Name: tensorrt-cu12\nVersion: 10.12\n")
    assert probe(tmp_path)[1] == "10.13"
    (tmp_path / "tensorrt_cu13-10.13.dist-info" / "METADATA").unlink()
    (tmp_path / "tensorrt_cu13-10.13.dist-info").rmdir()
    assert probe(tmp_path)[1] == "10.12"
    (tmp_path / "tensorrt_llm" / "version.py").unlink()
    assert probe(tmp_path)[0] == "of unknown version"


@pytest.mark.skipif(this_machine().tensorrt_llm is not None, reason="TensorRT-LLM is installed here")
def test_where_tensorrt_llm_is_not_installed_nothing_is_said_of_it(tmp_path: Path, probe: Probe) -> None:
    assert probe(tmp_path) == [None, None, None, False]
