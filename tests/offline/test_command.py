"""`djl-trtllm generate`, in this process and as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

from djl_trtllm import cli
from djl_trtllm.model import Tokenizer
from tests.support.models import scripted_model
from tests.support.waiting import wait_until

runner = CliRunner()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process of a test outlives it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A scripted model; requests for 7 tokens fail at the fourth."""
    faults = [{"action": "error", "at_token": 3, "max_new_tokens": 7}]
    return scripted_model(tmp_path / "model", {"faults": faults})


@pytest.fixture
def missing(tmp_path: Path) -> Path:
    """No model, for what has to fail before there is need of one."""
    return tmp_path / "nowhere"


def generate(model: Path, prompts: Path | str, *arguments: str, stdin: str | bytes | None = None) -> Result:
    return runner.invoke(cli.app, ["generate", str(model), "--prompts", str(prompts), *arguments], input=stdin)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def jsonl(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_text_file_has_a_prompt_on_each_line(model: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes("the wolf\n\nder böse Wolf\r\n[the] last\u2028line".encode())
    result = generate(model, prompts, "--max-new-tokens", "3")
    assert result.exit_code == 0, result.output
    lines = lines_of(result.stdout)
    assert [line["id"] for line in lines] == [1, 3, 4]
    assert [line["prompt"] for line in lines] == ["the wolf", "der böse Wolf", "[the] last\u2028line"]
    for line in lines:
        assert line["generated_text"] == tokenizer.decode(tokenizer.encode(line["prompt"])[:3])
        assert (line["finish_reason"], line["tokens"], line["error"]) == ("length", 3, None)
    assert "3 prompts" in result.stderr


def test_json_lines_have_parameters_and_ids_of_their_own(model: Path, tmp_path: Path) -> None:
    prompts = jsonl(
        tmp_path / "prompts.jsonl",
        {"id": "one", "prompt": "a wolf", "parameters": {"max_new_tokens": 2}},
        {"inputs": "a wolf"},
        {"id": 7.5, "messages": [{"role": "user", "content": "a wolf"}], "parameters": {"max_tokens": 4}},
        {"messages": [{"role": "user", "content": "a wolf"}], "max_tokens": 5, "ignore_eos": True},
    )
    lines = lines_of(generate(model, prompts, "--max-new-tokens", "3", "--parameters", '{"ignore_eos": true}').stdout)
    assert [(line["id"], line["tokens"]) for line in lines] == [("one", 2), (2, 3), (7.5, 4), (4, 5)]
    assert "<|user|>" in lines[2]["prompt"]


def test_lines_come_from_stdin_and_go_to_a_file(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    result = generate(model, "-", "--out", str(out), stdin='{"prompt": "a wolf"}\n{"prompt": "a fox"}\n')
    assert (result.exit_code, result.stdout) == (0, "")
    assert [line["prompt"] for line in lines_of(out.read_text())] == ["a wolf", "a fox"]


def test_text_may_look_like_json(model: Path) -> None:
    result = generate(model, "-", "--text", stdin='{"prompt": "a wolf"}\n')
    assert lines_of(result.stdout)[0]["prompt"] == '{"prompt": "a wolf"}'


def test_several_sequences_are_in_one_line(model: Path) -> None:
    (line,) = lines_of(generate(model, "-", "--n", "3", "--temperature", "0.9", stdin="a wolf").stdout)
    assert len(line["best_of_sequences"]) == 2
    assert line["best_of_sequences"][0].keys() == {"generated_text", "finish_reason", "tokens"}


def test_a_file_without_prompts_is_no_work(missing: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n\n")
    result = generate(missing, prompts)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no prompts" in result.stderr


def test_the_bundled_model_repeats_by_its_seed(tiny_stories: Path) -> None:
    line = {
        "inputs": "Once upon a time,",
        "parameters": {"do_sample": True, "temperature": 1.3, "seed": 5, "stop": "."},
    }
    result = generate(tiny_stories, "-", stdin=f"{json.dumps(line)}\n{json.dumps(line)}")
    one, two = lines_of(result.stdout)
    assert one == two | {"id": 1}
    assert (one["finish_reason"], one["error"]) == ("stop_sequence", None)
    assert "." not in one["generated_text"]


def test_parameters_of_the_command_are_refused_once(missing: Path) -> None:
    result = generate(missing, "-", "--temperature", "-1", stdin="a\nb")
    assert result.exit_code == 1
    assert result.stderr.count("'temperature' is -1.0") == 1
    for wrong in ("{", "[1]"):
        assert "expected a JSON object" in generate(missing, "-", "--parameters", wrong, stdin="a").stderr
    assert "did you mean 'top_p'" in generate(missing, "-", "--parameters", '{"topp": 1}', stdin="a").stderr


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_a_bad_line_is_named_before_any_work(missing: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b'{"prompt": "a"}\n\n{}\n')
    result = generate(missing, prompts, "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "prompts.jsonl:3: expected exactly one of" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_line_of_text_that_is_not_utf_8_is_named(missing: Path) -> None:
    result = generate(missing, "-", stdin=b"fine\n\xff\xfe\n")
    assert result.exit_code == 1
    assert "stdin:2: the line is not UTF-8" in result.stderr


def test_files_that_cannot_be_used_are_named(missing: Path, tmp_path: Path) -> None:
    result = generate(missing, tmp_path / "none.txt")
    assert (result.exit_code, "none.txt cannot be read" in result.stderr) == (1, True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a wolf")
    result = generate(missing, prompts, "--out", str(tmp_path / "none" / "out"))
    assert (result.exit_code, "cannot be written" in result.stderr) == (1, True)
    result = generate(missing, prompts, "--out", str(prompts))
    assert (result.exit_code, "is the file of the prompts" in result.stderr) == (1, True)
    assert prompts.read_text() == "a wolf"


def test_a_model_that_cannot_run_is_status_1(missing: Path, tmp_path: Path) -> None:
    result = generate(missing, "-", stdin="a wolf")
    assert (result.exit_code, "no model at" in result.stderr) == (1, True)
    result = generate(scripted_model(tmp_path / "broken", {"start_error": "no such engine"}), "-", stdin="a wolf")
    assert (result.exit_code, "no such engine" in result.stderr) == (1, True)


def test_failed_prompts_have_lines_and_status_3(model: Path, tmp_path: Path) -> None:
    prompts = jsonl(
        tmp_path / "prompts.jsonl",
        {"prompt": "a wolf"},
        {"prompt": "a wolf", "parameters": {"max_new_tokens": 7, "ignore_eos": True}},
        {"prompt": "a wolf " * 5000},
        {"prompt": "a fox"},
    )
    result = generate(model, prompts)
    assert result.exit_code == 3
    assert "2 prompts failed" in result.stderr
    fine, broken, refused, last = lines_of(result.stdout)
    assert (fine["error"], last["error"]) == (None, None)
    assert (broken["finish_reason"], broken["tokens"], broken["error"]) == ("error", 3, "scripted error")
    assert (refused["finish_reason"], refused["tokens"], refused["generated_text"]) == ("error", 0, "")
    assert "max_input_len" in refused["error"]
    assert fine.keys() == broken.keys() == refused.keys()


# -- as a process ------------------------------------------------------------------------------------------------------


def started(model: Path, prompts: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "djl_trtllm.cli", "generate", str(model), "--prompts", str(prompts), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


@pytest.fixture
def slow(tmp_path: Path) -> tuple[Path, Path]:
    """A model that answers a prompt in about a tenth of a second, and 10,000 prompts."""
    model = scripted_model(tmp_path / "slow", {"steps_per_second": 100}, **{"option.max_rolling_batch_size": 1})
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the wolf\n" * 10_000)
    return model, prompts


def test_an_interrupt_ends_it_with_whole_lines_written(slow: tuple[Path, Path]) -> None:
    process = started(*slow, "--max-new-tokens", "10")
    assert process.stdout is not None
    first = process.stdout.readline()
    hosts = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert all(line["tokens"] == 10 for line in lines_of(first + rest))
    wait_until(lambda: not any(host.is_running() for host in hosts), what="the end of the host")


def test_it_ends_when_nobody_reads_its_output(slow: tuple[Path, Path]) -> None:
    process = started(*slow, "--max-new-tokens", "10")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 141
    errors = process.stderr.read()
    process.stderr.close()
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


def test_answers_are_written_as_they_become_known(slow: tuple[Path, Path]) -> None:
    process = started(*slow, "--max-new-tokens", "10")
    try:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline())["id"] for _ in range(3)] == [1, 2, 3]
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=30)
