"""`djl-trtllm translate`: the target's text on stdout, what is not the same on stderr, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from djl_trtllm import cli


def run(*words: str, code: int) -> tuple[str, str]:
    done = CliRunner().invoke(cli.app, ["translate", *words])
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


def test_a_file_becomes_that_of_another_engine_and_stdout_is_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serving.properties"
    path.write_text("option.max_rolling_batch_size=8\noption.dtype=fp16\n")
    out, err = run(str(path), "--to", "vllm", code=0)
    assert "max-num-seqs: 8  # same: option.max_rolling_batch_size=8" in out
    assert f"{path}:1" in out
    assert err == ""


def test_what_is_lost_is_on_stderr_and_in_a_comment_with_status_3() -> None:
    out, err = run("--to", "sglang", "--", "vllm", "serve", "M", "--disable-log-stats", "--max-model-len", "9", code=3)
    assert "--context-length 9" in out
    for text in (out, err):
        assert "lost: --disable-log-stats" in text


def test_json_has_each_line_with_origin_exactness_and_reason() -> None:
    out, err = run("vllm serve M --gpu-memory-utilization 0.9", "--to", "trtllm-serve", "--json", code=0)
    shown = json.loads(out)
    assert (shown["source"], shown["target"], err) == ("vllm", "trtllm-serve", "")
    assert [line["exactness"] for line in shown["lines"]] == ["same", "near"]
    assert shown["lines"][1]["origin"] == "command line"
    assert shown["text"].endswith("\n")


def test_flags_alone_are_of_the_engine_that_is_named() -> None:
    out, _ = run("--from", "vllm", "--to", "trtllm-serve", "--", "--max-num-seqs", "4", code=0)
    assert "max_batch_size: 4" in out
    out, _ = run("--from", "dynamo", "--to", "trtllm-serve", "--", "--max-num-seqs", "4", "--namespace", "n", code=3)
    assert "max_batch_size: 4" in out, "of the worker that has most of the names"
    _, err = run("--from", "dynamo", "--to", "vllm", "--", "--namespace", "n", code=1)
    assert "dynamo.sglang" in err and "--from" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("vllm serve M", "--to", "vlm"), "trtllm-serve"),
        (("vllm serve M",), "--to"),
        (("no-such.yaml", "--to", "lmi"), "no-such.yaml"),
        ((str(Path(__file__).parent), "--to", "vllm"), "serving.properties"),
        (("--explain", "num-scheduler-steps"), "--async-scheduling"),
        (("--explain", "max_model_length"), "did you mean"),
    ],
)
def test_what_cannot_be_translated_is_one_line(words: tuple[str, ...], says: str) -> None:
    out, err = run(*words, code=1)
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_one_option_is_shown_in_every_engine() -> None:
    out, _ = run("--explain", "max_model_len", code=0)
    for name in ("option.max_model_len", "max_seq_len", "context_length", "trt_llm.runtime.max_seq_len"):
        assert name in out
    shown = json.loads(run("--explain", "dtype", "--json", code=0)[0])
    assert shown["vllm"]["values"]["fp16"] == "float16"
    assert shown["triton"]["exactness"] == "lost"


def test_reasons_and_notes_are_on_stderr_and_not_in_what_another_program_reads(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    head = "python_version: py311\nresources:\n  accelerator: H100:4\n"
    path.write_text(f"{head}trt_llm:\n  runtime:\n    max_batch_size: 8\n")
    done = CliRunner().invoke(cli.app, ["translate", str(path), "--to", "vllm"])
    assert "note: " in done.stderr and "it names 4 GPUs" in done.stderr and "it names 4 GPUs" not in done.stdout
    _, err = run("vllm serve M --gpu-memory-utilization 0.9", "--to", "trtllm-serve", code=0)
    assert err.count("near: ") == 1 and "same: " not in err
