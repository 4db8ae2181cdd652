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


def test_cache_shows_and_prunes_what_interrupted_processes_left(tmp_path: Path) -> None:
    settings = {"OPTION_ENGINE_CACHE_DIR": str(tmp_path)}
    build(tmp_path / "openvino-one")
    partial = tmp_path / ".openvino-two.1.abcd.partial"
    partial.mkdir()
    (partial / "model.bin").write_bytes(bytes(2000))
    listed = runner.invoke(cli.app, ["cache", "ls"], env=settings)
    assert "left by interrupted processes; `prune` removes it:" in listed.stdout
    assert f"{partial} (2.0 kB)" in listed.stdout
    pruned = runner.invoke(cli.app, ["cache", "prune", "--keep", "1"], env=settings)
    assert f"removed {partial} (2.0 kB), left by an interrupted process" in pruned.stderr
    assert "1 engines are left" in pruned.stderr
    assert "left by" not in runner.invoke(cli.app, ["cache", "ls"], env=settings).stdout


def test_cache_shows_and_prunes_overlays_of_processes_that_were_killed(tmp_path: Path) -> None:
    settings = {"OPTION_ENGINE_CACHE_DIR": str(tmp_path)}
    overlay = tmp_path / "overlays" / "1-abcd"
    (overlay / "llama").mkdir(parents=True)
    (overlay / "llama" / "config.json").write_bytes(bytes(2000))
    mark = overlay.with_name("1-abcd.use")
    mark.touch()
    listed = runner.invoke(cli.app, ["cache", "ls"], env=settings)
    assert f"{overlay} (2.0 kB)" in listed.stdout
    pruned = runner.invoke(cli.app, ["cache", "prune"], env=settings)
    assert f"removed {overlay} (2.0 kB), left by an interrupted process" in pruned.stderr
    assert not overlay.exists() and not mark.exists()


def test_the_name_of_an_engine_is_shown_whole_in_one_line_of_a_pipe(tmp_path: Path) -> None:
    key = f"openvino-{'0123456789abcdef' * 2}"
    build(tmp_path / key)
    listed = runner.invoke(cli.app, ["cache", "ls"], env={"OPTION_ENGINE_CACHE_DIR": str(tmp_path), "COLUMNS": "80"})
    assert any(line.startswith(f"{key}: ") for line in listed.stdout.splitlines())
