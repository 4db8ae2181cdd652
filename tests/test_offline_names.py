"""`djl_trtllm` has the names of `djl_trtllm.offline`, and loads what is behind them when one is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import djl_trtllm
from djl_trtllm import offline


def test_every_name_of_the_offline_api_is_one_of_the_package() -> None:
    names: dict[str, object] = {}
    exec("from djl_trtllm import *", names)
    del names["__builtins__"]
    assert names.pop("create_app") is djl_trtllm.create_app
    assert names == {"__version__": djl_trtllm.__version__} | {name: getattr(offline, name) for name in offline.__all__}


@pytest.mark.parametrize("name", ["Path", "BatchingTypes", "run_prompts"])
def test_no_other_name_is(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'djl_trtllm' has no attribute '{name}'"):
        getattr(djl_trtllm, name)


def test_what_is_not_of_the_api_does_not_load_it() -> None:
    program = (
        "import sys, djl_trtllm\n"
        "from djl_trtllm import errors, __version__\n"
        "hasattr(djl_trtllm, 'nothing')\n"
        "assert 'djl_trtllm.offline' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
