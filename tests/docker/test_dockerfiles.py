"""What can be said of the images without building them; test_images.py builds them."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.uv import uv

ROOT = Path(__file__).parent.parent.parent
DOCKERFILES = sorted(ROOT.glob("docker/*.Dockerfile"))
SCRIPTS = sorted([*ROOT.glob("docker/*.sh"), *ROOT.glob("docker/djl/*.sh")])
LOCKED = {image: ROOT / "docker" / f"requirements-{image}.txt" for image in ("core", "cpu")}
TOOLS = Path(sys.executable).parent


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, its continued lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        return [word for word in self.text.split() if not word.startswith("--")]

    def flag(self, name: str) -> str | None:
        found = re.search(rf"--{name}=(\S+)", self.text)
        return found[1] if found else None


def parse(dockerfile: Path) -> list[Instruction]:
    """The instructions, with the defaults of ARG filled in."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    values: dict[str, str] = {}
    instructions = []
    for line in filter(str.strip, text.splitlines()):
        name, _, rest = line.strip().partition(" ")
        filled = re.sub(r"\$\{(\w+)\}", lambda found: values.get(found[1], found[0]), rest.strip())
        if name.upper() == "ARG" and "=" in filled:
            key, _, value = filled.partition("=")
            values[key] = value
        instructions.append(Instruction(name.upper(), filled))
    return instructions


def final_stage(dockerfile: Path) -> list[Instruction]:
    instructions = parse(dockerfile)
    last = max(place for place, instruction in enumerate(instructions) if instruction.name == "FROM")
    return instructions[last:]


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a path of the checkout into the build context."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        kept = pattern.startswith("!")
        pattern = pattern.lstrip("!")
        parts = path.split("/")
        # A pattern that names a folder is about all that is in it; `*` alone does not cross a slash but names them all.
        heads = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        if pattern.startswith("**/"):
            matches = any(fnmatch.fnmatchcase(part, pattern[3:]) for part in parts)
        else:
            matches = any(
                head.count("/") == pattern.count("/") and fnmatch.fnmatchcase(head, pattern) for head in heads
            )
        if matches:
            sent = kept
    return sent


def read_locked(image: str) -> dict[str, str]:
    """Name and version of what an image with Python 3.12 gets; each with its hashes."""
    versions = {}
    for line in LOCKED[image].read_text().replace("\\\n", " ").splitlines():
        requirement = Requirement(line.partition(" --hash=")[0])
        assert "--hash=sha256:" in line, f"{requirement.name} has no hash"
        environment = {"python_version": "3.12", "python_full_version": "3.12.12", "platform_machine": "x86_64"}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            versions[requirement.name] = str(requirement.specifier).removeprefix("==")
    return versions


def bill_of_materials(image: str) -> dict[str, str]:
    """Name and version of its components."""
    done = subprocess.run(
        [ROOT / "scripts" / "lock", "--sbom", image],
        env={**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["bomFormat"] == "CycloneDX"
    assert {each["ref"] for each in found["dependencies"]} == {each["bom-ref"] for each in found["components"]}
    return {component["name"]: component["version"] for component in found["components"]}


def project() -> dict[str, object]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    loaded: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return loaded


every_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def test_there_are_images() -> None:
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "djl.Dockerfile", "trtllm.Dockerfile"]


@every_dockerfile
def test_lint(dockerfile: Path) -> None:
    done = subprocess.run([TOOLS / "hadolint", dockerfile], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts(script: Path) -> None:
    assert script.stat().st_mode & stat.S_IXUSR
    assert script.read_text().startswith("#!/bin/sh\n")
    done = subprocess.run([TOOLS / "shellcheck", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@every_dockerfile
def test_base_images_are_pinned(dockerfile: Path) -> None:
    stages: set[str] = set()
    for instruction in parse(dockerfile):
        if instruction.name != "FROM":
            continue
        image, *rest = instruction.words
        if image not in stages:
            assert re.search(r":v?\d+\.\d+\.\d+\S*$", image), f"{image} has no whole version"
        if rest:
            assert rest[0].upper() == "AS"
            stages.add(rest[1])


@every_dockerfile
def test_what_is_copied_is_there_and_sent_to_the_builder(dockerfile: Path) -> None:
    copied = 0
    for instruction in parse(dockerfile):
        if instruction.name != "COPY" or instruction.flag("from"):
            continue
        for source in instruction.words[:-1]:
            assert (ROOT / source).exists(), f"{source} is not in the checkout"
            files = [ROOT / source] if (ROOT / source).is_file() else list((ROOT / source).rglob("*"))
            names = [
                str(path.relative_to(ROOT)) for path in files if path.is_file() and "__pycache__" not in path.parts
            ]
            assert names and not [name for name in names if not is_sent(name)], (
                f"{source} is kept back by .dockerignore"
            )
            copied += 1
    assert copied


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv-test/bin/python",
        "tests/conftest.py",
        "docs/design.md",
        "docker/trtllm.Dockerfile",
        "serving/models/tiny-stories/config.json",
        "djl_trtllm/__pycache__/cli.cpython-312.pyc",
    ],
)
def test_the_builder_does_not_get(path: str) -> None:
    assert not is_sent(path)


@every_dockerfile
def test_what_sagemaker_reads(dockerfile: Path) -> None:
    stage = final_stage(dockerfile)
    by_name = {instruction.name: instruction.text for instruction in stage}
    assert 'com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true"' in by_name["LABEL"]
    assert 'com.amazonaws.sagemaker.capabilities.multi-models="true"' in by_name["LABEL"]
    # DJL Serving's front end has no WebSocket.
    bidirectional = 'com.amazonaws.sagemaker.capabilities.bidirectional-streaming="true"' in by_name["LABEL"]
    assert bidirectional == (dockerfile.name != "djl.Dockerfile")
    assert by_name["EXPOSE"] == "8080"
    assert by_name["CMD"] == '["serve"]'
    # A list: with a shell in between, SIGTERM would end that and not the server.
    assert by_name["ENTRYPOINT"].startswith("[") and by_name["ENTRYPOINT"].endswith('djl-trtllm-entrypoint"]')
    assert '"healthcheck"]' in by_name["HEALTHCHECK"]
    assert by_name["USER"] == "1000"


@every_dockerfile
def test_the_sources_are_the_last_layer(dockerfile: Path) -> None:
    stage = final_stage(dockerfile)
    copy, check = stage[-2:]
    assert (copy.name, copy.flag("from"), copy.words) == ("COPY", "package", ["/installed", "/"])
    assert check.name == "RUN" and "djl-trtllm" in check.text
    assert not [i for i in stage if i.name == "COPY" and "djl_trtllm" in i.words], "sources stay in their stage"
    assert not [i for i in parse(dockerfile) if i.flag("mount")], "Buildah 1.28 caches a mount whatever is in it"


@every_dockerfile
def test_where_tritons_launcher_is_there_is_grpc(dockerfile: Path) -> None:
    stage = final_stage(dockerfile)
    assert [i for i in stage if i.name == "COPY" and "scripts/launch_triton_server.py" in i.words]
    (install,) = (i.text for i in stage if i.name == "RUN" and "install.sh /" in i.text)
    assert install.partition("&&")[0].split()[-1] == "grpc"


@pytest.mark.parametrize(("image", "extras"), [("core", ["grpc", "otel"]), ("cpu", ["grpc", "otel", "cpu"])])
def test_an_image_gets_what_the_project_asks_for(image: str, extras: list[str]) -> None:
    locked, optional, dependencies = read_locked(image), project()["optional-dependencies"], project()["dependencies"]
    assert isinstance(optional, dict) and isinstance(dependencies, list)
    for line in [*dependencies, *(line for extra in extras for line in optional[extra])]:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"python_version": "3.12"}):
            continue
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"docker/requirements-{image}.txt lacks {requirement.name}"
        assert version in requirement.specifier, f"it has {version} where {line} is asked for"


def test_the_locked_files_are_up_to_date() -> None:
    project()
    done = subprocess.run(
        [ROOT / "scripts" / "lock", "--check"],
        env={**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stderr}\nscripts/lock writes them"


@pytest.mark.parametrize("image", LOCKED)
def test_the_bill_of_materials_has_what_the_image_gets(image: str) -> None:
    components = bill_of_materials(image)
    assert components == read_locked(image)


@pytest.mark.slow
def test_the_hashes_are_those_of_the_index(tmp_path: Path) -> None:
    uv("venv", "--quiet", "--python", sys.executable, tmp_path)
    install = ("pip", "install", "--quiet", "--dry-run", "--require-hashes", "--no-deps", "--python", tmp_path)
    uv(*install, "--requirement", LOCKED["cpu"], cwd=ROOT)


def test_no_package_of_the_image_moves(tmp_path: Path) -> None:
    """install.sh where an image has some of the packages, one of them from a file and one under its other spelling."""
    project()
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(
        f"""#!/bin/sh
case "$*" in
"-m pip list --format=freeze") printf 'transformers==4.57.1\\nPyYAML==6.0\\ntorch==2.9.1+cu130\\nhf_xet==1.0.0\\n' ;;
"-m pip install"*)
    shift 3
    for argument; do if [ -f "$argument" ]; then cat "$argument" >>"{tmp_path}/$(basename "$argument")"; fi; done
    echo "$@" >>"{tmp_path}/commands" ;;
*) exec {sys.executable} "$@" ;;
esac
"""
    )
    python.chmod(0o755)
    subprocess.run(
        [ROOT / "docker" / "install.sh", ROOT / "pyproject.toml", LOCKED["cpu"], "compile"],
        check=True,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
    )
    first, second = (tmp_path / "commands").read_text().splitlines()
    assert "--require-hashes" in first and "--constraint" in second
    assert "torch==2.9.1+cu130" in (tmp_path / "installed").read_text()
    there = ("transformers==", "pyyaml==", "hf-xet==")
    packages = re.split(r"^(?=\w)", LOCKED["cpu"].read_text(), flags=re.MULTILINE)
    assert len(packages) > 50
    expected = [package for package in packages if not package.startswith(there)]
    assert (tmp_path / "new").read_text() == "".join(expected), "the others, each with its hashes"
    requirements = (tmp_path / "requirements").read_text().splitlines()
    assert any(line.startswith("starlette") for line in requirements)
    assert any(line.startswith("openvino-genai") for line in requirements), "the extra that `compile` is made of"
    assert any(line.startswith("nncf") for line in requirements)
    assert not any(line.startswith("djl-trtllm") for line in requirements)
