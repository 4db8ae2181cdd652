"""What can be said of the images without building them (test_images.py builds them), and what stands beside engines."""

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

from tests.fakes.installation import fake_tensorrt_llm
from tests.support.uv import uv

ROOT = Path(__file__).parent.parent.parent
DOCKERFILES = sorted(ROOT.glob("docker/*.Dockerfile"))
SCRIPTS = sorted([*ROOT.glob("docker/*.sh"), *ROOT.glob("docker/djl/*.sh")])
LOCKED = {image: ROOT / "docker" / f"requirements-{image}.txt" for image in ("core", "cpu", "compile")}
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


def test_the_builder_gets_neither_tests_nor_documents_nor_what_was_made_here() -> None:
    others = [".git/config", ".venv-test/bin/python", "tests/conftest.py", "docs/design.md", "docker/trtllm.Dockerfile"]
    made = ["serving/models/tiny-stories/config.json", "djl_trtllm/__pycache__/cli.cpython-312.pyc"]
    assert [path for path in (*others, *made) if is_sent(path)] == []


@every_dockerfile
def test_hadolint_has_nothing_to_say(dockerfile: Path) -> None:
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
            pinned = re.search(r":v?\d+\.\d+\.\d+\S*@sha256:[0-9a-f]{64}$", image)
            assert pinned, f"{image} has no whole version, or no digest"
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
    assert [i for i in stage if i.name == "COPY" and "scripts/launch_triton_server.py" in i.words]
    (install,) = (i.text for i in stage if i.name == "RUN" and "install.sh /" in i.text)
    assert install.partition("&&")[0].split()[-1] == "grpc", "Triton's launcher needs it"
    assert not [i for i in parse(dockerfile) if i.flag("mount")], "Buildah 1.28 caches a mount whatever is in it"


@pytest.mark.parametrize(
    ("image", "extras"),
    [("core", ["grpc", "otel"]), ("cpu", ["grpc", "otel", "cpu"]), ("compile", ["grpc", "otel", "cpu", "compile"])],
)
def test_an_image_gets_what_the_project_asks_for(image: str, extras: list[str]) -> None:
    locked, optional, dependencies = read_locked(image), project()["optional-dependencies"], project()["dependencies"]
    assert isinstance(optional, dict) and isinstance(dependencies, list)
    for line in [*dependencies, *(line for extra in extras for line in optional[extra])]:
        requirement = Requirement(line)
        if requirement.name == "djl-trtllm":
            continue  # an extra of its own
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


@pytest.mark.parametrize("broken", [False, True])
def test_no_package_of_the_image_moves_that_is_new_enough(broken: bool, tmp_path: Path) -> None:
    """install.sh where an image has some packages, one from a file, one under its other spelling, one too old."""
    project()
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    there = (
        "transformers==4.57.1\\nPyYAML==6.0\\ntorch==2.9.1+cu130\\nhf_xet==1.0.0\\nuvicorn==0.40.0\\nFastAPI==0.121\\n"
    )
    python.write_text(
        f"""#!/bin/sh
case "$*" in
"-m pip list --format=freeze") printf '{there}' ;;
"-m pip check")
    echo "fastapi lacks another, as before"
    if [ -f "{tmp_path}/commands" ]; then echo "boto3 is new here and has requirement x"; fi
    if [ -f "{tmp_path}/commands" ] && {str(broken).lower()}; then echo "fastapi has requirement uvicorn<0.50"; fi ;;
"-m pip install"*)
    shift 3
    for argument; do if [ -f "$argument" ]; then cat "$argument" >>"{tmp_path}/$(basename "$argument")"; fi; done
    echo "$@" >>"{tmp_path}/commands" ;;
*) exec {sys.executable} "$@" ;;
esac
"""
    )
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "docker" / "install.sh", ROOT / "pyproject.toml", LOCKED["cpu"], "compile"],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (1 if broken else 0), done.stderr
    assert ("fastapi has requirement" in done.stdout) == broken
    assert "as before" not in done.stdout and "new here" not in done.stdout
    assert "replacing uvicorn 0.40.0" in done.stdout and done.stdout.count("replacing") == 1
    first, second = (tmp_path / "commands").read_text().splitlines()
    assert "--require-hashes" in first and "--constraint" in second and "--no-index" in second
    kept = (tmp_path / "kept").read_text()
    assert "torch==2.9.1+cu130" in kept and "uvicorn" not in kept
    packages = re.split(r"^(?=\w)", LOCKED["cpu"].read_text(), flags=re.MULTILINE)
    assert len(packages) > 50
    expected = [each for each in packages if not each.startswith(("transformers==", "pyyaml==", "hf-xet=="))]
    assert (tmp_path / "new").read_text() == "".join(expected), "the others, each with its hashes"
    requirements = (tmp_path / "requirements").read_text().splitlines()
    assert any(line.startswith("starlette") for line in requirements)
    assert any(line.startswith("openvino-genai") for line in requirements), "the extra that `compile` is made of"
    assert any(line.startswith("nncf") for line in requirements)
    assert not any(line.startswith("djl-trtllm") for line in requirements)


@every_dockerfile
def test_what_builds_the_package_has_locked_versions_and_hashes(dockerfile: Path) -> None:
    installs = [i.text for i in parse(dockerfile) if i.name == "RUN" and "pip install" in i.text]
    backend, package = installs
    assert "--require-hashes" in backend and "requirements-build.txt" in backend
    assert "--no-build-isolation" in package and "--no-deps" in package


def test_the_source_of_djl_serving_is_that_of_the_commit(tmp_path: Path) -> None:
    for part in ("wlm/src/main", "prometheus/src/main", "serving/src/main", "engines/python/src/main"):
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "engines" / "python" / "setup").mkdir()
    (tmp_path / "LICENSE").write_text("one")
    (tmp_path / "NOTICE").write_text("two")
    check: list[str | Path] = ["sh", ROOT / "docker" / "djl" / "check.sh", tmp_path]

    def run(digest: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*check, digest], capture_output=True, text=True)

    refused = run("0" * 64)
    assert refused.returncode == 1 and "0" * 64 in refused.stderr
    found = refused.stderr.split()[-1]
    assert run(found).returncode == 0
    (tmp_path / "wlm" / "src" / "main" / "Added.java").write_text("")
    assert run(found).returncode == 1


# -- docker/cut.py on a package that was made for it -------------------------------------------------------------------

CUT = Path(__file__).parents[2] / "docker" / "cut.py"
KEPT = ("transformers/__init__.py", "transformers/models/llama/__pycache__/configuration_llama.cpython-312.pyc")
CUT_AWAY = (
    "transformers/tests/test_all.py",
    "transformers/include/any.h",
    "transformers/models/llama/__pycache__/modeling_llama.cpython-312.pyc",
)


def install(site: Path, name: str, files: tuple[str, ...]) -> None:
    """A package with these files, as pip leaves it."""
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text("some text")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_what_no_image_runs_is_removed_from_the_packages_that_the_file_names(tmp_path: Path) -> None:
    install(tmp_path, "transformers", KEPT + CUT_AWAY)
    install(tmp_path, "other", ("other/tests/test_it.py",))
    locked = tmp_path / "locked.txt"
    # A package may have a line for each Python, and be missing on this one.
    locked.write_text(
        "transformers==1.0 ; python_version < '3.11' \\\n    --hash=sha256:00\ntransformers==1.0\nno-such==1\n"
    )
    # Without site-packages: those of the tests stay whole.
    done = subprocess.run(
        [sys.executable, "-S", CUT, locked],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [file for file in KEPT + CUT_AWAY if (tmp_path / file).exists()] == list(KEPT)
    assert (tmp_path / "other" / "tests" / "test_it.py").exists()
    assert done.stdout == "cut 0.0 MB of transformers\n"


# -- installed beside TensorRT-LLM and vLLM ----------------------------------------------------------------------------


IMAGES = sorted((Path(__file__).parent / "beside").glob("*.txt"))
REFERENCE = next(image for image in IMAGES if image.stem == "tensorrt-llm-1.2.1")
INSTALLED = [image for image in IMAGES if image.stem in ("tensorrt-llm-1.0", "tensorrt-llm-1.4.0rc1", "vllm-0.33")]
"""The first and the last. Of those between, the pins are resolved, which takes a tenth of the time."""
REPLACED = {"uvicorn"}
"""What the project needs newer than some images have it; no engine pins it."""
VERIFYING = re.findall(r"'(.+?>=.+?)'", (ROOT / "docker" / "verify").read_text())
"""What docker/verify installs besides, for tests."""
IMPORTS = """
import pkgutil, sys
import djl_trtllm
# What other extras, and DJL, bring.
without = ("openvino", "cluster", "__main__", "handler", "async_handler")
for module in pkgutil.walk_packages(djl_trtllm.__path__, "djl_trtllm."):
    if not any(f".{name}" in module.name for name in without):
        __import__(module.name)
from tools.tensorrt_llm.check import main
sys.exit(main(["--installed"]))
"""

since_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="install.sh needs tomllib")
every_image = pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)


@pytest.mark.slow
@since_3_11
@every_image
def test_what_the_project_asks_for_goes_together_with_the_pins_of_an_engine(image: Path, tmp_path: Path) -> None:
    pins = [line for line in image.read_text().splitlines() if not line.startswith("#") and "# any" not in line]
    assert len(pins) > 2
    (tmp_path / "pins.txt").write_text("\n".join(pins))
    options = ("--quiet", "--no-header", "--no-annotate", "--python-version", "3.12", "--extra=otel", "--extra=grpc")
    (tmp_path / "tools.txt").write_text("\n".join(VERIFYING))
    files = ("pyproject.toml", tmp_path / "pins.txt", tmp_path / "tools.txt")
    resolved = uv("pip", "compile", *options, *files, cwd=ROOT).splitlines()
    assert {"javaproperties", "boto3", "hypothesis"} <= {Requirement(line).name for line in resolved}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the packages of one image after the other: what they share is compiled once."""
    environment = tmp_path_factory.mktemp("beside") / "environment"
    uv("venv", "--quiet", "--seed", "--python", sys.executable, environment)
    return environment


class Container:
    """The packages of an image, and no others, in an environment where commands see a TensorRT-LLM."""

    def __init__(self, image: Path, directory: Path, environment: Path) -> None:
        self.directory = directory
        self._environment = environment
        # `--upgrade`: as in a new environment, and not the versions that the image before this one had.
        self.install("--exact", "--upgrade", "--requirement", image, "pip")
        version = image.stem.removeprefix("tensorrt-llm-") if "tensorrt" in image.stem else "1.2.1"
        fake = fake_tensorrt_llm(directory, version="1.0.0" if version == "1.0" else version)
        environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        self._site = fake["PYTHONPATH"].split(":")[0]
        self._environ = {**environ, **fake, "PATH": f"{self._environment / 'bin'}:/usr/bin:/bin"}
        self._before = self._installed()

    def install(self, *what: str | Path) -> None:
        uv("pip", "install", "--quiet", "--python", self._environment, *what)

    def run(self, *command: str | Path, path: str = "", expect: tuple[int, ...] = (0,), **more: str) -> str:
        environ = {**self._environ, "PYTHONPATH": f"{path}:{self._site}" if path else self._site, **more}
        done = subprocess.run(command, cwd=self.directory, env=environ, capture_output=True, text=True)
        assert done.returncode in expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    def check(self, said: str) -> None:
        """The image's packages are as they were, and the project works beside them; `said` was said by install.sh."""
        after = self._installed()
        moved = {name for name, had in self._before.items() if after[name] != had}
        assert moved <= REPLACED and all(f"replacing {name} " in said for name in moved)
        # The fake differs from the table of names in what needs a GPU or C++ code.
        assert " equal, " in self.run("python3", "-c", IMPORTS, path=str(ROOT), expect=(0, 1))
        # The contract tests are read, and not run.
        test, tests = "test_ids_equal_those_of_sentencepiece", ROOT / "tests"
        pytest_here = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", test)
        ran = self.run(*pytest_here, tests / "model" / "test_tokenizer.py", tests / "trtllm", path=str(ROOT))
        assert " passed" in ran and " deselected" in ran, ran

    def _installed(self) -> dict[str, str]:
        listed = json.loads(uv("pip", "list", "--format=json", "--python", self._environment))
        return {package["name"]: package["version"] for package in listed}


@pytest.mark.slow
@since_3_11
@pytest.mark.parametrize("image", INSTALLED, ids=lambda path: path.stem)
def test_an_image_gets_the_project_and_keeps_its_packages(image: Path, environment: Path, tmp_path: Path) -> None:
    container = Container(image, tmp_path, environment)
    docker = ROOT / "docker"
    said = container.run(
        docker / "install.sh", ROOT / "pyproject.toml", docker / "requirements-core.txt", "otel", "grpc"
    )
    container.install(*VERIFYING)
    container.check(said)


@pytest.mark.slow
@since_3_11
def test_an_image_is_verified(environment: Path, tmp_path: Path) -> None:
    """The tests and the first start of docker/verify run inside the container."""
    container = Container(REFERENCE, tmp_path, environment)
    said = container.run(ROOT / "docker" / "verify", "--inside", expect=(0, 1), PYTEST_ARGUMENTS="--collect-only")
    assert " equal, " in said and "tests collected" in said, said
    assert json.loads((tmp_path / "first-start.json").read_text())["passed"], said
    # The checkout that was verified is gone.
    container.check(said)
