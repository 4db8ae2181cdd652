"""Every command of every tutorial, as it is written and in the order of the page (see tests/support/tutorial.py)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.sagemaker_front import sagemaker
from tests.support.server import environment, free_port
from tests.support.tables import by_table
from tests.support.tutorial import ROOT, Reader, make_clone, prints, steps

TUTORIALS = ROOT / "docs" / "tutorials"
HTTP = {8080: "SERVING_INFERENCE_PORT"}
DJL = {8080: "SERVING_PORT"}
TRITON = {
    **HTTP,
    8000: "SERVING_TRITON_HTTP_PORT",
    8001: "SERVING_TRITON_GRPC_PORT",
    8002: "SERVING_TRITON_METRICS_PORT",
}
"""The ports of a page, and the variables that change them."""
DJL_SERVING = os.environ.get("DJL_SERVING", "")
"""A checkout of DJL Serving: no registry has its front end."""

Read = Callable[..., None]


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Read]:
    """`read(name, ports, **environ)`: do what a tutorial says, on ports that are free."""
    readers = []

    def read_one(name: str, variables_of: dict[int, str], **environ: str) -> None:
        ports = {port: free_port() for port in variables_of}
        variables = {variable: str(ports[port]) for port, variable in variables_of.items()}
        reader = Reader(make_clone(tmp_path / "clone"), environment(tmp_path, **variables, **environ), ports)
        readers.append(reader)
        reader.read((TUTORIALS / f"{name}.md").read_text())

    yield read_one
    for reader in readers:
        reader.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "ports"), [("laptop", HTTP), ("triton", TRITON), ("truss", HTTP)])
def test_it_works_as_written(read: Read, name: str, ports: dict[int, str]) -> None:
    read(name, ports)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sagemaker_works_as_written(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The account is moto's, and the endpoint a server that is started as SageMaker does."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with sagemaker(tmp_path / "instances") as aws:
        assert aws.role in (TUTORIALS / "sagemaker.md").read_text()
        read("sagemaker", HTTP, **aws.variables())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not DJL_SERVING or not shutil.which("mvn"), reason="$DJL_SERVING names no checkout, or no Maven")
def test_djl_serving_works_as_written(read: Read, tmp_path: Path) -> None:
    (tmp_path / "djl-serving").symlink_to(Path(DJL_SERVING).resolve())
    read("djl-serving", DJL)


def test_every_tutorial_is_tried() -> None:
    tried = {"laptop", "triton", "truss", "sagemaker", "djl-serving"}
    assert {path.stem for path in TUTORIALS.glob("*.md")} == tried


def test_every_command_of_a_page_is_one_of_its_steps() -> None:
    for path in TUTORIALS.glob("*.md"):
        page = path.read_text()
        assert page.count("```sh") == len(steps(page)) > 3, path


@by_table("shown", "output", "same")
def test_an_output_is_compared_with_what_the_page_shows(shown: str, output: str, same: bool) -> None:
    assert prints(shown, output) is same
