"""The scripts of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tables import by_rows, by_table
from tests.support.uv import uv

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    [
        *(path for path in ROOT.glob("scripts/*") if path.suffix != ".py"),
        ROOT / ".ci" / "run",
        ROOT / "docker" / "verify",
    ]
)


@by_rows("script", SCRIPTS)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "--external-sources", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@by_table("uv", "message")
def test_a_lock_that_is_not_up_to_date_says_what_to_run(uv: str, message: str, tmp_path: Path) -> None:
    for folder in ("scripts", "docker", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts" / "lock", tmp_path / "scripts")
    for image in ("core", "cpu", "compile", "build"):
        (tmp_path / "docker" / f"requirements-{image}.txt").write_text("locked\n")
    program = tmp_path / "bin" / "uv"
    program.write_text(f"#!/bin/sh\n{uv}\n")
    program.chmod(0o755)
    path = f"{program.parent}:/usr/bin:/bin"
    done = subprocess.run(
        [tmp_path / "scripts" / "lock", "--check"], env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == bool(message)
    assert done.stderr.endswith(f"{message}\n" if message else "")
    assert done.stderr.count("run scripts/lock") == bool(message)


def test_an_environment_has_every_extra_that_is_asked_for(tmp_path: Path) -> None:
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text('#!/bin/sh\necho "$@"\n')
    uv.chmod(0o755)
    script = ". scripts/environment.sh; venv=$1 project=. extra=$2 sync_environment"
    done = {
        extra: subprocess.check_output(["sh", "-euc", script, "sh", tmp_path, extra], cwd=ROOT, text=True).split()[-2:]
        for extra in ("cpu,grpc", "--only-group=docs")
    }
    assert done["cpu,grpc"] == ["--extra=cpu", "--extra=grpc"]
    assert done["--only-group=docs"] == [f"{tmp_path}/bin/python", "--only-group=docs"]


# -- .ci/run -----------------------------------------------------------------------------------------------------------


def write_ci(folder: Path, **programs: str) -> None:
    """`.ci/run` in a folder, with `programs` in the place of those that it runs; the others do nothing."""
    programs = dict.fromkeys(("ruff", "mypy", "lint-imports"), "#!/bin/sh\n") | programs
    programs["python"] = '#!/bin/sh\necho "$@" >>calls\n'
    scripts = {f".venv-test-all/bin/{name}": text for name, text in programs.items()} | {"scripts/test": "#!/bin/sh\n"}
    for name, text in scripts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")


@pytest.mark.parametrize(("failing", "calls"), [("ruff", 0), ("mypy", 0), ("lint-imports", 0), ("", 2)])
def test_ci_runs_no_test_of_what_fails_a_check(failing: str, calls: int, tmp_path: Path) -> None:
    write_ci(tmp_path, **({failing: "#!/bin/sh\nexit 7\n"} if failing else {}))
    done = subprocess.run([tmp_path / ".ci" / "run", "-k", "some"], capture_output=True, text=True)
    assert done.returncode == (7 if failing else 0), done.stderr
    called = (tmp_path / "calls").read_text().splitlines() if calls else []
    assert called == ["-m tools.options_docs --check", "-m tools.run_tests -k some"][:calls]


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("assert False", 1), ("os._exit(9)", 2)])
def test_a_test_process_that_crashed_is_no_failed_test(end: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_one.py").write_text(f"import os\ndef test_it():\n    {end}\n")
    # Plugins of other packages would take seconds to load in both processes.
    options = ("-n", "1", "--max-worker-restart=0", "-p", "xdist", "-p", "tests.support.processes")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout
    assert "1 failed" in done.stdout


# -- what the project asks of other packages can be had by itself on each Python; beside engines: tests/docker ---------

# What TensorRT-LLM 1.2 pins of the packages that this project, or a package of its, asks for as well.
TENSORRT_LLM = (
    "datasets==3.1.0",
    "fastapi>=0.120.1,<=0.121.3",
    "numpy<2",
    "nvidia-ml-py>=13",
    "prometheus_client",
    "psutil",
    "pydantic>=2.9.1",
    "sentencepiece>=0.1.99",
    "starlette>=0.49.1",
    "torch==2.9.1",
    "transformers==4.57.3",
    "uvicorn",
)


def resolve(*arguments: str | Path, python: str) -> dict[str, str]:
    """Name and version of each package that would be installed; nothing is."""
    options = ("--quiet", "--no-header", "--no-annotate", "--python-platform", "x86_64-manylinux_2_28")
    lines = uv("pip", "compile", *options, "--python-version", python, *arguments, cwd=ROOT).splitlines()
    return dict(line.split("==") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.10", "3.13"])
def test_the_lowest_versions_go_together(python: str) -> None:
    chosen = resolve("--resolution", "lowest-direct", "--extra", "cpu", "pyproject.toml", python=python)
    assert chosen["transformers"].startswith("4.53."), "TensorRT-LLM 1.0's version is among those that are tried"


def test_an_upper_bound_has_its_reason_beside_it() -> None:
    """A bound is what keeps the package out of an image; uv.lock and the tests hold versions."""
    lines = (ROOT / "pyproject.toml").read_text().partition("[dependency-groups]")[0].splitlines()
    requirement = re.compile(r'"[a-z][^"]*(?:<|==|~=)\s*\d[^"]*"')
    bounded = [line for line in lines if any(";" not in found for found in requirement.findall(line))]
    assert len(bounded) > 3
    assert [line for line in bounded if "# " not in line] == []
    core = "\n".join(lines).partition("dependencies = [")[2].partition("\n]")[0]
    assert not [line for line in bounded if line in core]


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_the_ray_that_installs_beside_tensorrt_llm_is_the_one_that_its_page_names(python: str, tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("\n".join(TENSORRT_LLM))
    chosen = resolve("--extra", "ray", "pyproject.toml", pins, python=python)
    release = ".".join(chosen["ray"].split(".")[:2])
    assert f"`ray[serve]=={release}.*`" in (ROOT / "docs" / "ray.md").read_text()


@pytest.mark.slow
def test_alone_the_newest_ray_of_the_range_is_chosen() -> None:
    assert resolve("--extra", "ray", "pyproject.toml", python="3.12")["ray"].startswith("2.60.")
