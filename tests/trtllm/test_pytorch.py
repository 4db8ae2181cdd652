"""The PyTorch backend: a checkpoint served as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.trtllm.conftest import START_SECONDS, Installation, MakeModel, ask, run_cli, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_SECONDS)]


def test_a_checkpoint_is_served_without_compiling(
    installation: Installation, make_model: MakeModel, tmp_path: Path
) -> None:
    own_cache = replace(installation, environ={**installation.environ, "DJL_CACHE_DIR": str(tmp_path / "cache")})
    with serving(own_cache, make_model("pytorch")) as server:
        assert ask(server, "once upon a time", max_new_tokens=16).status_code == 200
    assert not list((tmp_path / "cache").rglob("*.engine"))


def test_compile_says_that_there_is_nothing_to_compile(
    installation: Installation, make_model: MakeModel, tmp_path: Path
) -> None:
    result = run_cli(installation, "compile", str(make_model("pytorch")), str(tmp_path / "out"))
    assert result.returncode == 1
    assert "pytorch" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_runtime_options_are_taken(installation: Installation, make_model: MakeModel) -> None:
    """Arguments that the real constructor does not have are an error of its own."""
    options = {
        "enable_chunked_context": "true",
        "max_num_tokens": 1024,
        "kv_cache_free_gpu_mem_fraction": 0.3,
        "batch_scheduler_policy": "guaranteed_no_evict",
        "enable_kv_cache_reuse": "true",
        "disable_cuda_graph": "true",
        "enable_iter_perf_stats": "true",
        "stream_interval": 2,
    }
    with serving(installation, make_model("pytorch", **options)) as server:
        assert ask(server, "once upon a time", max_new_tokens=16).status_code == 200
