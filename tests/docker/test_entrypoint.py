"""docker/entrypoint.sh as a real process, with the environment that SageMaker gives a container and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.support.client import JSON, body
from tests.support.models import scripted_model, without_sagemakers_model
from tests.support.processes import wait_until
from tests.support.server import START_SECONDS, Certificates, free_port
from tests.support.tables import by_table

ENTRYPOINT = Path(__file__).parent.parent.parent / "docker" / "entrypoint.sh"
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"
NOBODY = 65534
USER = os.geteuid() or NOBODY
"""Somebody whom permissions hold, as they do not hold root."""

needs_root = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")


@pytest.fixture
def image() -> Iterator[Path]:
    """A folder that every user can read, with the entry point in it and a place for caches."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    shutil.copy(ENTRYPOINT, root / "entrypoint")
    yield root
    for folder in filter(Path.is_dir, root.iterdir()):
        folder.chmod(0o755)
    shutil.rmtree(root)


def variables(image: Path, **more: str) -> dict[str, str]:
    return {
        "PATH": PATH,
        "HOME": str(image),
        "DJL_CACHE_DIR": str(image / "cache"),
        "HF_HOME": str(image / "huggingface"),
        **more,
    }


def run(
    image: Path, *command: str, environ: Mapping[str, str], before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    words = [*before, str(image / "entrypoint"), *command]
    return subprocess.run(words, env=environ, cwd=image, capture_output=True, text=True, timeout=300)


def as_user(image: Path, *command: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root needs setpriv to run it as another user")
    other = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
    return run(image, *command, environ=environ, before=other if os.geteuid() == 0 else ())


def echoing(image: Path, name: str) -> str:
    """A PATH on which the command `name` prints its arguments and its environment."""
    script = image / "bin" / name
    script.parent.mkdir(exist_ok=True)
    script.write_text('#!/bin/sh\nprintf "<%s>" "$@"\necho\nenv\n')
    script.chmod(0o755)
    return f"{script.parent}:{PATH}"


def exported(output: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in output.splitlines() if "=" in line and not line.startswith("<"))


@contextlib.contextmanager
def started(command: list[str], environ: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environ, cwd=log.parent, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class Pinged(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ping" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def check_served(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """/ping becomes 200, a request is answered, SIGTERM reaches the server itself."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False) as client:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(httpx.TransportError):
                return client.get("/ping").status_code == 200
            return False

        wait_until(ready, START_SECONDS, "/ping 200")
        answer = client.post("/invocations", content=body(4), headers=JSON)
        assert answer.status_code == 200 and answer.json()["generated_text"]
        healthy = subprocess.run(
            [ENTRYPOINT, "healthcheck"], env={"PATH": PATH, "SAGEMAKER_BIND_TO_PORT": str(port)}, timeout=300
        )
        assert healthy.returncode == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0, log.read_text()


# -- serve -------------------------------------------------------------------------------------------------------------


@without_sagemakers_model
def test_serve(image: Path) -> None:
    port = free_port()
    model = scripted_model(image / "scripted")
    environ = variables(image, SAGEMAKER_BIND_TO_PORT=str(port), HF_MODEL_ID=str(model))
    log = image / "log"
    with started([str(image / "entrypoint"), "serve"], environ, log) as process:
        check_served(process, port, log)


def test_without_arguments_it_serves(image: Path) -> None:
    done = run(image, environ=variables(image, PATH=echoing(image, "djl-trtllm")))
    assert done.stdout.startswith("<serve>\n"), done


@needs_root
def test_the_model_that_sagemaker_mounts(image: Path) -> None:
    """In a mount namespace with an /opt of its own, since the place is SageMaker's and no option's."""
    port = free_port()
    model = scripted_model(image / "scripted")
    mounting = f"mount -t tmpfs none /opt && mkdir -p /opt/ml && ln -s '{model}' /opt/ml/model"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mounting], capture_output=True).returncode != 0:
        pytest.skip("mount namespaces are not allowed here")
    environ = variables(image, SAGEMAKER_BIND_TO_PORT=str(port), SM_NUM_GPUS="0")
    shell = f"{mounting} && exec '{image / 'entrypoint'}' serve"
    log = image / "log"
    with started(["unshare", "--mount", "sh", "-c", shell], environ, log) as process:
        check_served(process, port, log)


@pytest.mark.parametrize("answers", ["no server", "with tls", "with tls for known clients"])
def test_the_healthcheck_fails_without_a_server_and_follows_its_tls(answers: str, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    environ = {"PATH": PATH, "SERVING_CERTIFICATE_FILE": str(certificates.certificate)}
    if answers.endswith("clients"):
        environ["SERVING_CLIENT_CA_FILE"] = str(certificates.authority)
    with ThreadingHTTPServer(("127.0.0.1", 0), Pinged) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = free_port() if answers == "no server" else server.server_port
        environ["SERVING_INFERENCE_PORT"] = str(port)
        done = subprocess.run([ENTRYPOINT, "healthcheck"], env=environ, capture_output=True, timeout=300, text=True)
        server.shutdown()
    assert (done.returncode == 0) == (answers != "no server"), done.stderr


# -- other commands ----------------------------------------------------------------------------------------------------


def test_a_command_is_run_as_given_and_its_status_kept(image: Path) -> None:
    done = run(image, "/bin/sh", "-c", 'echo "$0 $1"; exit 7', "two words", "*", environ=variables(image))
    assert (done.returncode, done.stdout, done.stderr) == (7, "two words *\n", "")


def test_neo_compiles_whatever_the_command_is(image: Path) -> None:
    environ = variables(
        image,
        PATH=echoing(image, "djl-trtllm"),
        SM_NEO_EXECUTION_CONTEXT="true",
        SM_NEO_COMPILED_MODEL_DIR=str(image / "compiled"),
    )
    done = run(image, "serve", environ=environ)
    assert done.stdout.startswith("<compile>\n"), done
    assert (image / "compiled").is_dir()


def test_neo_in_the_whole(image: Path) -> None:
    """Its errors get where Neo looks for them."""
    (image / "input").mkdir()
    errors = image / "errors" / "errors.json"
    environ = variables(
        image,
        SM_NEO_EXECUTION_CONTEXT="true",
        SM_NEO_INPUT_MODEL_DIR=str(image / "input"),
        SM_NEO_COMPILED_MODEL_DIR=str(image / "compiled"),
        SM_NEO_COMPILATION_ERROR_FILE=str(errors),
    )
    done = run(image, "serve", environ=environ)
    assert done.returncode == 1
    assert '"error"' in errors.read_text()


def test_partition_takes_the_old_arguments_and_is_that_of_a_training_job_without_a_model(image: Path) -> None:
    environ = variables(image, PATH=echoing(image, "djl-trtllm"))
    flags = ["--model-id", "org/model", "--skip-copy", "--quantization", "awq", "--tensor-parallel-degree", "4"]
    done = run(image, "partition", *flags, "--save-mp-checkpoint-path", "/out", environ=environ)
    assert done.stdout.startswith("<compile><org/model></out>\n"), done
    assert {"TENSOR_PARALLEL_DEGREE": "4", "OPTION_QUANTIZE": "awq"}.items() <= exported(done.stdout).items()
    for verb in ("partition", "train"):
        done = run(image, verb, "--save-mp-checkpoint-path", "s3://bucket/engine", environ=environ)
        assert done.stdout.startswith("<compile></opt/ml/input/data/training><s3://bucket/engine>\n"), done


@by_table("arguments", "message", apart=True)
def test_partition_that_cannot_be(image: Path, arguments: list[str], message: str) -> None:
    done = run(image, "partition", *arguments, environ=variables(image))
    assert done.returncode == 1 and message in done.stderr


# -- other users -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DJL_CACHE_DIR", "HF_HOME"])
def test_a_mount_that_cannot_be_written(image: Path, name: str) -> None:
    writable = image / "writable"
    writable.mkdir()
    writable.chmod(0o777)
    places = dict.fromkeys(("DJL_CACHE_DIR", "HF_HOME"), str(writable)) | {name: str(image / "mount")}
    (image / "mount").mkdir(mode=0o555)
    done = as_user(image, "serve", environ=variables(image, **places))
    assert done.returncode == 1
    for word in (str(image / "mount"), name, f"uid {USER}", f"chown -R {USER}", "docker run -u"):
        assert word in done.stderr


@pytest.mark.parametrize(
    ("environ", "mode", "message"),
    [
        ({"SERVING_MODEL_STORE": "PLACE"}, 0o000, f"(model) cannot be read by uid {USER}"),
        (
            {"SM_NEO_EXECUTION_CONTEXT": "true", "SM_NEO_COMPILED_MODEL_DIR": "PLACE"},
            0o555,
            "(Neo's output) cannot be written",
        ),
    ],
)
def test_a_folder_that_a_user_may_not_use_is_named(
    image: Path, environ: dict[str, str], mode: int, message: str
) -> None:
    place = image / "place"
    place.mkdir(mode=mode)
    given = {name: value.replace("PLACE", str(place)) for name, value in environ.items()}
    done = as_user(image, "serve", environ=variables(image, **given))
    assert done.returncode == 1 and f"{place} {message}" in done.stderr


def test_a_hub_cache_that_is_only_read(image: Path) -> None:
    path = echoing(image, "djl-trtllm")
    (image / "huggingface").mkdir(mode=0o555)
    (image / "cache").mkdir()
    (image / "cache").chmod(0o777)
    done = as_user(image, "serve", "--port", "1", environ=variables(image, PATH=path, HF_HUB_OFFLINE="1"))
    assert done.stdout.startswith("<serve><--port><1>\n"), done


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(("limit", "ends"), [(str((128 << 20) - 4096), True), (str(128 << 20), False), ("max", False)])
def test_a_container_with_less_memory_than_the_server_needs(image: Path, file: str, limit: str, ends: bool) -> None:
    groups = image / "cgroup"
    (groups / file).parent.mkdir(parents=True)
    (groups / file).write_text(f"{limit}\n")
    (image / "entrypoint").write_text(ENTRYPOINT.read_text().replace("/sys/fs/cgroup", str(groups)))
    done = run(image, "serve", environ=variables(image, PATH=echoing(image, "djl-trtllm")))
    if ends:
        assert (done.returncode, done.stdout) == (1, "")
        assert f"127 MiB of memory ({groups / file})" in done.stderr
        assert "needs 128 MiB" in done.stderr and "--memory" in done.stderr
    else:
        assert (done.returncode, done.stdout[:7]) == (0, "<serve>"), done.stderr


# -- under DJL Serving -------------------------------------------------------------------------------------------------


def djl(image: Path, properties: str = "", **more: str) -> tuple[str, dict[str, str]]:
    """Java's arguments and environment for a model with these properties."""
    model = image / "model"
    model.mkdir(exist_ok=True)
    (model / "serving.properties").write_text(properties)
    environ = variables(image, PATH=echoing(image, "java"), DJL_SERVING_HOME="/opt/djl", SERVING_MODEL_STORE=str(model))
    done = run(image, "serve", environ=environ | more)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[0], exported(done.stdout)


def test_djl_starts_the_front_end(image: Path) -> None:
    arguments, environ = djl(image, JAVA_OPTS="-Xmx1g -Xms1g", SAGEMAKER_BIND_TO_PORT="8123", SM_NUM_GPUS="4")
    assert arguments.startswith("<-Xmx1g><-Xms1g>")
    assert arguments.endswith("<-cp></opt/djl/lib/*><ai.djl.serving.ModelServer><-f></opt/djl/conf/config.properties>")
    assert environ["SERVING_INFERENCE_ADDRESS"] == environ["SERVING_MANAGEMENT_ADDRESS"] == "http://0.0.0.0:8123"
    assert environ["TENSOR_PARALLEL_DEGREE"] == "4"
    assert environ["OPTION_ENTRYPOINT"] == "djl_trtllm.async_handler"
    assert (environ["OPTION_ASYNC_MODE"], environ["OPTION_ROLLING_BATCH"]) == ("true", "disable")
    names = ("SERVING_MIN_WORKERS", "SERVING_MAX_WORKERS", "SERVING_RETRY_THRESHOLD")
    assert [environ[name] for name in names] == ["1", "1", "10"]


def test_djl_leaves_what_is_set_or_asked_for_in_a_file(image: Path) -> None:
    _, environ = djl(image, OPTION_ENTRYPOINT="model.py", SERVING_RETRY_THRESHOLD="2", SERVING_MAX_WORKERS="")
    assert environ["OPTION_ENTRYPOINT"] == "model.py"
    assert environ["SERVING_RETRY_THRESHOLD"] == "2"
    assert environ["SERVING_MAX_WORKERS"] == "1"
    assert "OPTION_ASYNC_MODE" not in environ and "SERVING_INFERENCE_ADDRESS" not in environ
    for value in ("trtllm", "enable"):
        _, environ = djl(image, f"engine=MPI\noption.rolling_batch = {value}\n")
        assert environ["OPTION_ENTRYPOINT"] == "djl_trtllm.handler" and "OPTION_ASYNC_MODE" not in environ


def test_djl_and_a_model_named_by_option_model_id_alone(image: Path) -> None:
    """DJL Serving finds no model in an empty folder (ModelStore.java), and fills in one that is named."""
    (image / "store").mkdir()
    java = {"PATH": echoing(image, "java"), "DJL_SERVING_HOME": "/opt/djl", "OPTION_MODEL_ID": "acme/tiny-1.1B"}
    for store, place in ((image / "store", image / "store"), (image / "nowhere", image / "cache" / "model")):
        done = run(image, "serve", environ=variables(image, **java, SERVING_MODEL_STORE=str(store)))
        assert exported(done.stdout)["SERVING_LOAD_MODELS"] == f"acme_tiny_1_1B::Python={place}", done
        assert place.is_dir()
    (image / "store" / "config.json").touch()
    done = run(image, "serve", environ=variables(image, **java, SERVING_MODEL_STORE=str(image / "store")))
    assert "SERVING_LOAD_MODELS" not in exported(done.stdout)


def test_djl_and_load_models_with_engine_mpi(image: Path) -> None:
    _, environ = djl(image, SERVING_LOAD_MODELS="a::MPI=/opt/ml/model,[b:1:MPI:*]=/MPI", OPTION_MODEL_ID="acme/tiny")
    assert environ["SERVING_LOAD_MODELS"] == "a::Python=/opt/ml/model,[b:1:Python:*]=/MPI"
