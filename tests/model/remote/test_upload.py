from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote.s3 import S3Address
from djl_trtllm.model.remote.upload import is_remote_destination, upload, upload_file
from tests.support.s3_server import Fault, Request, Store

FILES = {"config.json": b"{}", "1/rank0.engine": b"engine" * 100, "empty": b"", "z.json": b"[]"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / "engine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "engine" / name).write_bytes(content)
    return tmp_path / "engine"


def contents(store: Store) -> dict[str, bytes]:
    return {key: value.path.read_bytes() for key, value in store.objects.items()}


def test_places_elsewhere_are_distinguished_from_local_paths() -> None:
    assert is_remote_destination("s3://models/story") and is_remote_destination("hf://acme/story")
    assert not is_remote_destination("/engines/story") and not is_remote_destination("acme/story")


def test_every_file_goes_up_under_its_name(store: Store, directory: Path) -> None:
    lines: list[str] = []
    upload(directory, "s3://models/team/engine/", lines.append)
    assert contents(store) == {f"team/engine/{name}": content for name, content in FILES.items()}
    assert lines[0] == "uploading to s3://models/team/engine: 4 files, 604 bytes"
    assert lines[1].startswith("uploading to s3://models/team/engine: 604 bytes in ")
    assert len(lines) == 2


def test_one_file_goes_up_last_where_asked(store: Store, directory: Path) -> None:
    for last in ("config.json", "z.json"):
        store.clear()
        upload(directory, "s3://models", lambda line: None, last=last)
        puts = [request.key for request in store.requests if request.method == "PUT"]
        assert len(puts) == 4 and puts[-1] == last


def test_one_file_goes_to_exactly_its_address(store: Store, directory: Path) -> None:
    lines: list[str] = []
    upload_file(directory / "config.json", S3Address.parse("s3://models/team/config.json"), lines.append)
    assert contents(store) == {"team/config.json": b"{}"}
    assert lines[0] == "uploading to s3://models/team/config.json: 1 files, 2 bytes"


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [(403, "AccessDenied", "access is denied: .*s3:PutObject"), (404, "NoSuchBucket", "there is no such bucket")],
)
def test_why_the_store_refuses_is_reported_with_what_to_do(
    store: Store, directory: Path, status: int, code: str, says: str
) -> None:
    def refuse(request: Request) -> int | None:
        raise Fault(status, code)

    store.fault = refuse
    with pytest.raises(DownloadError, match=f"s3://models/x: {says}"):
        upload(directory, "s3://models/x", lambda line: None)


def test_a_store_that_cannot_be_reached_is_reported(
    store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="the store cannot be reached"):
        upload(directory, "s3://models/x", lambda line: None)


# -- the hub -------------------------------------------------------------------------------------------------------


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """What is asked of the hub."""
    import huggingface_hub

    calls: list[tuple[str, Any, Any]] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda _, *arguments, **named: calls.append((name, arguments, named))

    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, noted(name))
    return calls


def test_a_repository_on_the_hub_is_made_private(directory: Path, api: list[tuple[str, Any, Any]]) -> None:
    lines: list[str] = []
    upload(directory, "hf://acme/engine", lines.append)
    assert api == [
        ("create_repo", ("acme/engine",), {"private": True, "exist_ok": True}),
        ("upload_folder", (), {"repo_id": "acme/engine", "folder_path": directory}),
    ]
    assert lines == ["uploading to acme/engine on the hub (private, where it is new)"]


def test_the_hub_gets_the_token_of_the_configuration(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    used = []
    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, lambda api, *_, **__: used.append(api.token))
    upload(directory, "hf://acme/engine", lambda line: None, hub_token="hf_given")
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    upload(directory, "hf://acme/engine", lambda line: None, hub_token="hf_given")
    assert used == ["hf_given", "hf_given", None, None]
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(DownloadError, match=r"option\.hf_access_token is not a token") as caught:
        upload(directory, "hf://acme/engine", lambda line: None, hub_token="two words")
    assert "two words" not in str(caught.value)


def test_what_the_hub_refuses_is_reported(
    directory: Path, api: list[tuple[str, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("too large")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", refuse)
    with pytest.raises(DownloadError, match=r"cannot upload .*engine to acme/engine: ValueError: too large"):
        upload(directory, "hf://acme/engine", lambda line: None)


def test_what_is_no_name_of_the_hub_is_refused(directory: Path) -> None:
    with pytest.raises(DownloadError, match="is not the name of a model on the hub"):
        upload(directory, "hf://a/b/c", lambda line: None)
