"""`djl-trtllm cache`."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from djl_trtllm import cli
from djl_trtllm.engines.cache import EngineCache
from tests.engines.cache_entries import build

runner = CliRunner()


def test_cache_lists_verifies_and_prunes(tmp_path: Path) -> None:
    settings = {"OPTION_ENGINE_CACHE_DIR": str(tmp_path)}
    build(tmp_path / "openvino-one")
    listed = runner.invoke(cli.app, ["cache", "ls"], env=settings)
    assert listed.exit_code == 0 and "openvino-one" in listed.stdout
    assert runner.invoke(cli.app, ["cache", "verify"], env=settings).exit_code == 0
    (tmp_path / "openvino-one" / "model.bin").write_bytes(b"damaged")
    damaged = runner.invoke(cli.app, ["cache", "verify"], env=settings)
    assert damaged.exit_code == 1 and "model.bin" in damaged.stderr
    pruned = runner.invoke(cli.app, ["cache", "prune"], env=settings)
    assert pruned.exit_code == 0 and "0 engines are left" in pruned.stderr
    assert EngineCache(tmp_path).entries() == []
