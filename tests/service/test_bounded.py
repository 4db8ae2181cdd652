"""What a call in a process apart returns, raises and logs, and what happens where it takes too much."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import BuildError, ConfigError, DjlTrtllmError, ModelError
from djl_trtllm.service.model import open_source, prepare, prepare_apart
from djl_trtllm.service.work import BoundedCalls
from tests.support.models import TINY_STORIES

ERRORS = (
    ConfigError(["a is wrong", "b is wrong"], ["c is odd"]),
    BuildError("it failed", Path("build.log"), ["the last line"], "no memory", "add some"),
    ModelError("no such model"),
)


def warn(text: str) -> int:
    logging.getLogger("djl_trtllm.test").info("not so important")
    logging.getLogger("djl_trtllm.test").warning("%s of process %d", text, os.getpid())
    return os.getpid()


def fail(number: int) -> None:
    raise ERRORS[number]


def divide() -> float:
    return 1 / 0


def work_for_ever() -> None:
    while True:
        pass


def take_memory() -> bytearray:
    return bytearray(1 << 30)


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_call_returns_its_result_and_its_log_from_another_process(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "djl_trtllm")
    with BoundedCalls("the model") as calls:
        first, second = calls(warn, "one"), calls.later(warn, "two")()
    assert first == second != os.getpid()
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"one of process {first}", f"two of process {first}"]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_an_expected_error_arrives_as_it_was_raised(number: int) -> None:
    with BoundedCalls("the model") as calls, pytest.raises(DjlTrtllmError) as raised:
        calls(fail, number)
    assert (type(raised.value), str(raised.value)) == (type(ERRORS[number]), str(ERRORS[number]))
    assert vars(raised.value) == vars(ERRORS[number])


@pytest.mark.parametrize(
    ("work", "said"),
    [(divide, "ZeroDivisionError"), (work_for_ever, "1 seconds"), (take_memory, "300,000,000"), (end, "status -9")],
)
def test_what_a_call_may_not_take_is_an_error_of_the_model(work: Callable[[], Any], said: str) -> None:
    bounded = BoundedCalls("the model", seconds=1, memory=300_000_000)
    with bounded as calls, pytest.raises(ModelError, match=said) as raised:
        calls(work)
    assert len(str(raised.value).splitlines()) == 1


def test_the_process_imports_nothing_from_where_the_server_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("djl_trtllm", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    with BoundedCalls("the model") as calls:
        assert calls(os.getcwd) == str(tmp_path)


def test_a_model_is_prepared_apart_as_it_is_here(tmp_path: Path) -> None:
    environ = {"OPTION_BACKEND": "scripted", "OPTION_MODEL_ID": str(TINY_STORIES)}

    def opened(**keywords: Any) -> Any:
        return open_source(tmp_path, environ, **keywords)

    apart, here = prepare_apart(str(tmp_path), opened), prepare(opened())
    assert (apart.config, apart.start, apart.limits) == (here.config, here.start, here.limits)
    text = "Once upon a time, ünï 🐺"
    ids = here.tokenizer.encode(text)
    assert apart.tokenizer.encode(text) == ids and apart.tokenizer.decode(ids) == here.tokenizer.decode(ids)
    assert [apart.tokenizer.texts[id_] for id_ in ids] == [here.tokenizer.texts[id_] for id_ in ids]
    assert apart.tokenizer.end_ids == here.tokenizer.end_ids and apart.vocab_size == here.vocab_size
    chat = [{"role": "user", "content": "hello"}]
    assert here.tokenizer.chat_source() and apart.tokenizer.render_chat(chat) == here.tokenizer.render_chat(chat)
