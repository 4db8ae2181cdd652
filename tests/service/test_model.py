"""Models from what the user named to what can be run: names, configuration, files."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import ConfigError, LayoutError, ModelError
from djl_trtllm.service import model, open_remote, open_source, plan, prepare, remote_name
from tests.engines.helpers import gpu_machine, write_checkpoint, write_engine_files, write_tensorrt_engine
from tests.support.models import scripted_model

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


def test_a_model_has_the_name_that_its_options_give_it(tmp_path: Path) -> None:
    assert open_source(directory(tmp_path / "story", "option.model_name=fable"), {}).name == "fable"


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


def test_a_directory_with_nothing_but_a_model_is_the_model(tmp_path: Path) -> None:
    path = directory(tmp_path / "outer" / "story", "option.max_input_len=77")
    source = open_source(tmp_path / "outer", {})
    assert (source.directory, source.name, source.config.options.max_input_len) == (path, "story", 77)


def test_everything_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    path = directory(tmp_path / "story", "option.max_input_len=many")
    with pytest.raises(ConfigError, match="2 configuration problems"):
        open_source(path, {"OPTION_MAX_OUTPUT_LEN": "many"})


def test_what_is_not_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="no model at"):
        open_source(tmp_path / "nowhere", {})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("acme/tiny-stories", "acme_tiny_stories"),
        ("hf://acme/tiny-stories", "acme_tiny_stories"),
        ("s3://models/team/story.tar.gz", "story"),
        ("s3://models/team/my-story/", "my_story"),
        ("s3://models/X/X", "X"),
    ],
)
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
    }


def test_a_remote_model_may_name_itself_and_its_revision(fetching: Fetching) -> None:
    (fetching.found / "serving.properties").write_text("option.model_name=fable\n")
    assert open_remote("acme/story", {"OPTION_REVISION": "v2"}).name == "fable"
    assert fetching.calls[0]["revision"] == "v2"


def test_a_fetched_model_does_not_allow_its_own_code_to_run(fetching: Fetching) -> None:
    (fetching.found / "serving.properties").write_text("option.trust_remote_code=true\n")
    source = open_remote("acme/story", {})
    assert (source.config.options.trust_remote_code, source.trusted) == (False, False)
    (warning,) = source.config.warnings
    assert all(part in warning for part in ("remote_code=true (", "acme/story was fetched", "OPTION_TRUST_REMOTE_CODE"))


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


def test_a_secret_in_a_model_id_is_not_reported(checkpoint: Path) -> None:
    with pytest.raises(ModelError) as caught:
        plan(open_source(checkpoint, {"HF_MODEL_ID": "https://me:hunter2@host/model"}))
    assert "hunter2" not in str(caught.value)


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
