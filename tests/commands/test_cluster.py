from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from djl_trtllm.cluster import control, machine
from djl_trtllm.cluster.control import AppStatus, Place
from djl_trtllm.commands.cluster import app
from djl_trtllm.errors import DjlTrtllmError


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"RAY_ADDRESS": ""})


def test_up_passes_what_is_given_and_leaves_the_rest_to_the_arguments_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(machine, "serve_here", lambda *given: called.append(given[:-1]))
    assert run("up", "DIR").exit_code == 0
    assert called.pop() == ({"model": "DIR", "options": {}}, Place("default", "/"), "0.0.0.0", 8000)
    given = ["--autoscale", "1:4", "--gpus", "2", "--cpus", "0.5", "-o", "dtype=fp16", "-o", "load_format=a=b"]
    assert run("up", "DIR", *given, "--app", "m", "--route", "/m", "--host", "::1", "--port", "9").exit_code == 0
    options = {"dtype": "fp16", "load_format": "a=b"}
    arguments = {"model": "DIR", "autoscale": "1:4", "gpus": 2, "cpus": 0.5, "options": options}
    assert called.pop() == (arguments, Place("m", "/m"), "::1", 9)


def test_a_directory_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "DIR").mkdir()
    monkeypatch.chdir(tmp_path)
    called: list[Any] = []
    monkeypatch.setattr(machine, "serve_here", lambda *given: called.append(given[0]["model"]))
    run("up", "DIR")
    run("up", "owner/name")
    assert called == [str(tmp_path / "DIR"), "owner/name"]
    monkeypatch.setattr(machine, "serve_here", lambda *given: given[-1]())
    assert "default runs at http://127.0.0.1:8000/" in run("up", "DIR").stderr


def test_wrong_options_and_errors_of_the_cluster_are_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(address: str) -> None:
        raise DjlTrtllmError("no Ray cluster")

    monkeypatch.setattr(control, "status", failing)
    for words, text in (
        (("up", "DIR", "-o", "dtype"), "--option dtype: expected NAME=VALUE"),
        (("status",), "error: no Ray cluster"),
    ):
        done = run(*words)
        assert (done.exit_code, text in done.stderr) == (1, True)


def test_up_with_an_address_deploys_there(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(control, "deploy", lambda *given: called.append(given))
    done = run("up", "DIR", "--replicas", "3", "--address", "head:6379")
    assert called == [({"model": "DIR", "replicas": 3, "options": {}}, Place(), "head:6379")]
    assert "default runs on the cluster at head:6379" in done.stderr


@pytest.mark.parametrize(
    ("found", "status", "text"),
    [
        ([], 0, "no applications"),
        ([AppStatus("a", "RUNNING", "", {"RUNNING": 2})], 0, "a: RUNNING, replicas: 2 RUNNING"),
        ([AppStatus("a", "DEPLOYING", "why", {})], 1, "a: DEPLOYING, replicas: none: why"),
    ],
)
def test_status_is_an_error_where_something_does_not_run(
    found: list[AppStatus], status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "status", lambda address: found)
    done = run("status")
    assert (done.exit_code, done.stdout.strip()) == (status, text)


def test_down_removes_the_application_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(control, "delete", lambda *given: called.append(given))
    assert "m is being removed" in run("down", "--app", "m", "--address", "head:6379").stderr
    assert called == [("m", "head:6379")]
