"""The images, built on stand-ins for their bases and run as SageMaker runs containers.

They take ten minutes, and run only where DJL_TRTLLM_IMAGES names a folder, which keeps them for the next run.
DJL_SERVING names a checkout of DJL Serving.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.utils import canonicalize_name

from tests.docker.test_dockerfiles import bill_of_materials
from tests.support.client import JSON, body
from tests.support.processes import wait_until
from tests.support.sagemaker_front import runtime_of
from tests.support.server import START_SECONDS, free_port
from tools.images import contents, stand_ins
from tools.images.__main__ import IMAGES, MODEL, ROOT, Builder
from tools.images.engine import Container, find_podman
from tools.images.source import served_source

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif("DJL_TRTLLM_IMAGES" not in os.environ, reason="DJL_TRTLLM_IMAGES names no folder for images"),
    pytest.mark.skipif(stand_ins.missing() is not None, reason=f"no images here: {stand_ins.missing()}"),
]

CPU, TRTLLM, DJL = IMAGES["cpu"], IMAGES["trtllm"], IMAGES["djl"]
# What the server needs: docs/deploying.md says that it is no more.
LOCKED_DOWN = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges")
MOUNTED = (f"--volume={MODEL}:/opt/ml/model:ro",)
STOP_SECONDS = 120


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    """With the CPU's image built."""
    with contextlib.ExitStack() as stack:
        engine = find_podman(Path(os.environ["DJL_TRTLLM_IMAGES"]))
        checkout = os.environ.get("DJL_SERVING")
        builder = Builder(engine, True, stack.enter_context(served_source(Path(checkout) if checkout else None)))
        builder.build("cpu")
        yield builder


@contextlib.contextmanager
def serving(
    builder: Builder, image: str = CPU, *options: str, command: str = "serve", **environ: str
) -> Iterator[tuple[Container, httpx.Client]]:
    """A container that answers /ping with 200, on a port that SageMaker chose, and a client of it."""
    port = free_port()
    given = {"SAGEMAKER_BIND_TO_PORT": str(port), "SAGEMAKER_SAFE_PORT_RANGE": "21000-21999", **environ}
    variables = [f"--env={name}={value}" for name, value in given.items()]
    options = (*(options or MOUNTED), *LOCKED_DOWN, *variables, f"--publish=127.0.0.1:{port}:{port}")
    with (
        builder.engine.started(image, command, options=options) as container,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False) as client,
    ):

        def ready() -> bool:
            assert container.running(), container.log()
            with contextlib.suppress(httpx.TransportError):
                return client.get("/ping").status_code == 200
            return False

        wait_until(ready, START_SECONDS, "/ping 200")
        yield container, client


def ended(builder: Builder, image: str = CPU, *options: str, command: str = "serve") -> tuple[int, str]:
    """Exit status and output of a container that ends by itself."""
    with builder.engine.started(image, command, options=(*LOCKED_DOWN, *options)) as container:
        wait_until(lambda: not container.running(), START_SECONDS, "the container's end")
        return container.status(), container.log()


def stop(builder: Builder, container: Container) -> int:
    """Exit status after SIGTERM, which only the container's first process gets."""
    builder.engine.run("kill", "--signal=TERM", container.name)
    wait_until(lambda: not container.running(), STOP_SECONDS, "the end after SIGTERM")
    return container.status()


# -- what is in them ---------------------------------------------------------------------------------------------------


def test_nothing_is_in_the_image_but_what_runs(builder: Builder) -> None:
    (base,) = stand_ins.bases(ROOT / "docker" / "cpu.Dockerfile")
    own = contents.added(builder.engine.files(CPU), builder.engine.files(base))
    assert contents.unwanted(own) == {}
    assert any(path.endswith("/djl_trtllm/cli.py") for path in own)


def packages(builder: Builder, image: str) -> dict[str, str]:
    """Name and version of the Python packages in an image."""
    options = (*builder.engine.options, "--rm", "--network=none", "--entrypoint=python3")
    listed = builder.engine.run("run", *options, image, "-m", "pip", "list", "--format=json").stdout
    return {canonicalize_name(package["name"]): package["version"] for package in json.loads(listed)}


def test_the_image_has_the_packages_of_its_bill_of_materials_and_no_others(builder: Builder) -> None:
    there = packages(builder, CPU)
    assert there.keys() >= {"pip", "djl-trtllm"}
    assert {name: version for name, version in there.items() if name not in ("pip", "djl-trtllm")} == bill_of_materials(
        "cpu"
    )


def test_a_changed_source_line_is_in_the_next_image_and_installs_no_dependency_again(builder: Builder) -> None:
    built = builder.build("cpu")
    assert built.cached == built.steps, "nothing changed"
    again = builder.rebuild("cpu")
    # What copies the sources, builds them, copies the result, and starts it once.
    assert again.cached == again.steps - 4, again.output
    assert "Downloading openvino" not in again.output
    program = "import djl_trtllm.version as it; print(open(it.__file__).read().splitlines()[-1])"
    shown = builder.engine.run("run", "--rm", *builder.engine.options, CPU, "python3", "-c", program).stdout
    assert shown.startswith("# "), "the line that was added"
    builder.build("cpu")


# -- SageMaker's contract ----------------------------------------------------------------------------------------------


def test_the_requests_of_the_documents(builder: Builder) -> None:
    # Options of the documents on max_num_tokens and on runtime options.
    environ = {"OPTION_MAX_NUM_TOKENS": "2048", "OPTION_BATCH_SCHEDULER_POLICY": "max_utilization"}
    environ |= {"OPTION_MAX_ROLLING_BATCH_SIZE": "16", "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "60"}
    with serving(builder, **environ) as (container, client), runtime_of(str(client.base_url)) as runtime:
        assert container.execute("/usr/local/bin/djl-trtllm-entrypoint", "healthcheck").returncode == 0
        assert container.execute("id", "-u").stdout == "1000\n"

        def arguments(**request: object) -> dict[str, Any]:
            return {"EndpointName": "any", "ContentType": "application/json", "Body": json.dumps(request)}

        # lmi-trt-llm.md
        asked: dict[str, Any] = {
            "inputs": "tell me a story of the little red riding hood",
            "parameters": {"max_new_tokens": 128, "do_sample": True},
        }
        answer = runtime.invoke_endpoint(**arguments(**asked))
        assert answer["ContentType"] == "application/json"
        assert json.loads(answer["Body"].read())["generated_text"]
        streamed = runtime.invoke_endpoint_with_response_stream(**arguments(**asked, stream=True))
        lines = b"".join(event["PayloadPart"]["Bytes"] for event in streamed["Body"]).splitlines()
        tokens = [json.loads(line) for line in lines]
        assert "".join(line["token"]["text"] for line in tokens) == tokens[-1]["generated_text"]
        # useful-runtime-options.md
        for prompt in ("Hello, I am", "The capital of France is", "The future of AI is"):
            parameters = {"temperature": 0.8, "top_p": 0.95, "do_sample": True}
            answer = runtime.invoke_endpoint(**arguments(inputs=prompt, parameters=parameters))
            assert json.loads(answer["Body"].read())["generated_text"]
        # triton-llama-workflow.md
        asked = {"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "", "stop_words": ""}
        answered = client.post("/v2/models/ensemble/generate", json={**asked, "pad_id": 2, "end_id": 2})
        assert answered.status_code == 200 and answered.json()["text_output"]
        # truss-trt-llm.md
        asked = {"prompt": "Once upon a time", "max_tokens": 20, "beam_width": 1, "bad_words_list": []}
        answered = client.post("/predict", json={**asked, "stop_words_list": [], "repetition_penalty": 1.0})
        assert answered.status_code == 200 and answered.text
        # The log is in CloudWatch.
        assert "POST /invocations" in container.log() or "/endpoints/any/invocations" in container.log()


def test_sigterm_ends_with_0_after_the_streams_that_run(builder: Builder) -> None:
    with serving(builder) as (container, client):
        lines: list[str] = []
        begun = threading.Event()

        def read() -> None:
            with client.stream(
                "POST", "/invocations", content=body(200, stream=True, min_new_tokens=200), headers=JSON
            ) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(START_SECONDS)
        assert stop(builder, container) == 0, container.log()
        reader.join(STOP_SECONDS)
        assert len(lines) == 200 and "generated_text" in json.loads(lines[-1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*MOUNTED, "--volume=FOLDER:/tmp/.djl.ai"), ("/tmp/.djl.ai", "DJL_CACHE_DIR", "uid 1000", "chown -R 1000")),
        (("--volume=FOLDER:/opt/ml/model:ro",), ("/opt/ml/model (model) cannot be read by uid 1000",)),
        ((*MOUNTED, "--memory=120m"), ("120 MiB of memory",)),
        ((*MOUNTED, "--env=OPTION_MAX_ROLLING_BATCH_SIZE=many"), ("OPTION_MAX_ROLLING_BATCH_SIZE", "many")),
        ((), ("/opt/ml/model",)),
    ],
    ids=["a mount that cannot be written", "an unreadable model", "too little memory", "a wrong option", "no model"],
)
def test_a_start_that_cannot_be(
    options: tuple[str, ...], words: tuple[str, ...], builder: Builder, tmp_path: Path
) -> None:
    # Root alone may read the folder when it is mounted as the model.
    tmp_path.chmod(0o700 if options[:1] == ("--volume=FOLDER:/opt/ml/model:ro",) else 0o755)
    status, log = ended(builder, CPU, *(option.replace("FOLDER", str(tmp_path)) for option in options))
    assert status != 0
    assert "Traceback" not in log
    for word in words:
        assert word in log


def test_a_user_that_the_image_does_not_have(builder: Builder) -> None:
    with serving(builder, CPU, *MOUNTED, "--user=4711:4711") as (container, client):
        assert client.post("/invocations", content=body(4), headers=JSON).status_code == 200
        assert stop(builder, container) == 0


# -- on TensorRT-LLM ---------------------------------------------------------------------------------------------------


def test_on_tensorrt_llm_nothing_is_in_the_image_but_what_runs(builder: Builder) -> None:
    builder.build("trtllm")
    (base,) = stand_ins.bases(ROOT / "docker" / "trtllm.Dockerfile")
    own = contents.added(builder.engine.files(TRTLLM), builder.engine.files(base))
    # Packages that are not cut there, because most of them are the base's.
    unwanted = {path for path in contents.unwanted(own) if "/site-packages/" not in path}
    assert unwanted == set()


def test_on_tensorrt_llm_the_bases_packages_stay_and_the_others_are_those_of_the_bill_of_materials(
    builder: Builder,
) -> None:
    builder.build("trtllm")
    (base,) = stand_ins.bases(ROOT / "docker" / "trtllm.Dockerfile")
    below, there = packages(builder, base), packages(builder, TRTLLM)
    assert {name: there.get(name) for name in below} == below
    bill = bill_of_materials("core")
    new = {name: version for name, version in there.items() if name not in below and name != "djl-trtllm"}
    assert new == {name: version for name, version in bill.items() if name not in below}


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[str, ...]:
    """The mount of a checkpoint alone, of which the image decides what serves it."""
    tmp_path.chmod(0o755)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path)
    return (f"--volume={tmp_path}:/opt/ml/model:ro",)


def test_on_tensorrt_llm_a_checkpoint_is_compiled_and_served(builder: Builder, checkpoint: tuple[str, ...]) -> None:
    builder.build("trtllm")
    with serving(builder, TRTLLM, *checkpoint, OPTION_BACKEND="tensorrt") as (container, client):
        assert client.post("/invocations", content=body(4), headers=JSON).json()["generated_text"]
        assert "backend tensorrt" in container.log()
        assert stop(builder, container) == 0


@pytest.mark.skipif("DJL_SERVING" not in os.environ, reason="DJL_SERVING names no checkout of DJL Serving")
def test_under_djl_serving_a_checkpoint_is_served(
    builder: Builder, checkpoint: tuple[str, ...], tmp_path: Path
) -> None:
    builder.build("djl")
    # DJL Serving takes a folder for a model of its Python engine if there is a serving.properties.
    (Path(checkpoint[0].removeprefix("--volume=").partition(":")[0]) / "serving.properties").write_text(
        "engine=Python\n"
    )
    with serving(builder, DJL, *checkpoint) as (container, client):
        assert client.post("/invocations", content=body(4), headers=JSON).json()["generated_text"]
        assert container.execute("/usr/local/bin/djl-trtllm-entrypoint", "healthcheck").returncode == 0
        # Java's own status for SIGTERM.
        assert stop(builder, container) == 143
