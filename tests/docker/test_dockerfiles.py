"""What can be said of the images without building them: no Docker engine is needed here."""

from __future__ import annotations

import fnmatch
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
PINS = ROOT / "docker" / "pins.txt"
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


def read_pins() -> dict[str, str]:
    lines = [line.partition(";")[0].strip() for line in PINS.read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines if line)
    assert len(pins) == len([line for line in lines if line])
    return pins


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
def test_the_dependencies_are_a_layer_below_the_sources(dockerfile: Path) -> None:
    stage = final_stage(dockerfile)
    runs = [instruction.text for instruction in stage if instruction.name == "RUN"]
    assert "install.sh /" in runs[0] and "from=wheel" in runs[1]
    assert not [i for i in stage if i.name == "COPY" and "djl_trtllm" in i.words], "sources stay in the wheel's stage"


def test_the_pins_are_what_the_project_asks_for() -> None:
    pins = read_pins()
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    dependencies = project()["dependencies"]
    assert isinstance(dependencies, list)
    for line in [*dependencies, *extras["cpu"]]:
        requirement = Requirement(line)
        # The images have Python 3.12, as the pins are made for.
        if requirement.marker is not None and not requirement.marker.evaluate({"python_version": "3.12"}):
            continue
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"docker/pins.txt lacks {requirement.name}"
        assert version in requirement.specifier, f"docker/pins.txt has {version} where {line} is asked for"


@pytest.mark.slow
def test_the_pins_can_be_installed(tmp_path: Path) -> None:
    out = tmp_path / "resolved"
    command = ["pip", "compile", "--quiet", "--python-version", "3.12", "--universal", "--constraint", str(PINS)]
    uv(*command, "--extra", "cpu", "--no-header", "--no-annotate", "--output-file", out, "pyproject.toml", cwd=ROOT)
    resolved = {line.partition(";")[0].strip() for line in out.read_text().splitlines()}
    assert resolved == {f"{name}=={version}" for name, version in read_pins().items()}


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
    while [ $# -gt 0 ]; do cat "$2" >>"{tmp_path}/$(basename "$2")"; shift 2; done ;;
*) exec {sys.executable} "$@" ;;
esac
"""
    )
    python.chmod(0o755)
    subprocess.run(
        [ROOT / "docker" / "install.sh", ROOT / "pyproject.toml", PINS, "compile"],
        check=True,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
    )
    assert "torch==2.9.1+cu130" in (tmp_path / "installed").read_text()
    pins = (tmp_path / "pins").read_text()
    assert "boto3==" in pins
    assert not re.search(r"^(transformers|pyyaml|hf-xet)==", pins, re.MULTILINE)
    requirements = (tmp_path / "requirements").read_text().splitlines()
    assert any(line.startswith("starlette") for line in requirements)
    assert any(line.startswith("openvino-genai") for line in requirements), "the extra that `compile` is made of"
    assert any(line.startswith("nncf") for line in requirements)
    assert not any(line.startswith("djl-trtllm") for line in requirements)


# -- docs/deploying.md -------------------------------------------------------------------------------------------------

DEPLOYING = (ROOT / "docs" / "deploying.md").read_text()


def test_the_document_names_what_is_there() -> None:
    for name in set(re.findall(r"(?:-f |`)(docker/[\w./]+|serving/[\w./]+)", DEPLOYING)):
        assert (ROOT / name).exists(), name
    bases = {
        instruction.words[0].removeprefix("docker.io/library/")
        for dockerfile in DOCKERFILES
        for instruction in final_stage(dockerfile)
        if instruction.name == "FROM"
    }
    for base in bases:
        assert f"`{base}`" in DEPLOYING


def test_the_document_quotes_the_entry_point() -> None:
    """The line on a mount that cannot be written."""
    script = (ROOT / "docker" / "entrypoint.sh").read_text()
    assert '"cache: DJL_CACHE_DIR"' in script
    assert "(cache: DJL_CACHE_DIR) cannot be written by uid 1000. If it is a mount:" in DEPLOYING


def test_the_calls_of_the_document_are_calls_of_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and values as botocore knows them; nothing is sent."""
    import boto3
    from botocore.validate import ParamValidator

    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("sagemaker", aws_access_key_id="test", aws_secret_access_key="test")
    called = []

    class Client:
        def __getattr__(self, method: str) -> object:
            if method == "get_waiter":
                return lambda name: type("Waiter", (), {"wait": lambda _, **arguments: client.get_waiter(name)})()

            def call(**arguments: object) -> None:
                operation = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method])
                report = ParamValidator().validate(arguments, operation.input_shape)
                assert not report.has_errors(), report.generate_report()
                called.append(method)

            return call

    blocks = re.findall(r"```python\n(.*?)```", DEPLOYING, re.DOTALL)
    monkeypatch.setattr(boto3, "client", lambda name: Client())
    names: dict[str, object] = {}
    for block in blocks:
        if "sagemaker-runtime" not in block:
            exec(block, names)
    assert called == [
        *("create_model", "create_endpoint_config", "create_endpoint"),
        *("delete_endpoint", "delete_endpoint_config", "delete_model"),
    ]
    variant = client.meta.service_model.shape_for("ProductionVariantInferenceAmiVersion")
    found = re.search(r'"InferenceAmiVersion": "([\w-]+)"', DEPLOYING)
    assert found and found[1] in variant.enum
