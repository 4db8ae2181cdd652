from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.commands.demo import demo_model
from djl_trtllm.errors import ModelError


def test_a_clone_has_the_bundled_model(tiny_stories: Path) -> None:
    assert demo_model() == tiny_stories


def test_an_installed_package_has_its_own(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "djl_trtllm"
    (package / "demo" / "tiny-stories").mkdir(parents=True)
    assert demo_model(package) == package / "demo" / "tiny-stories"


def test_an_installation_without_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no demonstration model.*djl-trtllm\[cpu\]"):
        demo_model(tmp_path / "djl_trtllm")
