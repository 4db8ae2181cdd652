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
from msgspec.structs import replace
from typer.testing import CliRunner

from djl_trtllm import cli
from djl_trtllm.api.base import Prompt
from djl_trtllm.errors import GenerationError, InvalidRequestError
from djl_trtllm.model import Tokenizer
from djl_trtllm.offline.command import Entry, format_line, read_entries
from djl_trtllm.offline.llm import OfflineResult
from djl_trtllm.request import FinishReason, GenerationRequest, OutputChunk, Sampling, SequenceResult, Token
from tests.support.models import scripted_model
from tests.support.processes import wait_until
from tests.support.tables import by_rows

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
    result = generate(model, "-", "--text", stdin='{"prompt": "a wolf"}\n')
    assert lines_of(result.stdout)[0]["prompt"] == '{"prompt": "a wolf"}'


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(model: Path) -> None:
    for prompt in ('{"prompt": "a wolf"}', "a wolf"):
        result = generate(model, "-", stdin=f"{prompt}\n".encode("utf-8-sig"))
        assert [line["prompt"] for line in lines_of(result.stdout)] == ["a wolf"]


def test_a_file_without_prompts_is_no_work(missing: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n\n")
    result = generate(missing, prompts)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no prompts" in result.stderr


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_a_bad_line_is_named_before_any_work(missing: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b'{"prompt": "a"}\n\n{}\n')
    result = generate(missing, prompts, "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "prompts.jsonl:3: expected exactly one of" in result.stderr
    assert not (tmp_path / "out").exists()
    for suffix in (".jsonl", ".ndjson", ".json"):
        prompts.with_suffix(suffix).write_text("[1]")
        assert f"prompts{suffix}:1: the line is [1]" in generate(missing, prompts.with_suffix(suffix)).stderr


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


def test_earlier_results_stay_where_the_model_cannot_be_loaded(missing: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("earlier results " * 100)
    result = generate(missing, "-", "--out", str(out), stdin="a wolf")
    assert (result.exit_code, out.read_text()) == (1, "earlier results " * 100)
    assert generate(model, "-", "--out", str(out), stdin="a wolf").exit_code == 0
    assert [line["prompt"] for line in lines_of(out.read_text())] == ["a wolf"]


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


# -- files of prompts --------------------------------------------------------------------------------------------------


def sampling_of(line: dict[str, Any], **defaults: Any) -> Any:
    (entry,) = read_entries(json.dumps(line).encode(), "prompts", defaults, json_lines=True)
    return entry.request.sampling


def test_a_lines_own_parameters_win_under_every_name() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert sampling_of({"prompt": "a", "parameters": {"temperature": 0.2}}, temperature=0.9).temperature == 0.2
    assert sampling_of({"prompt": "a", "parameters": {"temperature": None}}, temperature=0.9).temperature == 0.9
    assert sampling_of({**chat, "max_completion_tokens": 5}, max_new_tokens=9).max_new_tokens == 5
    assert sampling_of(chat, max_new_tokens=9).max_new_tokens == 9
    (entry,) = read_entries(
        b'{"prompt": "a", "parameters": {"stop_sequences": ["b"]}}', "", {"stop": ["c"]}, json_lines=True
    )
    assert entry.request.stop == ("b",)


def test_many_bad_lines_are_counted() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_entries(b"{}\n" * 25, "prompts.jsonl", {}, json_lines=True)
    told = str(refused.value).splitlines()
    assert len(told) == 11
    assert told[-1] == "and 15 lines more"


@by_rows(
    ("line", "message"),
    [
        (b"{broken", "the line is not JSON"),
        (b"[1]", r"the line is \[1\]"),
        (b"{}", "exactly one of"),
        (b'{"prompt": "a", "inputs": "b"}', "exactly one of"),
        (b'{"prompt": ""}', "any content"),
        (b'{"prompt": 5}', "must be a string"),
        (b'{"prompt": "a", "id": [1]}', "'id' is"),
        (b'{"prompt": "a", "parameters": 3}', "'parameters' is 3"),
        (b'{"prompt": "a", "parameters": {"temprature": 1}}', "did you mean 'temperature'"),
        (b'{"prompt": "a", "source": "x"}', "unknown field"),
        (b'{"prompt": "a", "stream": true}', "'stream' changes the shape"),
        (b'{"prompt": "a", "parameters": {"details": true}}', "'details' changes the shape"),
        (b'{"messages": []}', "'messages' is"),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": 1, "parameters": {"n": 2}}', "'n' stands in"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^prompts.jsonl:3: .*{message}"):
        read_entries(b'{"prompt": "a"}\n\n' + line + b"\n", "prompts.jsonl", {}, json_lines=True)


def test_wrong_parameters_of_all_lines_are_refused_without_a_line() -> None:
    with pytest.raises(InvalidRequestError, match=r"^'top_p' is 2"):
        read_entries(b"a\nb", "prompts", {"top_p": 2}, json_lines=False)
    answers = ("details", "decoder_input_details", "return_full_text", "output_formatter")
    for name in ("stream", "stream_options", "tools", *answers):
        with pytest.raises(InvalidRequestError, match=f"^'{name}' changes the shape"):
            read_entries(b"a\nb", "prompts", {name: True}, json_lines=False)


# -- lines of results --------------------------------------------------------------------------------------------------


DONE = SequenceResult(FinishReason.END_TOKEN, 2, None, None)
BROKEN = replace(DONE, reason=FinishReason.ERROR, error=GenerationError("broken"))


@pytest.mark.parametrize(
    ("seen", "ends", "line"),
    [
        (Prompt("after the template", 3), [DONE], {"prompt": "after the template", "error": None}),
        (None, [DONE] * 3, {"prompt": "as given", "error": None}),
        (None, [BROKEN], {"prompt": "as given", "finish_reason": "error", "error": "broken"}),
    ],
)
def test_a_line_has_the_prompt_as_the_model_saw_it_and_what_came_of_it(
    seen: Prompt | None, ends: list[SequenceResult], line: dict[str, Any]
) -> None:
    request = GenerationRequest(prompt="as given", sampling=Sampling(n=len(ends)))
    result = OfflineResult(0, request, wants_prompt_tokens=False)
    if seen is not None:
        result.begin(seen)
    for index, end in enumerate(ends):
        result.encode(OutputChunk(index, [Token(1, f"{index}\n\u2028\x85b", None, False)], end))
    written = format_line(Entry("x", request), result)
    assert len(written.decode().splitlines()) == 1 and written.endswith(b"}\n")
    texts = [
        {"generated_text": f"{index}\n\u2028\x85b", "finish_reason": "eos_token", "tokens": 2}
        for index in range(len(ends))
    ]
    others = {"best_of_sequences": texts[1:]} if texts[1:] else {}
    assert json.loads(written) == {"id": "x", **texts[0], **others, **line}
