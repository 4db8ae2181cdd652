"""Engines of 256 sequences of 3072 tokens and of 8 of 512, served as such from wherever they lie.

The first is compiled by the fake TensorRT-LLM, the second by OpenVINO. Nothing configures them but what they were
compiled with.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.engines.helpers import write_checkpoint
from tests.fakes.installation import fake_tensorrt_llm
from tests.support.server import Server, environment, run_cli, serving

pytestmark = pytest.mark.slow

PBTXT = """
backend: "tensorrtllm"
parameters { key: "max_beam_width" value: { string_value: "${max_beam_width}" } }
parameters { key: "gpt_model_type" value: { string_value: "inflight_fused_batching" } }
"""
WORD = " riding"


def compiled(root: Path, environ: Mapping[str, str], **options: str) -> Path:
    """A compiled engine with nothing of this server beside it but the manifest."""
    checkpoint, out = write_checkpoint(root / "checkpoint"), root / "out"
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (checkpoint / "config.json").write_text(json.dumps(config))
    done = run_cli("compile", str(checkpoint), str(out), environ=environment(root / "cache", **environ, **options))
    assert done.returncode == 0, done.stderr
    (out / "serving.properties").unlink()
    return out


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fake_tensorrt_llm(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def tensorrt(fake: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"OPTION_MAX_ROLLING_BATCH_SIZE": "256", "OPTION_MAX_SEQ_LEN": "3072", "OPTION_MAX_NUM_TOKENS": "8192"}
    engine = compiled(tmp_path_factory.mktemp("tensorrt"), fake, **options)
    (engine / "manifest.json").unlink()  # as trtllm-build leaves it
    return engine


@pytest.fixture(scope="module")
def openvino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"OPTION_BACKEND": "openvino", "OPTION_MAX_ROLLING_BATCH_SIZE": "8", "OPTION_MAX_SEQ_LEN": "512"}
    return compiled(tmp_path_factory.mktemp("openvino"), {}, **options)


def bare(root: Path, engine: Path) -> Path:
    return shutil.copytree(engine, root / "model")


def archive(root: Path, engine: Path) -> Path:
    with tarfile.open(root / "model.tar.gz", "w:gz") as packed:
        packed.add(engine, ".")
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


places = pytest.mark.parametrize("place", [bare, archive, triton, truss])


def prompt_of(tokens: int, engine: Path) -> str:
    """A text of this number of tokens of the engine's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    each = len(tokenizer.encode(WORD).ids)
    text = WORD * (tokens // each)
    text += "!" * (tokens - len(tokenizer.encode(text).ids))
    assert len(tokenizer.encode(text).ids) == tokens
    return text


def limits(server: Server) -> str:
    (line,) = [line for line in server.log if "limits: " in line]
    return line.partition("limits: ")[2]


@places
def test_256_sequences_of_3072_tokens_and_a_prompt_of_1803(
    tensorrt: Path, fake: dict[str, str], tmp_path: Path, place: Callable[[Path, Path], Path]
) -> None:
    with serving(place(tmp_path, tensorrt), **fake) as server:
        assert server.says("up to 256 sequences of 3072 tokens, 8192 tokens per iteration")
        assert "option.max_rolling_batch_size=256" in limits(server)
        assert "derived from build_config in " in limits(server)
        answer = server.answer(prompt_of(1803, tensorrt), max_new_tokens=4)
        assert answer["details"]["generated_tokens"] == 4
        refused = server.post(prompt_of(3072, tensorrt), max_new_tokens=4)
        assert refused.status_code != 200 and "3071" in refused.text and "3072" in refused.text


@places
def test_8_sequences_of_512_tokens(openvino: Path, tmp_path: Path, place: Callable[[Path, Path], Path]) -> None:
    with serving(place(tmp_path, openvino)) as server:
        assert server.says("up to 8 sequences of 512 tokens")
        assert "option.max_rolling_batch_size=8" in limits(server) and "derived from limits in " in limits(server)
        assert server.answer(prompt_of(500, openvino), max_new_tokens=4)["details"]["generated_tokens"] == 4
        refused = server.post(prompt_of(512, openvino), max_new_tokens=4)
        assert refused.status_code != 200 and "511" in refused.text and "512" in refused.text
