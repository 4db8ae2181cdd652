"""The table of names against NVIDIA's manifest of the LLM's arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.tensorrt_llm.manifest import PATHS, main, paths


def test_the_table_ends_with_the_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out
    # The arguments that 1.4 lacks, 1.3 has.
    assert main(["--version", "1.3.0"]) == 1
    said = capsys.readouterr().out
    for ended in ("sampler_type", "disable_flashinfer_sampling", "kv_cache_config.onboard_blocks"):
        assert f"\n{ended}: " in f"\n{said}"


def test_nvidias_own_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "manifest.json"
    known = sorted(paths(PATHS) - {"stream_interval"})
    file.write_text(json.dumps({"TorchLlmArgs": [{"path": path, "kind": "value"} for path in known]}))
    assert main([str(file)]) == 1
    assert "stream_interval: in the table, not in the manifest" in capsys.readouterr().out
    for content in ("{}", "{"):
        file.write_text(content)
        with pytest.raises(SystemExit):
            main([str(file)])
