from __future__ import annotations

import hashlib
import json
import re
import shutil
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import pytest

from djl_trtllm.engines.manifest import FileEntry, Manifest, installed_versions
from djl_trtllm.errors import EngineMismatchError
from tests.engines.helpers import write_engine_files

VERSIONS = {"openvino": "2026.4.0", "openvino-genai": "2026.4.0.0"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_engine_files(tmp_path / "engine")


def described(directory: Path) -> Manifest:
    options = {"dtype": "fp16", "quantize": "int8"}
    manifest = Manifest.of(
        directory,
        backend="openvino",
        checkpoint="sha256:abc",
        options=options,
        versions=VERSIONS,
        platform="x86_64",
        limits={"max_seq_len": 512},
    )
    manifest.write(directory)
    return manifest


def test_what_was_written_is_read_back(directory: Path) -> None:
    manifest = described(directory)
    assert Manifest.read(directory) == manifest
    assert set(manifest.files) == {"openvino_model.xml", "openvino_model.bin"}
    assert (manifest.versions, manifest.platform) == (VERSIONS, "x86_64")
    assert (manifest.backend, manifest.checkpoint, manifest.format) == ("openvino", "sha256:abc", 1)
    assert manifest.options == {"dtype": "fp16", "quantize": "int8"} and manifest.limits == {"max_seq_len": 512}
    assert sorted(path.name for path in directory.iterdir()) == sorted([*manifest.files, "manifest.json"])


def test_the_time_is_that_of_the_whole_second_in_utc(directory: Path) -> None:
    before = datetime.now(timezone.utc).replace(microsecond=0)
    created = described(directory).created
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", created)
    assert before <= datetime.fromisoformat(created) <= datetime.now(timezone.utc)


def test_every_file_but_the_manifest_itself_is_in_it(directory: Path) -> None:
    (directory / "folder").mkdir()
    (directory / "folder" / "more.bin").write_bytes(b"more")
    described(directory)
    assert described(directory).files == {
        "folder/more.bin": FileEntry(4, hashlib.sha256(b"more").hexdigest()),
        **{
            name: FileEntry(len(content), hashlib.sha256(content).hexdigest())
            for name in ("openvino_model.bin", "openvino_model.xml")
            if (content := (directory / name).read_bytes())
        },
    }


def test_people_can_read_it(directory: Path) -> None:
    described(directory)
    text = (directory / "manifest.json").read_text()
    assert text.startswith('{\n  "format": 1,\n  "backend": "openvino",\n')
    assert text.endswith("}\n")


def test_a_manifest_is_never_half_written(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = described(directory)

    def full(path: Path, content: bytes) -> None:
        path.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        described(directory)
    assert Manifest.read(directory) == before


def test_no_manifest_is_none(directory: Path) -> None:
    assert Manifest.read(directory) is None
    assert Manifest.read(directory / "nowhere") is None
    assert Manifest.read(directory / "openvino_model.xml") is None


def test_a_manifest_that_cannot_be_read_is_reported(directory: Path) -> None:
    (directory / "manifest.json").mkdir()
    with pytest.raises(EngineMismatchError, match=r"manifest\.json cannot be read: .*Is a directory"):
        Manifest.read(directory)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\xfe"])
def test_a_broken_manifest_is_named_as_broken(directory: Path, content: bytes) -> None:
    (directory / "manifest.json").write_bytes(content)
    with pytest.raises(EngineMismatchError, match=r"manifest\.json is broken .*compile the engine again"):
        Manifest.read(directory)


def test_a_manifest_of_another_format_says_which(directory: Path) -> None:
    described(directory)
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(EngineMismatchError) as caught:
        Manifest.read(directory)
    assert str(caught.value) == (
        f"{path} has format 99, this version of djl-trtllm reads format 1: compile the engine again, or delete the "
        "manifest to serve the directory unchecked"
    )


def test_fields_of_later_versions_are_no_error(directory: Path) -> None:
    manifest = described(directory)
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gpu": "H200"}))
    assert Manifest.read(directory) == manifest


def test_a_whole_directory_verifies(directory: Path) -> None:
    assert described(directory).verify(directory) == []


def test_each_bad_file_is_named_with_what_is_wrong(directory: Path) -> None:
    for name in ("folder/in it", "loop", "long"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"x")
    manifest = described(directory)
    (directory / "openvino_model.xml").unlink()
    (directory / "openvino_model.bin").write_bytes(bytes(400))
    shutil.rmtree(directory / "folder")
    (directory / "folder").touch()
    (directory / "loop").unlink()
    (directory / "loop").symlink_to("loop")
    (directory / "long").write_bytes(b"xy")
    for contents in (True, False):
        loop, *others = sorted(manifest.verify(directory, contents=contents), key=lambda line: "loop" not in line)
        assert loop.startswith("loop: cannot be read (")
        assert others == [
            "folder/in it: missing",
            "long: changed, 2 bytes where 1 were written",
            "openvino_model.bin: truncated, 400 of 1000 bytes",
            "openvino_model.xml: missing",
        ]


def test_a_changed_byte_is_found_by_contents_and_not_by_sizes(directory: Path) -> None:
    manifest = described(directory)
    (directory / "openvino_model.bin").write_bytes(b"x" + bytes(999))
    assert manifest.verify(directory, contents=False) == []
    assert manifest.verify(directory) == ["openvino_model.bin: changed, same size and a different SHA-256"]


def test_differences_name_the_option_what_the_engine_has_and_what_was_asked(directory: Path) -> None:
    lines = described(directory).differences(
        backend="tensorrt", checkpoint="sha256:def", options={"quantize": "none", "dtype": "fp16"}
    )
    assert lines == [
        "option.backend: engine has openvino, asked for tensorrt",
        "checkpoint: engine was made from sha256:abc, this one is sha256:def",
        "option.quantize: engine has int8, asked for none",
    ]


def test_what_is_not_asked_for_is_not_compared(directory: Path) -> None:
    manifest = described(directory)
    assert manifest.differences() == []
    assert manifest.differences(options={"max_batch_size": 4}, versions={"torch": "0.1"}) == []
    assert manifest.differences(options={"dtype": None}) == ["option.dtype: engine has fp16, asked for none"]


def test_an_engine_that_fits_is_taken_and_another_is_refused_with_every_difference(directory: Path) -> None:
    manifest = described(directory)
    manifest.require_fit(directory, backend="openvino", options={"dtype": "fp16"}, versions=VERSIONS)
    with pytest.raises(EngineMismatchError) as caught:
        manifest.require_fit(directory, backend="tensorrt", options={"dtype": "bf16"}, versions={"openvino": "2026.3"})
    assert str(caught.value).splitlines() == [
        f"the engine {directory} does not fit:",
        "  - option.backend: engine has openvino, asked for tensorrt",
        "  - option.dtype: engine has fp16, asked for bf16",
        "  - openvino: engine was made with 2026.4.0, installed is the older 2026.3",
        "change the option, or compile the checkpoint again with `djl-trtllm compile CHECKPOINT OUT`",
    ]


def test_a_damaged_engine_is_refused_by_its_sizes(directory: Path) -> None:
    manifest = described(directory)
    (directory / "openvino_model.bin").write_bytes(b"x" + bytes(999))
    manifest.require_whole(directory)
    (directory / "openvino_model.bin").write_bytes(bytes(999))
    with pytest.raises(EngineMismatchError) as caught:
        manifest.require_whole(directory)
    assert str(caught.value).splitlines() == [
        f"the engine {directory} is damaged:",
        "  - openvino_model.bin: truncated, 999 of 1000 bytes",
        "copy it again, or compile it again with `djl-trtllm compile CHECKPOINT OUT`",
    ]


def test_versions_of_what_is_installed_are_reported_and_of_nothing_else() -> None:
    packages = ["no-such-package", "pytest", "no-such-package-either", "packaging"]
    assert installed_versions(packages) == {name: version(name) for name in ("pytest", "packaging")}


@pytest.mark.parametrize(
    ("installed", "differs"),
    [
        ("2026.3.0", True), ("2025.4.1", True), ("2026.4.0", False), ("2026.4.9", False), ("2027.1.0", False),
        ("2026.x.1", True),
    ],
)  # fmt: skip
def test_only_an_older_runtime_differs(directory: Path, installed: str, differs: bool) -> None:
    manifest = described(directory)
    manifest.versions["openvino"] = "2026.4.1-1-abc"
    lines = manifest.differences(versions={"openvino": installed, "something-else": "1.0"})
    manifest.versions["openvino"] = "2026.4.1"
    assert bool(manifest.differences(versions={"openvino": installed})) is differs
    expected = f"openvino: engine was made with 2026.4.1-1-abc, installed is the older {installed}"
    assert lines == ([expected] if differs else [])
