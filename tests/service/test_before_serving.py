from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.vllm.names import known_versions
from djl_trtllm.config import Config
from djl_trtllm.engines.hardware import gpus_named
from djl_trtllm.errors import BuildError, ConfigError, DjlTrtllmError, DownloadError, ModelError
from djl_trtllm.service import model
from djl_trtllm.service.model import compile_model, compile_with_neo, preview
from tests.engines.helpers import CPU_ONLY, gpu_machine, write_checkpoint
from tests.support.tables import by_rows, table


class Work:
    """In the place of compiler and network: what was compiled, fetched and uploaded."""

    def __init__(self, fetched: Path) -> None:
        self.fetched = fetched
        self.compiled: list[tuple[Path, Path, int]] = []
        self.fetches: list[tuple[str, str | None]] = []
        self.uploads: list[tuple[list[str], str, str]] = []
        self.failure: DjlTrtllmError | None = None
        self.upload_failure: DjlTrtllmError | None = None

    def compile_checkpoint(
        self,
        config: Config,
        checkpoint: Path,
        out: Path,
        tell: Callable[[str], None],
        *,
        tokenizer_dir: Path | None,
        draft_dir: Path | None,
        template: Callable[[], str] | None,
    ) -> None:
        beside = (tokenizer_dir, draft_dir, template and template())
        tell(f"compiling {checkpoint}" + "".join(f" with {each}" for each in beside if each))
        if self.failure is not None:
            raise self.failure
        out.mkdir(parents=True, exist_ok=True)
        (out / "engine").write_text("engine")
        self.compiled.append((checkpoint, out, config.options.max_input_len))

    def fetch_model(self, text: str, config: Config, revision: str | None) -> Path:
        self.fetches.append((text, revision))
        return self.fetched

    def upload(
        self, directory: Path, destination: str, tell: Callable[[str], None], *, last: str, hub_token: str | None
    ) -> None:
        tell(f"uploading to {destination}")
        assert hub_token is None
        if self.upload_failure is not None:
            raise self.upload_failure
        self.uploads.append(([path.name for path in directory.iterdir()], destination, last))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work(tmp_path / "fetched")
    for name in ("compile_checkpoint", "fetch_model", "upload"):
        monkeypatch.setattr(model, name, getattr(work, name))
    return work


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return properties(write_checkpoint(tmp_path / "model"), "option.max_input_len=77")


def properties(path: Path, *lines: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "serving.properties").write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_local_checkpoint_is_compiled_as_its_properties_say(work: Work, checkpoint: Path, tmp_path: Path) -> None:
    told: list[str] = []
    assert compile_model(str(checkpoint), str(tmp_path / "out"), {}, told.append) == str(tmp_path / "out")
    assert work.compiled == [(checkpoint, tmp_path / "out", 77)]
    assert told == [f"compiling {checkpoint}"]


def test_the_model_that_the_properties_name_is_compiled(work: Work, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (checkpoint / "serving.properties").write_text(f"option.model_id={tmp_path / 'weights'}\n")
    compile_model(str(checkpoint), str(tmp_path / "out"), {}, print)
    assert work.compiled[0][0] == tmp_path / "weights"


def test_a_draft_model_is_compiled_too_and_a_chat_template_kept(work: Work, checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint(checkpoint / "small")
    properties(checkpoint, "option.speculative_draft_model=small", "option.chat_template={{ a }}")
    told: list[str] = []
    compile_model(str(checkpoint), str(tmp_path / "out"), {}, told.append)
    assert told == [f"compiling {checkpoint} with {checkpoint / 'small'} with {{{{ a }}}}"]


def test_a_remote_checkpoint_is_fetched_first(work: Work, tmp_path: Path) -> None:
    environ = {"OPTION_REVISION": "v2", "OPTION_MAX_INPUT_LEN": "77"}
    compile_model("acme/story", str(tmp_path / "out"), environ, print)
    assert work.fetches == [("acme/story", "v2")]
    assert work.compiled == [(work.fetched, tmp_path / "out", 77)]


def test_an_engine_for_elsewhere_is_uploaded_with_its_manifest_last(
    work: Work, checkpoint: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    environ = {"OPTION_ENGINE_CACHE_DIR": str(tmp_path / "cache")}
    out = "s3://models/engines/story"
    assert compile_model(str(checkpoint), out, environ, told.append) == out
    ((compiled, local, _),) = work.compiled
    assert (compiled, local.parent) == (checkpoint, tmp_path / "cache" / "outgoing")
    assert work.uploads == [(["engine"], out, "manifest.json")]
    assert told == [f"compiling {checkpoint}", f"uploading to {out}"]
    assert [path.name for path in local.parent.iterdir()] == [f".{local.name}.lock"]


@pytest.mark.parametrize(
    "other", ["s3://b/story", "s3://a/b/story", "hf://a/story", "s3://a/\udce9", f"s3://a/{'字' * 99}"]
)
def test_an_engine_that_cannot_be_uploaded_is_kept_for_its_own_address(
    work: Work, checkpoint: Path, tmp_path: Path, other: str
) -> None:
    environ = {"OPTION_ENGINE_CACHE_DIR": str(tmp_path / "cache")}
    work.upload_failure = DownloadError("no such bucket")
    for out in ("s3://a/story", other, "s3://a/story/"):
        with pytest.raises(DownloadError):
            compile_model(str(checkpoint), out, environ, print)
    first, second, again = (local for _, local, _ in work.compiled)
    assert first == again != second
    assert (first / "engine").is_file() and (second / "engine").is_file()


def test_an_engine_that_is_uploaded_need_not_be_there_any_more(
    work: Work, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "upload", lambda directory, *_, **__: shutil.rmtree(directory))
    environ = {"OPTION_ENGINE_CACHE_DIR": str(tmp_path / "cache")}
    assert compile_model(str(checkpoint), "hf://acme/story", environ, print) == "hf://acme/story"


def test_neo_says_from_where_to_where_and_where_the_cache_is(work: Work, checkpoint: Path, tmp_path: Path) -> None:
    seen: list[str | None] = []
    environ = {
        "SM_NEO_INPUT_MODEL_DIR": str(checkpoint),
        "SM_NEO_COMPILED_MODEL_DIR": str(tmp_path / "out"),
        "SM_NEO_COMPILATION_ERROR_FILE": str(tmp_path / "errors.json"),
        "SM_NEO_CACHE_DIR": str(tmp_path / "cache"),
    }
    compile_with_neo(environ, lambda line: seen.append(line))
    assert work.compiled == [(checkpoint, tmp_path / "out", 77)]
    assert seen == [f"compiling {checkpoint}"]
    assert not (tmp_path / "errors.json").exists()


@by_rows(
    ("environ", "cache"),
    table(__file__, "without_its_variables_neos_paths_count"),
)
def test_without_its_variables_neos_paths_count(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], cache: str | None
) -> None:
    calls: list[tuple[str, str, str | None]] = []
    monkeypatch.setattr(
        model,
        "compile_model",
        lambda model, out, environ, tell: calls.append((model, out, environ.get("DJL_CACHE_DIR"))),
    )
    compile_with_neo(environ, print)
    assert calls == [("/opt/ml/model/input", "/opt/ml/model/compiled", cache)]


@pytest.mark.parametrize("folder", ["new/folder", "."], ids=["made", "there"])
def test_neo_gets_its_error_in_a_file(work: Work, checkpoint: Path, tmp_path: Path, folder: str) -> None:
    work.failure = BuildError("no such architecture")
    errors = tmp_path / folder / "errors.json"
    with pytest.raises(BuildError):
        compile_with_neo(
            {"SM_NEO_INPUT_MODEL_DIR": str(checkpoint), "SM_NEO_COMPILATION_ERROR_FILE": str(errors)}, print
        )
    assert json.loads(errors.read_text()) == {"error": "no such architecture"}


@pytest.mark.parametrize("out", ["s3://", "s3:///engines", "hf://", "hf://one/two/three"])
def test_a_place_that_cannot_be_one_is_refused_before_anything_is_fetched_or_compiled(work: Work, out: str) -> None:
    with pytest.raises(DownloadError, match=r"expected (s3://BUCKET/PREFIX|owner/name)"):
        compile_model("acme/story", out, {}, lambda line: None)
    assert (work.fetches, work.compiled) == ([], [])


# -- What a model would be served as.


@pytest.fixture(autouse=True)
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(model, "this_machine", lambda: CPU_ONLY)
    monkeypatch.delenv("DJL_SERVING_HOME", raising=False)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the hub has of a model: its description, which is all that may be fetched."""
    path = write_checkpoint(tmp_path / "hub")
    for weights in path.glob("*.safetensors"):
        weights.unlink()

    def fetch(text: str, *given: object, **options: Any) -> Path:
        assert options["config_only"] and not options["tokenizer_only"]
        if text != "acme/story":
            raise DownloadError(f"cannot download {text}: there is no such model")
        return path

    monkeypatch.setattr(model, "fetch", fetch)
    return path


def test_without_a_model_the_environment_is_read(checkpoint: Path) -> None:
    found = preview(None, {"OPTION_MAX_INPUT_LEN": "77"})
    assert (found.config.options.max_input_len, found.plan, found.refusal) == (77, None, None)
    assert "no model is named" in found.remarks[0]


def test_what_is_not_there_or_wrong_is_an_error(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        preview(str(checkpoint / "nowhere"), {})
    with pytest.raises(ConfigError, match="OPTION_MAX_INPUT_LEN"):
        preview(str(properties(checkpoint, "option.dtype=x")), {"OPTION_MAX_INPUT_LEN": "many"})


def test_what_cannot_be_served_has_the_reason(tmp_path: Path) -> None:
    found = preview(str(properties(tmp_path / "empty", "option.max_input_len=77")), {})
    assert found.config.options.max_input_len == 77
    assert found.plan is None and "is not a model that can be served" in str(found.refusal)


def test_the_tokenizer_of_another_model_cannot_be_served(checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.json"
    described = json.loads(path.read_text())
    described["model"]["vocab"] |= {f"word {number}": 10_000 + number for number in range(3)}
    path.write_text(json.dumps(described))
    assert "it is the tokenizer of another model" in str(preview(str(checkpoint), {}).refusal)
    path.write_text("{")
    assert str(path) in str(preview(str(checkpoint), {}).refusal)


FILES = ("serving.properties", "config.pbtxt", "config.json", "model.safetensors", "tokenizer.json")


@pytest.mark.parametrize("name", [*FILES, "tokenizer_config.json", "chat_template.jinja"])
def test_nobody_waits_for_a_file_that_is_none(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    try:
        told = str(preview(str(checkpoint), {}).refusal)
    except DjlTrtllmError as error:
        told = str(error)
    assert str(checkpoint / name) in told and "FIFO" in told


def test_a_backend_that_a_file_names_has_to_be_there(checkpoint: Path) -> None:
    found = preview(str(properties(checkpoint, "option.backend=tensorrt")), {})
    assert "TensorRT-LLM is not installed" in str(found.refusal)


@pytest.mark.parametrize(
    ("backend", "engine"),
    [
        *((name, "TensorRT-LLM 1.2.1") for name in ("tensorrt", "pytorch", "autodeploy")),
        ("vllm", f"vLLM {known_versions()[-1]}"),
    ],
)
def test_a_backend_that_is_asked_for_is_supposed_to_be_there(checkpoint: Path, backend: str, engine: str) -> None:
    found = preview(str(properties(checkpoint, "option.tensor_parallel_degree=2")), {}, backend)
    assert found.plan is not None and (found.plan.backend.value, found.plan.gpus) == (backend, 2)
    assert found.remarks == (f"planned for 2 x any NVIDIA GPU with {engine}, not for this machine",)


def test_gpus_that_are_given_are_those_of_the_plan(checkpoint: Path) -> None:
    found = preview(str(properties(checkpoint, "option.tensor_parallel_degree=max")), {}, gpus=gpus_named("h100:4"))
    assert found.plan is not None and (found.plan.backend.value, found.plan.gpus) == ("tensorrt", 4)
    assert found.plan.platform == "sm_90"
    assert found.remarks == ("planned for 4 x NVIDIA H100 with TensorRT-LLM 1.2.1, not for this machine",)
    many = properties(checkpoint, "option.tensor_parallel_degree=8")
    assert "8 GPUs, and 4 can be used" in str(preview(str(many), {}, gpus=gpus_named("h100:4")).refusal)


def test_a_backend_without_gpus_says_that_it_uses_none(checkpoint: Path) -> None:
    found = preview(str(checkpoint), {}, "openvino", gpus_named("h100"))
    assert found.plan is not None and found.refusal is None
    assert found.remarks == ("no GPU is used: the backend is openvino",)
    assert preview(str(checkpoint), {}, "openvino").remarks == ()


def test_a_machine_that_has_all_of_it_is_not_supposed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "this_machine", gpu_machine)
    found = preview(str(checkpoint), {}, "pytorch")
    assert found.plan is not None and found.remarks == ()


@pytest.mark.parametrize("named", [True, False])
def test_options_of_a_remote_model_are_checked_as_local_ones(hub: Path, tmp_path: Path, named: bool) -> None:
    folder = properties(tmp_path / "story", "option.model_id=acme/story", "option.quantize=fp8")
    found = preview(str(folder) if named else None, {} if named else {"OPTION_MODEL_ID": "acme/story"})
    if named:
        assert "option.quantize=fp8" in str(found.refusal) and "not available with OpenVINO" in str(found.refusal)
    else:
        assert found.plan is not None
        assert found.remarks == ("the weights are fetched and checked when the model is served",)


def test_the_file_that_comes_with_a_remote_model_counts(hub: Path) -> None:
    properties(hub, "option.max_input_len=77", "option.rotary_base=1000000")
    found = preview("acme/story", {})
    assert (found.config.options.max_input_len, found.refusal) == (77, None)
    (hub / "tokenizer_config.json").unlink(missing_ok=True)
    (hub / "tokenizer.json").unlink(missing_ok=True)
    assert preview("acme/story", {}).refusal is None


def test_a_remote_model_that_is_no_checkpoint_is_not_planned(hub: Path) -> None:
    properties(hub, "option.max_input_len=77")
    for text in ('{"pretrained_config": {}, "build_config": {}}', "{}"):
        (hub / "config.json").write_text(text)
        found = preview("acme/story", {})
        assert (found.config.options.max_input_len, found.plan, found.refusal) == (77, None, None)
        assert found.remarks == ("not planned: its files are looked at when the model is served",)


def test_a_remote_model_that_is_not_there_cannot_be_served(hub: Path) -> None:
    found = preview("acme/other", {"OPTION_MAX_INPUT_LEN": "77"})
    assert found.config.options.max_input_len == 77
    assert found.refusal == "cannot download acme/other: there is no such model"


def test_offline_nothing_of_a_remote_model_is_looked_at(hub: Path, tmp_path: Path) -> None:
    folder = properties(tmp_path / "story", "option.model_id=acme/story", "option.max_input_len=77")
    hub.rename(tmp_path / "out of reach")
    for named in (str(folder), "acme/story"):
        found = preview(named, {"OPTION_MAX_INPUT_LEN": "77"}, offline=True)
        assert (found.config.options.max_input_len, found.plan, found.refusal, found.offline) == (77, None, None, True)
        assert found.remarks == ("not planned: acme/story is looked at when it is served (--offline)",)
    assert "expected s3://BUCKET/PREFIX" in str(preview("s3://", {}, offline=True).refusal)


def test_a_local_model_has_its_weights_checked(checkpoint: Path, tmp_path: Path) -> None:
    for weights in checkpoint.glob("*.safetensors"):
        weights.write_bytes(b"")
    for path in (checkpoint, properties(tmp_path / "story", f"option.model_id={checkpoint}")):
        assert "safetensors" in str(preview(str(path), {}).refusal)


def test_an_archive_in_s3_is_looked_for_and_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []
    monkeypatch.setattr("djl_trtllm.model.remote.s3_download.list_objects", asked.append)
    folder = properties(tmp_path / "story", "option.model_id=s3://models/story.tar.gz")
    for named in ("s3://models/story.tar.gz", str(folder)):
        found = preview(named, {})
        assert (found.plan, found.refusal) == (None, None)
        assert "not planned: s3://models/story.tar.gz is opened when it is served" in found.remarks[0]
        assert "(--offline)" in preview(named, {}, offline=True).remarks[0]
    assert [str(address) for address in asked] == ["s3://models/story.tar.gz"] * 2


def test_what_djl_serving_runs_is_known_by_its_container_and_by_our_handlers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for environ, under in (({}, False), ({"OPTION_ENTRYPOINT": "djl_trtllm.async_handler"}, True)):
        found = preview(str(checkpoint), {"OPTION_MPI_MODE": "true", **environ})
        read = not any("option.mpi_mode" in note for note in found.config.notes)
        assert (found.under_djl, read) == (under, under)
    monkeypatch.setenv("DJL_SERVING_HOME", "/opt/djl")
    assert preview(str(checkpoint), {}).under_djl
