"""Compiled engines of a hub and of S3, in the layouts that people have them in; TensorRT-LLM is the fake."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.helpers import write_checkpoint
from tests.fakes.installation import fake_tensorrt_llm
from tests.integration.test_remote_models import files_of
from tests.support.hub_server import Hub, hub_server
from tests.support.moto_server import BUCKET, client, keys, moto_server
from tests.support.s3_server import Store, s3_server, variables
from tests.support.server import Server, environment, run_cli, serving

PROMPT = "the little red riding hood"
ENGINE = ("config.json", "rank0.engine")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fake_tensorrt_llm(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def compiled(fake: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that `djl-trtllm compile` writes."""
    root = tmp_path_factory.mktemp("compiled")
    checkpoint = write_checkpoint(root / "checkpoint")
    done = run_cli("compile", str(checkpoint), str(root / "out"), environ=environment(root / "cache", **fake))
    assert done.returncode == 0, done.stderr
    return files_of(root / "out")


@pytest.fixture(scope="module")
def text(compiled: dict[str, bytes], fake: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the engine answers when its files are on this machine."""
    root = tmp_path_factory.mktemp("local")
    for name, content in compiled.items():
        (root / name).write_bytes(content)
    with serving(root, tmp_path_factory.mktemp("scratch"), **fake) as server:
        return answer(server)


def answer(server: Server) -> str:
    reply: str = server.answer(PROMPT, max_new_tokens=4)["generated_text"]
    assert reply
    return reply


def only(files: dict[str, bytes], names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: files[name] for name in names}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "store").mkdir()
    return Store(tmp_path / "store")


@pytest.fixture
def s3(store: Store, fake: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of a server that has the store and the fake."""
    with s3_server(store) as endpoint:
        yield {**fake, **variables(endpoint)}


def put(store: Store, prefix: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        store.put(f"{prefix}/{name}", content)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["truss", "properties"])
def test_engine_and_tokenizer_of_two_repositories(
    compiled: dict[str, bytes], text: str, fake: dict[str, str], tmp_path: Path, dialect: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    if dialect == "truss":
        (model / "config.yaml").write_text(
            "model_name: split\nmodel_metadata:\n  engine_repository: acme/engine\n"
            "  tokenizer_repository: acme/llama\n  tensor_parallelism: 1\n"
        )
    else:
        (model / "serving.properties").write_text(
            "option.engine_repository=acme/engine\noption.tokenizer_repository=acme/llama\n"
        )
    # Truss's tokenizer repository is usually the whole model that the engine was compiled from.
    whole = {"model.safetensors": b"weights", "model.safetensors.index.json": b"{}", "pytorch_model.bin": b"w"}
    hub = Hub({"acme/engine": only(compiled, ENGINE), "acme/llama": only(compiled, TOKENIZER) | whole})
    with hub_server(hub) as endpoint:
        settings = {**fake, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf")}
        settings |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        with serving(model, tmp_path, **settings) as server:
            assert answer(server) == text
    assert sorted(hub.fetched) == sorted((*ENGINE, *TOKENIZER))


@pytest.mark.slow
def test_a_tokenizer_in_s3_comes_without_the_weights_beside_it(
    compiled: dict[str, bytes], text: str, store: Store, s3: dict[str, str], tmp_path: Path
) -> None:
    put(store, "engine", only(compiled, ENGINE))
    put(store, "llama", only(compiled, TOKENIZER) | {"model.safetensors": b"weights"})
    settings = {"OPTION_TOKENIZER": "s3://models/llama", **s3}
    with serving("s3://models/engine", tmp_path, **settings) as server:
        assert answer(server) == text
    assert "llama/model.safetensors" not in [request.key for request in store.gets()]


def test_an_engine_directory_in_s3(
    compiled: dict[str, bytes], text: str, store: Store, s3: dict[str, str], tmp_path: Path
) -> None:
    put(store, "team/engine", compiled)
    with serving("s3://models/team/engine", tmp_path, **s3) as server:
        assert answer(server) == text


@pytest.mark.slow
@pytest.mark.parametrize("address", ["s3://models/lmi", "s3://models/lmi/tensorrt_llm/"])
def test_an_lmi_repository_in_s3(
    compiled: dict[str, bytes], text: str, store: Store, s3: dict[str, str], tmp_path: Path, address: str
) -> None:
    put(store, "lmi/tensorrt_llm/1", only(compiled, ENGINE))
    store.put("lmi/tensorrt_llm/config.pbtxt", b'backend: "tensorrtllm"\nmax_batch_size: 16\n')
    put(store, "lmi" if address.endswith("lmi") else "lmi/tensorrt_llm", only(compiled, TOKENIZER))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "serving.properties").write_text(f"engine=MPI\noption.model_id={address}\n")
    with serving(tmp_path / "model", tmp_path, **s3) as server:
        assert answer(server) == text


def packed(properties: str) -> bytes:
    """A model.tar.gz with a serving.properties alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo("serving.properties")
        member.size = len(properties)
        archive.addfile(member, io.BytesIO(properties.encode()))
    return buffer.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local", "s3"])
def test_an_address_in_the_properties_of_an_archive(
    compiled: dict[str, bytes], text: str, store: Store, s3: dict[str, str], tmp_path: Path, where: str
) -> None:
    put(store, "team/engine", compiled)
    content = packed("option.model_id=s3://models/team/engine\noption.model_name=packed\n")
    archive = tmp_path / "model.tar.gz"
    archive.write_bytes(content)
    store.put("archives/model.tar.gz", content)
    with serving(archive if where == "local" else "s3://models/archives/model.tar.gz", tmp_path, **s3) as server:
        assert answer(server) == text
        assert server.http.get("/ping").json().keys() == {"packed" if where == "local" else "model"}


@pytest.mark.slow
def test_an_archive_that_the_properties_name(
    compiled: dict[str, bytes], text: str, store: Store, s3: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "engine").mkdir()
    for name in (*ENGINE, *TOKENIZER):
        (tmp_path / "engine" / name).write_bytes(compiled[name])
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(tmp_path / "engine", arcname=".")
    store.put("archives/model.tar.gz", buffer.getvalue())
    shutil.rmtree(tmp_path / "engine")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "serving.properties").write_text("option.model_id=s3://models/archives/model.tar.gz\n")
    with serving(tmp_path / "model", tmp_path, **s3) as server:
        assert answer(server) == text


@pytest.mark.slow
def test_a_second_start_looks_and_downloads_nothing(
    compiled: dict[str, bytes], store: Store, s3: dict[str, str], tmp_path: Path
) -> None:
    put(store, "team/engine", compiled)
    with serving("s3://models/team/engine", tmp_path, **s3):
        pass
    first = list(store.requests)
    assert {request.key for request in store.gets()} == {f"team/engine/{name}" for name in compiled}
    store.requests.clear()
    with serving("s3://models/team/engine", tmp_path, **s3):
        pass
    assert store.gets() == []
    assert 0 < len(store.requests) < len(first)


@pytest.mark.slow
def test_compiling_from_s3_to_s3_and_serving_from_there(text: str, fake: dict[str, str], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    with moto_server() as url:
        for name, content in files_of(checkpoint).items():
            client(url).put_object(Bucket=BUCKET, Key=f"checkpoints/llama/{name}", Body=content)
        shutil.rmtree(checkpoint)
        here, there = ({**fake, **variables(url)} for _ in range(2))
        source, destination = f"s3://{BUCKET}/checkpoints/llama", f"s3://{BUCKET}/engines/llama"
        done = run_cli("compile", source, destination, environ=environment(tmp_path / "builder", **here))
        assert done.returncode == 0, done.stderr
        assert {"rank0.engine", "manifest.json", "serving.properties", "tokenizer.json"} <= {
            key.rpartition("/")[2] for key in keys(url, "engines/llama/")
        }
        with serving(destination, tmp_path / "server", **there) as server:
            assert answer(server) == text
            assert server.http.get("/ping").json().keys() == {"llama"}
            assert not server.says("compiling:")
