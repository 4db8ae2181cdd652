from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from djl_trtllm import cli
from djl_trtllm.bench import session
from djl_trtllm.bench.client import Target
from djl_trtllm.bench.session import Load, Plan
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.points import FILE_NAME, fingerprint, read_points
from tests.commands.conftest import described
from tests.sizing.configs import llama
from tests.support.stub_http import OpenAiStub
from tests.support.tables import by_table

SMALL = ("--requests", "6", "--warmup", "0", "--prompt-tokens", "10", "--output-tokens", "4")


def bench(*arguments: str, **environ: str) -> Result:
    result = CliRunner().invoke(cli.app, ["bench", *arguments], env=environ)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_table_has_a_row_for_each_number_of_clients() -> None:
    with OpenAiStub().serving() as url:
        result = bench(url, "--concurrency", "1,2", *SMALL)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["clients", "tok/s", "req/s"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert lines[-1] == "How tokens are counted: usage in each event."


def test_json_is_all_of_standard_output() -> None:
    with OpenAiStub().serving() as url:
        result = bench(url, "--rate", "200", "--json", *SMALL)
    (load,) = json.loads(result.stdout)["loads"]
    assert (load["rate"], load["requests"]["succeeded"]) == (200.0, 6)
    assert load["output_tokens_mean"] == 4


def test_the_report_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "report.html"
    with OpenAiStub().serving() as url:
        assert bench(url, "--concurrency", "1", "--html", str(file), *SMALL).exit_code == 0
        refused = bench(url, "--concurrency", "1", "--html", str(tmp_path), *SMALL)
    assert file.read_text().startswith("<!doctype html>")
    assert (refused.exit_code, f"--html {tmp_path}: cannot write it" in refused.stderr) == (1, True)


def test_flags_are_the_plan_and_an_interrupt_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    async def interrupted(plan: Plan, show: object, say: object, result: Any) -> None:
        plans.append(plan)
        result.interrupted = True

    monkeypatch.setattr(session, "run", interrupted)
    flags = "--api lmi --max-concurrency 7 --duration 3 --warmup 4 --drain 5 --prompt-tokens 6 --output-tokens 8"
    result = bench("http://127.0.0.1:1", *flags.split(), "--dataset", "FILE", "--seed", "9", "--timeout", "11")
    assert (result.exit_code, result.stdout) == (130, "")
    load = Load(duration=3.0, warmup=4.0, drain=5.0)
    expected = Plan(Target("127.0.0.1", 1), 6, 8, "lmi", dataset="FILE", seed=9, timeout=11.0, template=load)
    assert plans == [replace(expected, most_clients=7)]


def test_key_headers_model_and_parameters_are_sent() -> None:
    stub = OpenAiStub()
    with stub.serving() as url:
        options = ("--header", "X-One: 1", "--model", "mine", "--parameters", '{"top_k": 3}', "--no-ignore-eos")
        bench(url, "--concurrency", "1", *options, *SMALL, BENCH_API_KEY="secret")
    assert stub.requests[-1].headers["authorization"] == "Bearer secret"
    assert stub.requests[-1].headers["x-one"] == "1"
    assert (stub.bodies[-1]["model"], stub.bodies[-1]["top_k"]) == ("mine", 3)
    assert "ignore_eos" not in stub.bodies[-1]


@pytest.mark.parametrize(("fails_after", "status", "failed"), [(3, 3, 4), (1, 1, 6)])
def test_failed_requests_are_listed_and_decide_the_status(fails_after: int, status: int, failed: int) -> None:
    with OpenAiStub(fails_after=fails_after).serving() as url:
        result = bench(url, "--concurrency", "1", *SMALL)
    assert result.exit_code == status
    assert f"1 client: {failed} failed: HTTP 429: the queue is full" in result.stdout


def test_requests_without_an_end_are_status_3_and_counted() -> None:
    """The first request is not measured."""
    flags = ("--duration", "3", "--drain", "0", "--warmup", "0", "--prompt-tokens", "10", "--output-tokens", "4")
    with OpenAiStub(hangs_after=2).serving() as url:
        result = bench(url, "--concurrency", "1", *flags, "--json")
    (load,) = json.loads(result.stdout)["loads"]
    assert load["requests"] == {"sent": 2, "succeeded": 1, "failed": 0, "unfinished": 1}
    assert result.exit_code == 3


def test_what_the_server_warns_of_is_a_warning_once() -> None:
    stub = OpenAiStub(warning='299 stub "unknown and ignored: top_z"')
    with stub.serving() as url:
        result = bench(url, "--concurrency", "1,2", "--parameters", '{"top_z": 3}', "--json", *SMALL)
    assert json.loads(result.stdout)["warnings"].count("the server warns: unknown and ignored: top_z") == 1
    assert result.stderr.count("ignored: top_z") == 1


@by_table("arguments", "error")
def test_a_wrong_flag_is_an_error_that_names_it(arguments: tuple[str, ...], error: str) -> None:
    result = bench("http://127.0.0.1:1", "--model", "m", *arguments)
    assert result.exit_code == 1
    assert error in " ".join(result.stderr.split())


# -- measured points --


def _recorded(model: Path, *words: str, fails_after: int | None = None) -> Result:
    stub = OpenAiStub() if fails_after is None else OpenAiStub(fails_after=fails_after)
    with stub.serving() as url:
        return bench(url, "--concurrency", "1,2", *SMALL, "--record", str(model), *words, BENCH_API_KEY="secret")


def test_a_bench_records_a_point_for_each_number_of_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTION_ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    model = described(tmp_path / "model")
    (model / "serving.properties").write_text("option.backend=vllm\noption.kv_cache_dtype=fp8\n")
    result = _recorded(model, "--engine", "vllm==0.26.0", "--gpu", "h100:2")
    assert result.exit_code == 0, result.output
    points = read_points(tmp_path / "cache")
    assert [(point.clients, point.osl) for point in points] == [(2, 4), (1, 4)]
    assert all(point.isl != 10 for point in points), "the server's count of the prompt's tokens, not the one asked for"
    same = {(point.engine, point.version, point.gpu, point.gpus, point.precision) for point in points}
    assert same == {("vllm", "0.26.0", "H100", 2, "bfloat16, kv fp8")}
    assert {point.model for point in points} == {fingerprint(CheckpointSizes.from_config(llama()))}
    assert all(point.tokens_per_second > 0 and point.ttft_p50 for point in points)
    assert "secret" not in (tmp_path / "cache" / FILE_NAME).read_text()
    assert str(tmp_path / "cache" / FILE_NAME) in result.stderr
    assert result.stdout.startswith("clients")


def test_the_engine_is_the_one_that_the_models_options_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTION_ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    model = described(tmp_path / "model")
    (model / "serving.properties").write_text("option.backend=pytorch\noption.tensor_parallel_degree=4\n")
    assert _recorded(model, "--gpu", "h200").exit_code == 0
    assert {(point.engine, point.gpus) for point in read_points(tmp_path / "cache")} == {("tensorrt_llm", 4)}


def test_loads_with_failures_are_no_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTION_ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    model = described(tmp_path / "model")
    result = _recorded(model, "--engine", "vllm", "--gpu", "h100", fails_after=3)
    assert "nothing to record" in result.stderr
    assert read_points(tmp_path / "cache") == []


def test_a_file_of_points_that_cannot_be_read_is_an_error_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTION_ENGINE_CACHE_DIR", str(tmp_path))
    (tmp_path / FILE_NAME).write_text("no point\n")
    model = described(tmp_path / "model")
    result = bench("http://127.0.0.1:1", "--record", str(model), "--engine", "vllm", "--gpu", "h100")
    assert result.exit_code == 1 and f"{FILE_NAME}:1" in "".join(result.stderr.split())


@by_table("flags", "message")
def test_what_cannot_be_recorded_is_refused_before_the_load(tmp_path: Path, flags: list[str], message: str) -> None:
    model = str(described(tmp_path / "model"))
    result = bench("http://127.0.0.1:1", *(word.replace("MODEL", model) for word in flags))
    assert result.exit_code == 1
    assert message in result.stderr.replace("\n  ", " ")
