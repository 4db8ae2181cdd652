"""`scripts/images`, as far as no image is built: tests/docker/test_images.py builds them."""

from __future__ import annotations

import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.support.tables import by_table
from tools.images import __main__ as command, contents, stand_ins
from tools.images.engine import EngineError, count_steps, find_engine
from tools.images.source import served_source

PODMAN = """\
[1/2] STEP 1/3: FROM python:3.12.12-slim-bookworm AS package
[1/2] STEP 2/3: WORKDIR /build
--> Using cache 7f81657ca0fa
[1/2] STEP 3/3: COPY djl_trtllm djl_trtllm
--> 8add3899b0a3
[2/2] STEP 1/2: FROM python:3.12.12-slim-bookworm
[2/2] STEP 2/2: RUN install.sh
--> Using cache 25273fa4533c
"""
DOCKER = """\
#1 [internal] load build definition from cpu.Dockerfile
#5 [package 1/3] FROM docker.io/library/python:3.12.12-slim-bookworm
#5 CACHED
#6 [package 2/3] WORKDIR /build
#6 CACHED
#7 [package 3/3] COPY djl_trtllm djl_trtllm
#7 DONE 0.1s
#8 [stage-1 2/2] RUN install.sh
#8 0.512 installing
#8 CACHED
"""


@pytest.mark.parametrize("output", [PODMAN, DOCKER], ids=["podman", "docker"])
def test_the_steps_of_a_build_are_those_above_the_base_and_the_cached_ones_of_them(output: str) -> None:
    assert count_steps(output) == (3, 2)


def test_the_bases_of_the_images_are_known_to_the_stand_ins() -> None:
    found = {name: stand_ins.bases(command.ROOT / "docker" / f"{name}.Dockerfile") for name in command.IMAGES}
    assert found["cpu"] == ["python:3.12.12-slim-bookworm"]
    assert found["trtllm"] == ["nvcr.io/nvidia/tensorrt-llm/release:1.2.1"]
    assert [base.partition(":")[0] for base in found["djl"]] == [
        "maven",
        "nvcr.io/nvidia/tensorrt-llm/release",
        "eclipse-temurin",
    ]
    targets = [stand_ins.target_of(base) for base in found["djl"]]
    assert targets == ["maven", "tensorrt-llm", "java"]
    assert stand_ins.target_of(found["cpu"][0]) == "python"
    dockerfile = (command.ROOT / "tools" / "images" / "stand-ins.Dockerfile").read_text()
    for target in {*targets, "python"}:
        assert f" AS {target}\n" in dockerfile


def test_a_stand_in_has_the_name_that_the_labels_of_its_image_have() -> None:
    for name in command.IMAGES:
        dockerfile = command.ROOT / "docker" / f"{name}.Dockerfile"
        (label,) = stand_ins.filled(dockerfile.read_text(), r'image\.base\.name="(.+)"')
        assert label in {stand_ins.full_name(base) for base in stand_ins.bases(dockerfile)}


@by_table("path", "kind")
def test_what_should_not_be_in_an_image(path: str, kind: str | None) -> None:
    assert contents.unwanted([path]) == ({path: kind} if kind else {})


def test_what_an_image_adds_is_new_or_of_another_size() -> None:
    own = contents.added({"/a": 1, "/b": 2, "/c": 3}, {"/a": 1, "/b": 1, "/gone": 5})
    assert own == {"/b": 2, "/c": 3}
    assert contents.largest(own, 1) == [("/c", 3)]


def test_the_source_of_a_checkout_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "LICENSE").write_text("text\n")
    git = ["git", "-C", str(checkout), "-c", "user.name=any", "-c", "user.email=any"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    dockerfile = tmp_path / "djl.Dockerfile"
    dockerfile.write_text(f"ARG DJL_SERVING_COMMIT={commit}\n")
    monkeypatch.setattr("tools.images.source._DOCKERFILE", dockerfile)
    with served_source(checkout) as address:
        assert address is not None and address.endswith(f"/{commit}.tar.gz")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        assert opener.open(address, timeout=30).read(2) == b"\x1f\x8b"
    with served_source(None) as address:
        assert address is None


def test_without_an_engine_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="neither a Docker engine nor podman was found: install one of them"):
        find_engine()
