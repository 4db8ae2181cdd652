"""Models from what the user named to what can be run: names, configuration, files."""

from __future__ import annotations

import json
import logging
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.api.base import RawRequest
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.batching.admission import BatchLimits
from djl_trtllm.config import Config
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import ConfigError, ModelError, TokenizerError
from djl_trtllm.executor.protocol import Start
from djl_trtllm.model import Layout, Tokenizer, inspect, load_tokenizer, tokenizer
from djl_trtllm.service import model
from djl_trtllm.service.model import open_remote, open_source, plan, prepare, remote_name
from tests.engines.helpers import gpu_machine, write_checkpoint, write_engine_files, write_tensorrt_engine
from tests.support import models
from tests.support.models import scripted_model
from tests.support.tables import by_rows, by_table

OPENVINO = {"OPTION_BACKEND": "openvino"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def directory(path: Path, *lines: str) -> Path:
    """A directory with a serving.properties."""
    path.mkdir(parents=True)
    (path / "serving.properties").write_text("".join(f"{line}\n" for line in lines))
    return path


class Fetching:
    """In the place of `fetch`: everything remote is one local path, and the calls are noted."""

    def __init__(self, found: Path) -> None:
        self.found = found
        self.calls: list[dict[str, Any]] = []

    def __call__(self, text: str, downloads: Path, tell: object, **options: Any) -> Path:
        self.calls.append({"text": text, "downloads": downloads, **options})
        return self.found


@pytest.fixture
def fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetching:
    fetching = Fetching(directory(tmp_path / "fetched", "option.max_input_len=77"))
    monkeypatch.setattr(model, "fetch", fetching)
    return fetching


# -- names and configurations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "name"),
    [("story", "story"), ("my story (2)", "my-story-2"), ("_x.y_", "_x-y_"), ("X", "X"), ("---", "model")],
)
def test_a_model_has_the_name_of_its_directory(tmp_path: Path, folder: str, name: str) -> None:
    path = directory(tmp_path / folder, "option.max_input_len=77")
    source = open_source(path, {})
    assert (source.name, source.directory) == (name, path)
    assert source.config.options.max_input_len == 77


def test_a_configuration_file_stands_for_its_directory(tmp_path: Path) -> None:
    path = directory(tmp_path / "story", "option.max_input_len=77")
    (path / "config.pbtxt").write_text(
        'max_batch_size: 5\nparameters: {key: "max_beam_width" value: {string_value: "1"}}'
    )
    source = open_source(path / "config.pbtxt", {})
    assert (source.name, source.directory) == ("story", path)
    assert source.config.options.max_input_len != 77


def test_an_archive_is_opened_where_the_environment_says_and_configured_by_what_is_in_it(tmp_path: Path) -> None:
    path = directory(tmp_path / "story", "option.max_input_len=77")
    with tarfile.open(tmp_path / "story.tar.gz", "w:gz") as archive:
        archive.add(path, "story")
    cache = tmp_path / "cache"
    source = open_source(tmp_path / "story.tar.gz", {"OPTION_ENGINE_CACHE_DIR": str(cache)})
    assert source.directory.is_relative_to(cache / "models")
    assert source.config.options.max_input_len == 77


@pytest.mark.parametrize(
    ("file", "inside"), [("my-model.tar.gz", "."), ("my-model.tgz", "."), ("my-model.tar", "story")]
)
def test_an_archive_is_the_model_of_its_file_name(tmp_path: Path, file: str, inside: str) -> None:
    (tmp_path / "ml").mkdir()
    with tarfile.open(tmp_path / "ml" / file, "w:gz") as archive:
        archive.add(directory(tmp_path / "story", "option.max_input_len=77"), inside)
    environ = {"OPTION_ENGINE_CACHE_DIR": str(tmp_path / "cache")}
    assert open_source(tmp_path / "ml" / file, environ).name == "my-model"
    assert open_source(tmp_path / "ml", environ).name == "ml"
    assert open_source(tmp_path / "ml" / file, environ | {"OPTION_MODEL_NAME": "fable"}).name == "fable"


def test_a_directory_with_nothing_but_a_model_is_the_model(tmp_path: Path) -> None:
    path = directory(tmp_path / "outer" / "story", "option.max_input_len=77")
    source = open_source(tmp_path / "outer", {})
    assert (source.directory, source.name, source.config.options.max_input_len) == (path, "story", 77)


def test_everything_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    path = directory(tmp_path / "story", "option.max_input_len=many")
    with pytest.raises(ConfigError, match="2 configuration problems"):
        open_source(path, {"OPTION_MAX_OUTPUT_LEN": "many"})


@by_table("text", "name")
def test_a_remote_model_has_the_name_that_djl_gives_it(text: str, name: str) -> None:
    assert remote_name(text) == name


def test_a_remote_model_is_configured_by_what_comes_with_it(fetching: Fetching, tmp_path: Path) -> None:
    environ = {"HF_REVISION": "v2", "OPTION_ENGINE_CACHE_DIR": str(tmp_path / "cache")}
    source = open_remote("acme/story", environ | dict.fromkeys(("HF_MODEL_ID", "OPTION_MODEL_ID"), "acme/story"))
    assert (source.name, source.directory) == ("acme_story", fetching.found)
    assert (source.config.options.max_input_len, source.config.options.model_id) == (77, None)
    assert fetching.calls[0] == {
        "text": "acme/story",
        "downloads": tmp_path / "cache" / "downloads",
        "revision": source.config.options.revision,
        **dict.fromkeys(("hub_cache", "hub_token")),
        "tokenizer_only": False,
        "config_only": False,
        "patience": source.config.options.model_loading_timeout,
    }


def test_a_fetched_model_does_not_allow_its_own_code_to_run(fetching: Fetching) -> None:
    (fetching.found / "serving.properties").write_text("option.trust_remote_code=true\n")
    source = open_remote("acme/story", {})
    assert (source.config.options.trust_remote_code, source.trusted) == (False, False)
    (warning,) = source.config.warnings
    assert all(part in warning for part in ("remote_code=true (", "acme/story was fetched", "OPTION_TRUST_REMOTE_CODE"))


def test_what_is_in_the_one_folder_of_a_fetched_model_sets_no_more(fetching: Fetching, tmp_path: Path) -> None:
    directory(tmp_path / "outer" / "story", "option.max_input_len=9", f"option.lora_dir={tmp_path}")
    fetching.found = tmp_path / "outer"
    source = open_remote("acme/story", {})
    assert source.directory == tmp_path / "outer" / "story"
    assert (source.config.options.max_input_len, source.config.options.lora_dir) == (9, None)


def test_the_operator_allows_the_code_of_a_fetched_model(fetching: Fetching) -> None:
    source = open_remote("acme/story", {"OPTION_TRUST_REMOTE_CODE": "true"})
    assert (source.config.options.trust_remote_code, source.trusted, source.config.warnings) == (True, True, ())


def test_the_model_py_of_a_fetched_model_runs_only_where_it_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = scripted_model(tmp_path / "model")
    code = "def shout(response):\n    return response\n\n\nshout.is_output_formatter = True\n"
    (path / "model.py").write_text(code)
    source = open_source(path, {})
    assert prepare(source).custom is not None and "is not run" not in caplog.text
    assert prepare(replace(source, trusted=False)).custom is None
    assert f"{path / 'model.py'} is not run: it came with a fetched model" in caplog.text


# -- files -------------------------------------------------------------------------------------------------------------


def test_hf_model_id_is_the_model_that_is_served(checkpoint: Path, tmp_path: Path) -> None:
    other = directory(tmp_path / "other", "option.model_id=nowhere", "option.max_input_len=9")
    _, layout, _ = plan(open_source(other, {"HF_MODEL_ID": str(checkpoint), **OPENVINO}))
    assert layout.path == checkpoint


def test_model_id_may_be_a_folder_of_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory(tmp_path / "story", "option.model_id=weights")
    write_checkpoint(path / "weights")
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    _, layout, _ = plan(open_source(path, OPENVINO))
    assert layout.path == path / "weights"
    assert layout.tokenizer_dir == path / "weights"


def test_a_remote_model_id_is_fetched(fetching: Fetching, checkpoint: Path, tmp_path: Path) -> None:
    fetching.found = checkpoint
    lines = ["option.model_id=acme/story", "option.revision=v2", f"download_dir={tmp_path / 'downloads'}"]
    _, layout, _ = plan(open_source(directory(tmp_path / "story", *lines), OPENVINO))
    assert layout.path == checkpoint
    (call,) = fetching.calls
    assert (call["text"], call["revision"], call["tokenizer_only"]) == ("acme/story", "v2", False)
    assert call["hub_cache"] == tmp_path / "downloads" / "hub"


def test_a_fetched_archive_is_opened(fetching: Fetching, checkpoint: Path, tmp_path: Path) -> None:
    fetching.found = tmp_path / "story.tar.gz"
    with tarfile.open(fetching.found, "w:gz") as archive:
        archive.add(checkpoint, "story")
    lines = ["option.model_id=s3://models/story.tar.gz", f"option.engine_cache_dir={tmp_path / 'cache'}"]
    _, layout, _ = plan(open_source(directory(tmp_path / "story", *lines), OPENVINO))
    assert layout.path.is_relative_to(tmp_path / "cache" / "models")


def test_a_tokenizer_of_its_own_is_fetched_without_weights(fetching: Fetching, checkpoint: Path) -> None:
    environ = {**OPENVINO, "OPTION_TOKENIZER": "acme/words", "OPTION_TOKENIZER_REVISION": "v3"}
    _, layout, _ = plan(open_source(checkpoint, environ))
    assert (layout.path, layout.tokenizer_dir) == (checkpoint, fetching.found)
    (call,) = fetching.calls
    assert (call["text"], call["revision"], call["tokenizer_only"]) == ("acme/words", "v3", True)


def test_the_draft_model_that_the_options_name_is_planned_beside_the_model(checkpoint: Path, tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path / "draft", seed=1)
    environ = {**OPENVINO, "OPTION_SPECULATIVE_DRAFT_MODEL": str(draft)}
    _, layout, engine_plan = plan(open_source(checkpoint, environ))
    assert layout.draft is not None and layout.draft.path == draft and engine_plan.draft is not None
    _, layout, engine_plan = plan(open_source(checkpoint, OPENVINO))
    assert (layout.draft, engine_plan.draft) == (None, None)
    (draft / "model.safetensors").unlink()
    _, layout, _ = plan(replace(open_source(checkpoint, environ), config_only=True))
    assert layout.draft is not None and layout.draft.path == draft


def test_a_tokenizer_may_be_a_folder_of_the_models_own(checkpoint: Path) -> None:
    (checkpoint / "words").mkdir()
    _, layout, _ = plan(open_source(checkpoint, {**OPENVINO, "OPTION_TOKENIZER": "words"}))
    assert layout.tokenizer_dir == checkpoint / "words"


@pytest.mark.parametrize("option", ["model_id", "tokenizer"])
def test_what_is_neither_a_folder_nor_remote_is_named(checkpoint: Path, option: str) -> None:
    environ = {**OPENVINO, f"OPTION_{option.upper()}": "/no/such/folder"}
    told = rf"option\.{option}=/no/such/folder \(environment variable OPTION_{option.upper()}\) is not a directory"
    with pytest.raises(ModelError, match=told):
        plan(open_source(checkpoint, environ))


def test_what_djl_serving_reads_is_no_deviation_under_it(checkpoint: Path) -> None:
    environ = {**OPENVINO, "OPTION_MPI_MODE": "true"}
    under, alone = (plan(open_source(checkpoint, environ), under_djl=each)[0] for each in (True, False))
    assert [any("option.mpi_mode" in note for note in config.notes) for config in (under, alone)] == [False, True]


# -- rules that need the files -----------------------------------------------------------------------------------------


def test_the_kind_of_model_is_that_of_config_json(checkpoint: Path) -> None:
    environ = {**OPENVINO, "OPTION_ROTARY_DIM": "64", "OPTION_USE_FUSED_MLP": "true"}
    config, _, _ = plan(open_source(checkpoint, environ))
    (told, note) = config.notes
    assert told.startswith("option.use_fused_mlp = true") and "GPT-J only, and this model is llama" in note


def test_a_compiled_engine_cannot_be_quantised(checkpoint: Path) -> None:
    write_engine_files(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    source = open_source(checkpoint, {**OPENVINO, "OPTION_QUANTIZE": "int8"})
    with pytest.raises(ConfigError, match="the model is a compiled engine"):
        plan(source)
    plan(open_source(checkpoint, {**OPENVINO, "OPTION_QUANTIZE": "none"}))


@pytest.mark.parametrize(("method", "fits"), [("awq", True), ("fp8", False)])
def test_a_compiled_engine_that_is_quantised_so_already_is_no_contradiction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, fits: bool
) -> None:
    monkeypatch.setattr("djl_trtllm.backends.planning.this_machine", gpu_machine)
    path = write_tensorrt_engine(tmp_path / "engine")
    config = json.loads((path / "config.json").read_text())
    config["pretrained_config"]["quantization"] = {"quant_algo": "W4A16_AWQ"}
    (path / "config.json").write_text(json.dumps(config))
    source = open_source(path, {"OPTION_QUANTIZE": method})
    if fits:
        plan(source)
        return
    with pytest.raises(ConfigError, match=rf"option\.quantize={method} .*the model is a compiled engine"):
        plan(source)


def manifest(path: Path, **options: object) -> None:
    """A manifest of an engine that has no files."""
    head = {"format": 1, "backend": "openvino", "checkpoint": "", "versions": {}, "platform": "", "created": ""}
    path.mkdir(exist_ok=True)
    (path / "manifest.json").write_text(json.dumps({**head, "options": options, "files": {}}))


def test_the_quantisation_of_an_engine_is_that_of_its_manifest(checkpoint: Path) -> None:
    write_engine_files(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    manifest(checkpoint, quantize="int8")
    plan(open_source(checkpoint, {**OPENVINO, "OPTION_QUANTIZE": "int8"}))
    with pytest.raises(ConfigError, match="the model is a compiled engine"):
        plan(open_source(checkpoint, {**OPENVINO, "OPTION_QUANTIZE": "int4"}))


def test_an_engine_that_comes_with_a_checkpoint_is_not_asked_yet(checkpoint: Path) -> None:
    write_engine_files(checkpoint / "engine")
    (checkpoint / "engine" / "manifest.json").write_text("{damaged")
    plan(open_source(checkpoint, {**OPENVINO, "OPTION_QUANTIZE": "int8"}))


# -- A prepared model: what its engine process and its requests need. The tokenizer is loaded when it is asked for.


def test_a_prepared_model_has_everything_that_its_engine_process_and_requests_need(tmp_path: Path) -> None:
    engine = {"max_input_len": 50, "max_output_len": 60, "max_seq_len": 100, "max_rolling_batch_size": 3}
    options: dict[str, Any] = {f"option.{name}": value for name, value in engine.items()}
    options |= {"option.stream_interval": 4, "option.output_formatter": "sse", "job_queue_size": 7}
    path = scripted_model(tmp_path / "model", {"end_after": 3}, **options)
    prepared = prepare(open_source(path, {}))
    assert (prepared.name, prepared.directory, prepared.gpus, prepared.custom) == ("scripted", path, 0, None)
    assert prepared.start == Start(models.SCRIPTED, {"end_after": 3}, stream_interval=4)
    assert prepared.limits == BatchLimits(3, 7, 50, 60, 100)
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
        return engine

    monkeypatch.setattr(model, "prepare_engine", prepare_engine)
    return engine


def test_what_runs_is_the_compiled_engine(compiled: Path, checkpoint: Path) -> None:
    prepared = prepare(open_source(checkpoint, OPENVINO))
    assert prepared.start.executor == models.OPENVINO
    assert prepared.start.options["engine_dir"] == str(compiled)
    assert prepared.start.send_interval > 0
    assert prepared.tokenizer.vocab_size <= 300


def test_a_tokenizer_is_loaded_when_it_is_asked_for_and_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []

    def noting(path: Path, **options: Any) -> Tokenizer:
        loaded.append(path)
        return load_tokenizer(path, **options)

    monkeypatch.setattr(tokenizer, "load_tokenizer", noting)
    engine = write_engine_files(checkpoint.parent / "engine")
    monkeypatch.setattr(model, "prepare_engine", lambda *arguments, **options: engine)
    (checkpoint / "words").mkdir()
    (checkpoint / "tokenizer.json").rename(checkpoint / "words" / "tokenizer.json")
    prepared = prepare(open_source(checkpoint, {**OPENVINO, "OPTION_TOKENIZER": "words"}))
    assert loaded == []
    assert prepared.texts().tokenizer is replace(prepared, name="other").tokenizer
    assert loaded == [checkpoint / "words"]


def test_a_tokenizer_that_only_the_engine_names_is_loaded_and_checked(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = write_engine_files(checkpoint.parent / "engine")
    shutil.copy(checkpoint / "tokenizer.json", engine)
    inside = replace(inspect(checkpoint), tokenizer_dir=None, bundled_engine=engine)
    monkeypatch.setattr(model, "inspect", lambda files: inside)
    monkeypatch.setattr(model, "prepare_engine", lambda *arguments, **options: engine)
    assert prepare(open_source(checkpoint, OPENVINO)).tokenizer.encode("a wolf")
    described = json.loads((engine / "tokenizer.json").read_text())
    described["model"]["vocab"] |= {f"word {number}": 10_000 + number for number in range(3)}
    (engine / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(TokenizerError, match="the tokenizer of another model"):
        prepare(open_source(checkpoint, OPENVINO)).texts()


@pytest.mark.parametrize("bundled", [False, True])
def test_conversations_are_rendered_by_the_template_that_is_named(
    compiled: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, bundled: bool
) -> None:
    """LMI passes the option on to vLLM's chat service, which takes a file or a text and replaces all templates."""
    if bundled:  # then the tokenizer is read from the engine
        shutil.copy(checkpoint / "tokenizer.json", compiled)
        inside = replace(inspect(checkpoint), tokenizer_dir=None, bundled_engine=compiled)
        monkeypatch.setattr(model, "inspect", lambda files: inside)
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tool_use.jinja").write_text("of tools")
    for name in ("other.jinja", "{other}.jinja"):
        (checkpoint / name).write_text("<{{ messages[0]['content'] }}>\n")
    messages = [{"role": "user", "content": "a wolf"}]
    rows = [
        ("other.jinja", "<a wolf>"),
        (str(checkpoint / "other.jinja"), "<a wolf>"),
        ("first, then {{ messages[0]['content'] }}", "first, then a wolf"),
        ("{other}.jinja", "<a wolf>"),
        (f"{'é' * 300} {{{{ messages[0]['content'] }}}}", f"{'é' * 300} a wolf"),
    ]
    for value, prompt in rows:
        texts = prepare(open_source(checkpoint, {**OPENVINO, "OPTION_CHAT_TEMPLATE": value})).texts()
        assert texts.tokenizer.render_chat(messages) == texts.tokenizer.render_chat(messages, tools=[{}]) == prompt


def test_a_chat_template_that_is_no_file_is_refused_before_a_compilation(
    compiled: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, model.__name__)
    told = rf"option\.chat_template=other\.jinja \(.*OPTION_CHAT_TEMPLATE\): there is no file {checkpoint}/other\.jinja"
    with pytest.raises(TokenizerError, match=told):
        prepare(open_source(checkpoint, {**OPENVINO, "OPTION_CHAT_TEMPLATE": "other.jinja"}))
    with pytest.raises(TokenizerError, match="expected a file, or a template in Jinja"):
        prepare(open_source(checkpoint, {**OPENVINO, "OPTION_CHAT_TEMPLATE": "text " * 99}))
    assert "compiling" not in caplog.text


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

    def noting(path: Path, *, trust_remote_code: bool, template: object) -> Tokenizer:
        trusted.append(trust_remote_code)
        return load_tokenizer(path)

    monkeypatch.setattr(tokenizer, "load_tokenizer", noting)
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


# -- compiled engines, served with the limits that they were compiled for ----------------------------------------------

PBTXT = """
backend: "tensorrtllm"
parameters { key: "max_beam_width" value: { string_value: "${max_beam_width}" } }
parameters { key: "gpt_model_type" value: { string_value: "inflight_fused_batching" } }
"""
TRUSS = "model_metadata:\n  tensor_parallelism: 1\n"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djl_trtllm.backends.planning.this_machine", gpu_machine)


def tensorrt(path: Path) -> Path:
    """An engine of 256 sequences of 3072 tokens."""
    write_tensorrt_engine(path, max_batch_size=256, max_input_len=2048, max_seq_len=3072, max_num_tokens=8192)
    return path


def openvino(path: Path) -> Path:
    """An engine of 8 sequences of 512 tokens."""
    write_checkpoint(path)
    (path / "model.safetensors").unlink()
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (path / "config.json").write_text(json.dumps(config))
    write_engine_files(path)
    limits = {"max_rolling_batch_size": 8, "max_input_len": 511, "max_output_len": 511, "max_seq_len": 512}
    head = {"format": 1, "backend": "openvino", "checkpoint": "", "versions": {}, "platform": "", "created": ""}
    (path / "manifest.json").write_text(json.dumps({**head, "options": {}, "files": {}, "limits": limits}))
    return path


def bare(root: Path, engine: Callable[[Path], Path]) -> Path:
    return engine(root / "model")


def archive(root: Path, engine: Callable[[Path], Path]) -> Path:
    with tarfile.open(root / "model.tar.gz", "w:gz") as packed:
        packed.add(engine(root / "packed"), ".")
    return root / "model.tar.gz"


def lmi(root: Path, engine: Callable[[Path], Path]) -> Path:
    (root / "tensorrt_llm").mkdir(parents=True)
    (root / "tensorrt_llm" / "config.pbtxt").write_text(PBTXT)
    engine(root / "tensorrt_llm" / "1")
    return root


def triton(root: Path, engine: Callable[[Path], Path]) -> Path:
    lmi(root, engine)
    for name in ("ensemble", "preprocessing", "postprocessing"):
        (root / name).mkdir()
        (root / name / "config.pbtxt").write_text(f'name: "{name}"\n')
    return root


def truss(root: Path, engine: Callable[[Path], Path]) -> Path:
    (root / "config.yaml").write_text(TRUSS)
    engine(root / "data" / "engine")
    (root / "serving.properties").write_text("option.model_id=data/engine\n")
    return root


def truss_with_repository(root: Path, engine: Callable[[Path], Path]) -> Path:
    triton(root / "packages" / "inflight_batcher_llm", engine)
    (root / "config.yaml").write_text(TRUSS)
    return root


PLACES = [bare, archive, lmi, triton, truss, truss_with_repository]


def served(path: Path, root: Path, **environ: str) -> tuple[Config, EnginePlan]:
    config, _, engine_plan = plan(open_source(path, {"OPTION_ENGINE_CACHE_DIR": str(root / "cache"), **environ}))
    return config, engine_plan


@by_rows("place", PLACES)
def test_a_tensorrt_engine_is_served_as_it_was_built(
    tmp_path: Path, place: Callable[[Path, Callable[[Path], Path]], Path]
) -> None:
    config, engine_plan = served(place(tmp_path, tensorrt), tmp_path)
    assert (engine_plan.max_sequences, engine_plan.max_seq_len, engine_plan.max_input_len) == (256, 3072, 3071)
    assert config.options.max_num_tokens == 8192 and config.options.max_beam_width == 2
    assert str(config.origin("max_rolling_batch_size")).startswith("derived from build_config in ")
    assert engine_plan.notes == ()
    assert [warning for warning in config.warnings if "not filled in" not in warning] == []


@by_rows("place", PLACES)
def test_an_openvino_engine_is_served_as_it_was_built(
    tmp_path: Path, place: Callable[[Path, Callable[[Path], Path]], Path]
) -> None:
    config, engine_plan = served(place(tmp_path, openvino), tmp_path)
    assert (engine_plan.max_sequences, engine_plan.max_seq_len, engine_plan.max_input_len) == (8, 512, 511)
    assert str(config.origin("max_seq_len")).startswith("derived from limits in ")


@pytest.mark.parametrize("engine", [tensorrt, openvino])
def test_what_is_written_in_config_pbtxt_comes_before_the_engine(
    tmp_path: Path, engine: Callable[[Path], Path]
) -> None:
    path = triton(tmp_path, engine)
    with (path / "tensorrt_llm" / "config.pbtxt").open("a") as file:
        file.write("max_batch_size: 4\n")
    config, engine_plan = served(path, tmp_path)
    assert engine_plan.max_sequences == 4
    assert str(config.origin("max_rolling_batch_size")) == f"{path}/tensorrt_llm/config.pbtxt:5"


def test_a_limit_above_the_engines_is_lowered_as_tensorrt_llm_does(tmp_path: Path) -> None:
    config, engine_plan = served(
        tensorrt(tmp_path / "model"), tmp_path, OPTION_MAX_SEQ_LEN="4096", OPTION_MAX_BATCH_SIZE="300"
    )
    assert (engine_plan.max_sequences, engine_plan.max_seq_len) == (256, 3072)
    assert [warning.split(":")[0] for warning in config.warnings] == [
        "option.max_num_sequences=300 (environment variable OPTION_MAX_BATCH_SIZE)",
        "option.max_seq_len=4096 (environment variable OPTION_MAX_SEQ_LEN)",
    ]


def test_a_checkpoint_with_an_engine_beside_it_has_the_options_of_a_checkpoint(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    tensorrt(path / "engine")
    config, engine_plan = served(path, tmp_path)
    assert (config.options.max_rolling_batch_size, config.options.max_seq_len) == (32, None)
    assert engine_plan.max_sequences == 32


def test_the_log_says_where_each_limit_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tensorrt(tmp_path / "model")
    for file in write_checkpoint(tmp_path / "checkpoint").glob("tokenizer*"):
        file.rename(path / file.name)
    caplog.set_level(logging.INFO, model.__name__)
    prepare(open_source(path, {"OPTION_MAX_OUTPUT_LEN": "100"}))
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("limits: ")]
    assert line == (
        f"limits: option.max_rolling_batch_size=256, option.max_input_len=3071, option.max_seq_len=3072, "
        f"option.max_num_tokens=8192, option.max_beam_width=2 (derived from build_config in {path}/config.json); "
        "option.max_output_len=100 (environment variable OPTION_MAX_OUTPUT_LEN)"
    )


def test_the_log_says_what_a_smaller_engine_beside_the_checkpoint_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_checkpoint(tmp_path / "model")
    engine = write_tensorrt_engine(
        path / "engine", max_batch_size=8, max_input_len=512, max_seq_len=512, max_num_tokens=4096
    )
    caplog.set_level(logging.INFO, model.__name__)
    prepared = prepare(open_source(path, {"OPTION_MAX_INPUT_LEN": "150", "OPTION_MAX_OUTPUT_LEN": "100"}))
    assert (prepared.limits.max_batch_size, prepared.limits.max_seq_len) == (8, 250)
    assert (
        f"limits of the engine {engine}: 8 sequences of 250 tokens, prompts of at most 150; planned were 32 sequences "
        "of 250 tokens, prompts of at most 150"
    ) in caplog.messages
