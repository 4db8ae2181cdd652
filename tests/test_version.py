from __future__ import annotations

import re

import djl_trtllm
from djl_trtllm.version import __version__


def test_the_package_has_its_version() -> None:
    assert djl_trtllm.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
