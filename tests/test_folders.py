from __future__ import annotations

from djl_trtllm.folders import TRUSS_REPOSITORY


def test_where_a_truss_has_its_repository() -> None:
    assert TRUSS_REPOSITORY.as_posix() == "packages/inflight_batcher_llm"
