from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from djl_trtllm.config import Config
from djl_trtllm.errors import BuildError, DjlTrtllmError, DownloadError
from djl_trtllm.service import compiling
from djl_trtllm.service.compiling import compile_model, compile_with_neo


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
    ) -> SimpleNamespace:
        tell(f"compiling {checkpoint}" + (f" with {tokenizer_dir}" if tokenizer_dir else ""))
        if self.failure is not None:
            raise self.failure
        out.mkdir(parents=True, exist_ok=True)
        (out / "engine").write_text("engine")
        self.compiled.append((checkpoint, out, config.options.max_input_len))
        return SimpleNamespace(path=out)

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
        monkeypatch.setattr(compiling, name, getattr(work, name))
    return work


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "serving.properties").write_text("option.max_input_len=77\n")
    return path


def test_a_local_checkpoint_is_compiled_as_its_properties_say(work: Work, checkpoint: Path, tmp_path: Path) -> None:
    told: list[str] = []
    assert compile_model(str(checkpoint), str(tmp_path / "out"), {}, told.append) == str(tmp_path / "out")
    assert work.compiled == [(checkpoint, tmp_path / "out", 77)]
    assert told == [f"compiling {checkpoint}"]


def test_the_tokenizer_that_the_properties_name_is_compiled(work: Work, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (checkpoint / "serving.properties").write_text(f"option.tokenizer={tmp_path / 'tokenizer'}\n")
    told: list[str] = []
    compile_model(str(checkpoint), str(tmp_path / "out"), {}, told.append)
    assert told == [f"compiling {checkpoint} with {tmp_path / 'tokenizer'}"]


def test_the_model_that_the_properties_name_is_compiled(work: Work, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (checkpoint / "serving.properties").write_text(f"option.model_id={tmp_path / 'weights'}\n")
    compile_model(str(checkpoint), str(tmp_path / "out"), {}, print)
    assert work.compiled[0][0] == tmp_path / "weights"


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
    local = tmp_path / "cache" / "outgoing" / "story"
    assert work.compiled == [(checkpoint, local, 77)]
    assert work.uploads == [(["engine"], out, "manifest.json")]
    assert told == [f"compiling {checkpoint}", f"uploading to {out}"]
    assert not local.exists()


def test_an_engine_that_cannot_be_uploaded_is_kept(work: Work, checkpoint: Path, tmp_path: Path) -> None:
    environ = {"OPTION_ENGINE_CACHE_DIR": str(tmp_path / "cache")}
    work.upload_failure = DownloadError("no such bucket")
    with pytest.raises(DownloadError):
        compile_model(str(checkpoint), "hf://acme/story", environ, print)
    assert (tmp_path / "cache" / "outgoing" / "acme_story" / "engine").is_file()


def test_an_engine_that_is_uploaded_need_not_be_there_any_more(
    work: Work, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "upload", lambda directory, *_, **__: shutil.rmtree(directory))
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


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({}, None),
        ({"SM_NEO_CACHE_DIR": "/neo"}, "/neo"),
        ({"SM_NEO_CACHE_DIR": "/neo", "DJL_CACHE_DIR": "/djl"}, "/djl"),
    ],
    ids=["none", "neo's", "djl's own"],
)
def test_without_its_variables_neos_paths_count(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], cache: str | None
) -> None:
    calls: list[tuple[str, str, str | None]] = []
    monkeypatch.setattr(
        compiling,
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


def test_neos_own_place_for_errors_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(Path, "mkdir", lambda path, **_: None)
    monkeypatch.setattr(Path, "write_text", lambda path, text: written.append(str(path)))

    def refuse(*_: object) -> None:
        raise BuildError("no such architecture")

    monkeypatch.setattr(compiling, "compile_model", refuse)
    with pytest.raises(BuildError):
        compile_with_neo({}, print)
    assert written == ["/opt/ml/compilation/errors/errors.json"]


@pytest.mark.parametrize("out", ["s3://", "s3:///engines", "hf://", "hf://one/two/three"])
def test_a_place_that_cannot_be_one_is_refused_before_anything_is_fetched_or_compiled(work: Work, out: str) -> None:
    with pytest.raises(DownloadError, match=r"expected (s3://BUCKET/PREFIX|owner/name)"):
        compile_model("acme/story", out, {}, lambda line: None)
    assert (work.fetches, work.compiled) == ([], [])
