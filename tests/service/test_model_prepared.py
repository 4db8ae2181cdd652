"""A prepared model: what its engine process and its requests need. The tokenizer is loaded when it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.api import RawRequest
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.batching.limits import BatchLimits
from djl_trtllm.config import Config
from djl_trtllm.engines.manifest import EngineDir
from djl_trtllm.errors import TokenizerError
from djl_trtllm.executor.protocol import Start
from djl_trtllm.model import Layout, Tokenizer, load_tokenizer, vocabulary
from djl_trtllm.service import model, open_source, prepare
from tests.engines.helpers import write_checkpoint, write_engine_files
from tests.support import executors
from tests.support.models import scripted_model

OPENVINO = {"OPTION_BACKEND": "openvino"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def test_a_prepared_model_has_everything_that_its_engine_process_and_requests_need(tmp_path: Path) -> None:
    engine = {"max_input_len": 50, "max_output_len": 60, "max_seq_len": 100, "max_rolling_batch_size": 3}
    options: dict[str, Any] = {f"option.{name}": value for name, value in engine.items()}
    options |= {"option.stream_interval": 4, "option.output_formatter": "sse", "job_queue_size": 7}
    path = scripted_model(tmp_path / "model", {"end_after": 3}, **options)
    prepared = prepare(open_source(path, {}))
    assert (prepared.name, prepared.directory, prepared.gpus, prepared.custom) == ("scripted", path, 0, None)
    assert prepared.start == Start(executors.SCRIPTED, {"end_after": 3}, stream_interval=4)
    assert prepared.limits == BatchLimits(3, 7, 50, 60, 100, max_resumes=3)
    assert prepared.options is prepared.config.options
    assert (prepared.options.job_queue_size, prepared.options.output_formatter) == (7, "sse")
    assert prepared.tokenizer.decode(prepared.tokenizer.encode("the wolf")) == "the wolf"


@pytest.fixture
def compiled(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the checkpoint is compiled to, without a compiler."""
    engine = write_engine_files(tmp_path / "engine")

    def prepare_engine(config: Config, layout: Layout, progress: Callable[[str], None], **given: Any) -> Any:
        given["before_compiling"]()
        progress(f"compiling {layout.path} for {given['plan'].backend}")
        return EngineDir(engine, "openvino", None, checkpoint)

    monkeypatch.setattr(model, "prepare_engine", prepare_engine)
    return engine


def test_what_runs_is_the_compiled_engine(compiled: Path, checkpoint: Path) -> None:
    prepared = prepare(open_source(checkpoint, OPENVINO))
    assert prepared.start.executor == executors.OPENVINO
    assert prepared.start.options["engine_dir"] == str(compiled)
    assert prepared.start.send_interval > 0
    assert prepared.tokenizer.vocab_size <= 300


def test_a_tokenizer_is_loaded_when_it_is_asked_for_and_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []

    def noting(path: Path, **options: Any) -> Tokenizer:
        loaded.append(path)
        return load_tokenizer(path, **options)

    monkeypatch.setattr(vocabulary, "load_tokenizer", noting)
    engine = EngineDir(write_engine_files(checkpoint.parent / "engine"), "openvino", None, checkpoint)
    monkeypatch.setattr(model, "prepare_engine", lambda *arguments, **options: engine)
    prepared = prepare(open_source(checkpoint, OPENVINO))
    assert loaded == []
    assert prepared.texts().tokenizer is replace(prepared, name="other").tokenizer
    assert loaded == [checkpoint]


def test_nothing_is_compiled_for_a_model_whose_tokenizer_cannot_be_loaded(
    compiled: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, model.__name__)
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        prepare(open_source(checkpoint, OPENVINO))
    assert "compiling" not in caplog.text


def test_the_log_has_plan_options_warnings_and_notes(
    compiled: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, model.__name__)
    asked = {"OPTION_ROTARY_DIM": "64", "OPTION_MAX_INPUTT_LEN": "5", "OPTION_MAX_NUM_TOKENS": "2"}
    prepare(open_source(checkpoint, {**OPENVINO, **asked, "OPTION_HOST_CACHE_SIZE": "7"}))
    told = [(record.levelno, record.getMessage()) for record in caplog.records]

    def position(level: int, text: str) -> int:
        (found,) = [at for at, (each, message) in enumerate(told) if each == level and text in message]
        return found

    assert position(logging.INFO, "backend openvino: ") == 0
    assert position(logging.INFO, "option.host_cache_size = 7") > 0
    assert position(logging.INFO, "is documented for GPT-J only") > 0
    assert position(logging.WARNING, "OPTION_MAX_INPUTT_LEN") > 0
    assert position(logging.WARNING, "2 sequences run at once and not 256") > 0
    assert position(logging.INFO, f"compiling {checkpoint} for openvino") > 0


def test_requirements_are_installed_where_the_operator_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, bool]] = []
    monkeypatch.setattr(model, "handle_requirements", lambda path, allowed: asked.append((path, allowed)))
    path = scripted_model(tmp_path / "model")
    for environ in ({}, {"SERVING_INSTALL_REQUIREMENTS": "true"}):
        prepare(open_source(path, environ))
    assert asked == [(path, False), (path, True)]


def test_code_of_a_tokenizer_runs_where_the_operator_trusts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted: list[bool] = []

    def noting(path: Path, *, trust_remote_code: bool = False) -> Tokenizer:
        trusted.append(trust_remote_code)
        return load_tokenizer(path)

    monkeypatch.setattr(vocabulary, "load_tokenizer", noting)
    path = scripted_model(tmp_path / "model")
    for environ in ({}, {"OPTION_TRUST_REMOTE_CODE": "true"}):
        prepare(open_source(path, environ)).texts()
    assert trusted == [False, True]


def test_a_models_own_formatters_read_its_requests(tmp_path: Path) -> None:
    path = scripted_model(tmp_path / "model")
    plain = prepare(open_source(path, {}))
    assert plain.custom is None
    (path / "model.py").write_text(
        "from djl_python.input_parser import input_formatter\n"
        "@input_formatter\n"
        "def read(payload: dict, tokenizer=None, configs=None, **kwargs) -> dict:\n"
        "    text = tokenizer.decode(tokenizer.encode(payload['text']))\n"
        "    return {'inputs': f'{text} {configs.max_input_len}'}\n"
    )
    own = prepare(open_source(path, {}))
    assert DEFAULT.parse(RawRequest(b'{"text": "a wolf"}', {}), own).requests[0].prompt == "a wolf 4096"
    assert DEFAULT.parse(RawRequest(b"a wolf", {"content-type": "text/plain"}), plain).requests[0].prompt == "a wolf"
