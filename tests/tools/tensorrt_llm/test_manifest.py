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
    rows = [
        {"path": path, "annotation": "Optional[Literal[...]]" if choices else "int", "allowed_values": sorted(choices)}
        for path, choices in paths(PATHS).items()
        if path != "stream_interval"
    ]
    file.write_text(json.dumps({"TorchLlmArgs": rows}))
    assert main([str(file)]) == 1
    assert "stream_interval: in the table, not in the manifest" in capsys.readouterr().out


def test_choices_are_those_of_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "paths.txt"
    file.write_text(PATHS.read_text().replace("guided_decoding_backend xgrammar", "guided_decoding_backend outlines"))
    assert main([str(file)]) == 1
    said = capsys.readouterr().out
    assert "guided_decoding_backend: xgrammar in the table alone, outlines in the manifest" in said


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    for content in ("{}", "{"):
        file.write_text(content)
        with pytest.raises(SystemExit):
            main([str(file)])
