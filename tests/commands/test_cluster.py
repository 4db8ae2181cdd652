from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from djl_trtllm.cluster import machine
from djl_trtllm.cluster.driver import Task
from djl_trtllm.commands.cluster import app
from djl_trtllm.errors import DjlTrtllmError


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"RAY_ADDRESS": ""})


def test_up_passes_what_is_given_and_leaves_the_rest_to_the_arguments_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(machine, "serve_here", lambda task, ready: called.append(task))
    assert run("up", "DIR", "--replicas", "3").exit_code == 0
    assert called.pop() == Task({"model": "DIR", "replicas": 3, "options": {}}, "default", "/", "0.0.0.0", 8000)
    given = ["--autoscale", "1:4", "--gpus", "2", "--cpus", "0.5", "-o", "dtype=fp16", "-o", "load_format=a=b"]
    assert run("up", "DIR", *given, "--app", "m", "--route", "/m", "--host", "::1", "--port", "9").exit_code == 0
    options = {"dtype": "fp16", "load_format": "a=b"}
    arguments = {"model": "DIR", "autoscale": "1:4", "gpus": 2, "cpus": 0.5, "options": options}
    assert called.pop() == Task(arguments, "m", "/m", "::1", 9)


def test_a_directory_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "DIR").mkdir()
    monkeypatch.chdir(tmp_path)
    called: list[Any] = []
    monkeypatch.setattr(machine, "serve_here", lambda task, ready: called.append(task.arguments["model"]))
    run("up", "DIR")
    run("up", "owner/name")
    assert called == [str(tmp_path / "DIR"), "owner/name"]
    monkeypatch.setattr(machine, "serve_here", lambda task, ready: ready())
    assert "default runs at http://127.0.0.1:8000/" in run("up", "DIR").stderr


def test_wrong_options_and_errors_of_the_cluster_are_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(task: Task, ready: object) -> None:
        raise DjlTrtllmError("Ray does not start")

    monkeypatch.setattr(machine, "serve_here", failing)
    for words, text in (
        (("up", "DIR", "-o", "dtype"), "--option dtype: expected NAME=VALUE"),
        (("up", "DIR"), "error: Ray does not start"),
    ):
        done = run(*words)
        assert (done.exit_code, text in done.stderr) == (1, True)
