"""The vLLM of the tests: the installed one, or the fake where there is none."""

from __future__ import annotations

from pathlib import Path

from djl_trtllm.backends.vllm.names import installed_package

FAKE = Path(__file__).parents[2] / "fakes" / "vllm"
IS_INSTALLED = installed_package() is not None
"""Before the fake is put on the path."""
