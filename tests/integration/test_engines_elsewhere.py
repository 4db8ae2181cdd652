"""Compiled engines and checkpoints wherever they lie: in folders, archives, a hub and S3; TensorRT-LLM is the fake."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engines.helpers import write_checkpoint
from tests.fakes.installation import fake_tensorrt_llm
from tests.support.models import TINY_STORIES, without_sagemakers_model
from tests.support.processes import wait_until
from tests.support.s3 import MOTO_BUCKET, Store, client, keys, moto_server, s3_server, variables
from tests.support.server import Server, environment, run_cli, serving
from tests.support.stub_http import Hub, hub_server
from tests.support.tables import by_table

PROMPT = "the little red riding hood"
ENGINE = ("config.json", "rank0.engine")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
WHOLE = (*ENGINE, *TOKENIZER)


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its relative path."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def packed(files: Mapping[str, bytes]) -> bytes:
    """A model.tar.gz of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def answer(server: Server) -> str:
    reply: str = server.answer(PROMPT, max_new_tokens=4)["generated_text"]
    assert reply
    return reply


def hub_settings(endpoint: str, home: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


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


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "store").mkdir()
    return Store(tmp_path / "store")


@pytest.fixture
def s3(store: Store, fake: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of a server that has the store and the fake."""
    with s3_server(store) as endpoint:
        yield {**fake, **variables(endpoint)}


# -- engines in S3 -----------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Objects of the store by prefix, and what is served: `address`, or a folder with these `properties`."""

    files: dict[str, tuple[str, ...]]
    address: str = ""
    properties: str = ""
    others: Mapping[str, bytes] = {}
    environ: Mapping[str, str] = {}
    archived: str = ""
    """The key of an archive with the engine."""


_PBTXT = {"lmi/tensorrt_llm/config.pbtxt": b'backend: "tensorrtllm"\nmax_batch_size: 16\n'}
_ARCHIVE = {
    "archives/model.tar.gz": packed({"serving.properties": b"option.model_id=s3://models/team/engine\n"}),
}
PLACES = {
    "a directory": Place({"team/engine": WHOLE}, "s3://models/team/engine"),
    "a tokenizer beside weights": Place(
        {"engine": ENGINE, "llama": TOKENIZER},
        "s3://models/engine",
        others={"llama/model.safetensors": b"weights"},
        environ={"OPTION_TOKENIZER": "s3://models/llama"},
    ),
    "LMI's repository": Place(
        {"lmi/tensorrt_llm/1": ENGINE, "lmi": TOKENIZER},
        properties="engine=MPI\noption.model_id=s3://models/lmi\n",
        others=_PBTXT,
    ),
    "a model of LMI's repository": Place(
        {"lmi/tensorrt_llm/1": ENGINE, "lmi/tensorrt_llm": TOKENIZER},
        properties="engine=MPI\noption.model_id=s3://models/lmi/tensorrt_llm/\n",
        others=_PBTXT,
    ),
    "an archive that names it": Place({"team/engine": WHOLE}, "s3://models/archives/model.tar.gz", others=_ARCHIVE),
    "properties that name its archive": Place(
        {}, properties="option.model_id=s3://models/archives/engine.tar.gz\n", archived="archives/engine.tar.gz"
    ),
}

STARTED_AGAIN = ("a directory", "properties that name its archive")
"""A directory and a file: what else there is differs in where they are named."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_an_engine_in_s3_is_fetched_once_without_the_weights_beside_it(
    compiled: dict[str, bytes], text: str, store: Store, s3: dict[str, str], tmp_path: Path, name: str
) -> None:
    place = PLACES[name]
    for prefix, names in place.files.items():
        for each in names:
            store.put(f"{prefix}/{each}", compiled[each])
    for key, content in place.others.items():
        store.put(key, content)
    if place.archived:
        store.put(place.archived, packed({each: compiled[each] for each in WHOLE}))
    served: str | Path = place.address
    if place.properties:
        served = tmp_path / "model"
        served.mkdir()
        (served / "serving.properties").write_text(place.properties)
    with serving(served, tmp_path, **s3, **place.environ) as server:
        assert answer(server) == text
    assert not [request.key for request in store.gets() if request.key.endswith(".safetensors")]
    if name not in STARTED_AGAIN:
        return
    first = len(store.requests)
    store.requests.clear()
    with serving(served, tmp_path, **s3, **place.environ):
        pass
    assert store.gets() == []
    assert 0 < len(store.requests) < first


@pytest.mark.slow
def test_compiling_from_s3_to_s3_and_serving_from_there(text: str, fake: dict[str, str], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    with moto_server() as url:
        for name, content in files_of(checkpoint).items():
            client(url).put_object(Bucket=MOTO_BUCKET, Key=f"checkpoints/llama/{name}", Body=content)
        shutil.rmtree(checkpoint)
        given = {**fake, **variables(url)}
        source, destination = f"s3://{MOTO_BUCKET}/checkpoints/llama", f"s3://{MOTO_BUCKET}/engines/llama"
        done = run_cli("compile", source, destination, environ=environment(tmp_path / "builder", **given))
        assert done.returncode == 0, done.stderr
        assert {"rank0.engine", "manifest.json", "serving.properties", "tokenizer.json"} <= {
            key.rpartition("/")[2] for key in keys(url, "engines/llama/")
        }
        with serving(destination, tmp_path / "server", **given) as server:
            assert answer(server) == text
            assert server.http.get("/ping").json().keys() == {"llama"}
            assert not server.says("compiling:")


# -- a hub -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@by_table("file", "content", apart=True)
def test_engine_and_tokenizer_of_two_repositories(
    compiled: dict[str, bytes], text: str, fake: dict[str, str], tmp_path: Path, file: str, content: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / file).write_text(content)
    # Truss's tokenizer repository is usually the whole model that the engine was compiled from.
    whole = {"model.safetensors": b"weights", "model.safetensors.index.json": b"{}", "pytorch_model.bin": b"w"}
    engine, tokenizer = ({name: compiled[name] for name in names} for names in (ENGINE, TOKENIZER))
    hub = Hub({"acme/engine": engine, "acme/llama": tokenizer | whole})
    with (
        hub_server(hub) as endpoint,
        serving(tmp_path / "model", tmp_path, **fake, **hub_settings(endpoint, tmp_path / "hf")) as server,
    ):
        assert answer(server) == text
    assert sorted(hub.fetched) == sorted(WHOLE)


@pytest.mark.slow
@without_sagemakers_model
def test_hf_model_id_is_fetched_and_served_and_nothing_else_is(tiny_stories: Path, tmp_path: Path) -> None:
    hub = Hub({"acme/tiny-stories": files_of(tiny_stories) | {"flax_model.msgpack": b"another format"}})
    with hub_server(hub) as endpoint:
        settings = {"HF_MODEL_ID": "acme/tiny-stories", **hub_settings(endpoint, tmp_path / "hf")}
        with serving(None, tmp_path, **settings) as server:
            assert answer(server)
            assert server.http.get("/ping").json().keys() == {"acme_tiny_stories"}
        assert "flax_model.msgpack" not in hub.fetched
        hub.fetched.clear()
        with serving(None, tmp_path, **settings):
            pass
        assert hub.fetched == []


@pytest.mark.slow
def test_a_truss_is_served_with_the_token_of_its_secrets(tiny_stories: Path, tmp_path: Path) -> None:
    secret = "hf_Right0Token0Of0The0Truss"
    files = files_of(tiny_stories / "engine")
    hub = Hub({"acme/engine": files, "acme/tokenizer": {name: files[name] for name in files if "tokenizer" in name}})
    hub.private, hub.token = frozenset(hub.repositories), secret
    truss = tmp_path / "truss"
    truss.mkdir()
    config = "model_metadata:\n  tensor_parallelism: 1\n  engine_repository: acme/engine\n"
    config += f"  tokenizer_repository: acme/tokenizer\nsecrets:\n  hf_access_token: {secret}\n"
    (truss / "config.yaml").write_text(config)
    with hub_server(hub) as endpoint:
        settings = hub_settings(endpoint, tmp_path / "hf") | {"OPTION_BACKEND": "openvino"}
        with serving(truss, tmp_path, **settings) as server:
            assert server.http.post("/predict", json={"prompt": PROMPT, "max_tokens": 4}).status_code == 200
            for process in server.descendants():
                assert secret not in str((process.environ(), process.cmdline()))
            assert not server.says(secret)
        written = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        assert written == [truss / "config.yaml"]
        other = tmp_path / "other"
        other.mkdir()
        environ = environment(other, **settings | {"HF_HOME": str(other), "HF_TOKEN": "hf_wrong"})
        refused = run_cli("compile", str(truss), str(tmp_path / "out"), environ=environ)
        said = refused.stdout + refused.stderr
        assert refused.returncode == 1 and "HF_TOKEN is not" in said and secret not in said


@pytest.mark.slow
def test_config_looks_at_a_model_of_the_hub_without_its_weights(tiny_stories: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny_stories.iterdir() if path.is_file()}
    hub = Hub({"acme/tiny-stories": files | {"serving.properties": b"option.max_input_len=77\n"}})
    hub.repositories["acme/gated"], hub.gated = {"config.json": b"{}"}, frozenset({"acme/gated"})
    with hub_server(hub) as endpoint:
        environ = environment(tmp_path, **hub_settings(endpoint, tmp_path / "hf"))
        shown = run_cli("config", "acme/tiny-stories", "--backend", "tensorrt", environ=environ)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert "option.max_input_len = 77 tokens" in shown.stdout
        assert not any(name.endswith(("model.safetensors", "tokenizer.json")) for name in hub.fetched)
        for model, more, told in (
            ("acme/tiny-stories", {"OPTION_QUANTIZE": "fp8"}, ("cannot be served: ", "OPTION_QUANTIZE")),
            ("acme/nowhere", {}, ("there is no such model",)),
            ("acme/gated", {}, ("acme/gated", "request access on its page")),
        ):
            refused = run_cli("config", model, environ={**environ, **more})
            assert refused.returncode == 1
            said = refused.stdout + refused.stderr
            assert all(each in said for each in told) and "Traceback" not in said


# -- engines without configuration: of 256 sequences of 3072 tokens (TensorRT-LLM), and of 8 of 512 (OpenVINO) ---------

PBTXT = """
backend: "tensorrtllm"
parameters { key: "max_beam_width" value: { string_value: "${max_beam_width}" } }
parameters { key: "gpt_model_type" value: { string_value: "inflight_fused_batching" } }
"""
WORD = " riding"


class Built(NamedTuple):
    """The options of the compiler, what the server's log then says, and a length within the limits and the limit."""

    options: dict[str, str]
    says: tuple[str, ...]
    within: int
    limit: int


BUILT = {
    "tensorrt": Built(
        {"OPTION_MAX_ROLLING_BATCH_SIZE": "256", "OPTION_MAX_SEQ_LEN": "3072", "OPTION_MAX_NUM_TOKENS": "8192"},
        (
            "up to 256 sequences of 3072 tokens, 8192 tokens per iteration",
            "option.max_rolling_batch_size=256",
            "derived from build_config in ",
        ),
        1803,
        3072,
    ),
    "openvino": Built(
        {"OPTION_BACKEND": "openvino", "OPTION_MAX_ROLLING_BATCH_SIZE": "8", "OPTION_MAX_SEQ_LEN": "512"},
        ("up to 8 sequences of 512 tokens", "option.max_rolling_batch_size=8", "derived from limits in "),
        500,
        512,
    ),
}


@pytest.fixture(scope="module")
def built(
    request: pytest.FixtureRequest, fake: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Built, Path, dict[str, str]]:
    """A compiled engine with nothing of this server beside it, and the environment to serve it in."""
    of = BUILT[request.param]
    environ = fake if request.param == "tensorrt" else {}
    root = tmp_path_factory.mktemp(request.param)
    out = root / "out"
    if request.param == "tensorrt":
        checkpoint = write_checkpoint(root / "checkpoint")
        config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 4096}
        (checkpoint / "config.json").write_text(json.dumps(config))
    else:  # only the limits are written: this engine has been compiled
        checkpoint = TINY_STORIES
        shutil.copytree(TINY_STORIES / "engine", out)
    done = run_cli("compile", str(checkpoint), str(out), environ=environment(root / "cache", **environ, **of.options))
    assert done.returncode == 0, done.stderr
    (out / "serving.properties").unlink()
    if request.param == "tensorrt":
        (out / "manifest.json").unlink()  # as trtllm-build leaves it
    return of, out, environ


def bare(root: Path, engine: Path) -> Path:
    return shutil.copytree(engine, root / "model")


def archive(root: Path, engine: Path) -> Path:
    (root / "model.tar.gz").write_bytes(packed(files_of(engine)))
    return root / "model.tar.gz"


def triton(root: Path, engine: Path) -> Path:
    for name in ("ensemble", "preprocessing", "postprocessing", "tensorrt_llm"):
        (root / name).mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(PBTXT if name == "tensorrt_llm" else f'name: "{name}"\n')
    shutil.copytree(engine, root / "tensorrt_llm" / "1")
    return root


def truss(root: Path, engine: Path) -> Path:
    triton(root / "packages" / "inflight_batcher_llm", engine)
    (root / "config.yaml").write_text("model_metadata:\n  tensor_parallelism: 1\n")
    return root


def prompt_of(tokens: int, engine: Path) -> str:
    """A text of this number of tokens of the engine's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    text = WORD * (tokens // len(tokenizer.encode(WORD).ids))
    text += "!" * (tokens - len(tokenizer.encode(text).ids))
    assert len(tokenizer.encode(text).ids) == tokens
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("built", "place"), [("openvino", archive), ("tensorrt", bare), ("tensorrt", truss)], indirect=["built"]
)
def test_an_engine_is_served_with_the_limits_that_it_was_built_with(
    built: tuple[Built, Path, dict[str, str]], tmp_path: Path, place: Callable[[Path, Path], Path]
) -> None:
    of, engine, environ = built
    with serving(place(tmp_path, engine), **environ) as server:
        wait_until(lambda: all(server.says(each) for each in of.says))
        served = server.answer(prompt_of(of.within, engine), max_new_tokens=4)
        assert served["details"]["generated_tokens"] == 4
        refused = server.post(prompt_of(of.limit, engine), max_new_tokens=4)
        assert refused.status_code != 200 and str(of.limit - 1) in refused.text and str(of.limit) in refused.text
