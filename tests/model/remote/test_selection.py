"""What is fetched of a repository."""

from __future__ import annotations

import pytest

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote.selection import config_files, needed, nested_engines, served_files, tokenizer_files

CONFIG = ["config.json", "generation_config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("present", "left_out"),
    [
        (["model.safetensors", *CONFIG], ["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "rust_model.ot"]),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], ["consolidated.safetensors"]),
        (
            ["model.safetensors", "model.safetensors.index.json"],
            ["pytorch_model.bin.index.json", "original/params.json"],
        ),
        (["pytorch_model.bin", *CONFIG], ["training_args.bin", "optimizer.pt", "onnx/model.onnx", "model.gguf"]),
        (["consolidated.safetensors", "params.json"], [".gitattributes", "picture.png"]),
        (["rank0.engine", "config.json", "model.cache"], [".git/config"]),
        (["tensorrt_llm/1/rank0.engine", "tensorrt_llm/config.pbtxt", "tensorrt_llm/tokenizer.json"], []),
        (["openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.bin"], []),
        (["model.safetensors", "engine/rank0.engine", "engine/config.json"], ["flax_model.msgpack", "model.bin"]),
        (["model.safetensors", "engine/openvino_model.xml", "engine/openvino_model.bin"], ["pytorch_model.bin"]),
        (["tokenizer.model", "modeling_custom.py", "serving.properties", "chat_template.jinja"], ["README.pdf"]),
    ],
)
def test_one_set_of_weights_and_what_belongs_to_it(present: list[str], left_out: list[str]) -> None:
    assert needed([*left_out, *present]) == sorted(present)


FOREIGN = ["msgpack", "h5", "ot", "onnx", "onnx_data", "gguf", "ggml", "tflite", "mlmodel", "pb", "nemo"]
MEDIA = ["png", "jpg", "jpeg", "gif", "svg", "webp", "mp4", "pdf", "ipynb"]
FOLDERS = ["original", "onnx", "openvino", "coreml", "tf", "flax", "gguf", "metal", "runs", "logs"]
OF_TRAINING = [
    "training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth",
]  # fmt: skip


def test_what_serving_does_not_read_is_left_out() -> None:
    left_out = [
        *(f"file.{suffix}" for suffix in (*FOREIGN, *MEDIA)),
        *(f"{folder}/config.json" for folder in FOLDERS),
        *(f"{folder}/deeper/config.json" for folder in FOLDERS),
        *(f"deeper/{folder}/config.json" for folder in FOLDERS),
        *OF_TRAINING,
        ".hidden",
        ".hidden/config.json",
        "deeper/.hidden",
    ]
    kept = ["config.json", "deeper/config.json", "gguf.json", "onnx.txt", "pytorch_model.bin"]
    assert needed([*left_out, *kept]) == sorted(kept)


def test_beside_safetensors_no_pickled_weights_are_needed() -> None:
    pickled = ["a.bin", "b.pt", "c.pth", "pytorch_model.bin.index.json", "deeper/d.bin", "deeper/e.pt"]
    assert needed(["model.safetensors", *pickled]) == ["model.safetensors"]
    assert needed(pickled) == sorted(pickled)


def test_only_safetensors_beside_the_configuration_count() -> None:
    assert needed(["deeper/model.safetensors", "pytorch_model.bin"]) == [
        "deeper/model.safetensors",
        "pytorch_model.bin",
    ]
    consolidated = ["consolidated.safetensors", "deeper/consolidated.safetensors"]
    assert needed(consolidated) == consolidated
    assert needed(["model.safetensors", *consolidated]) == ["deeper/consolidated.safetensors", "model.safetensors"]


def test_of_an_engine_everything_is_needed() -> None:
    engine = ["1/rank0.engine", "1/picture.png", "1/model.onnx", "1/a.bin", "1/consolidated.safetensors"]
    assert needed([*engine, "model.safetensors", "b.bin"]) == sorted([*engine, "model.safetensors"])
    openvino = ["openvino/openvino_model.xml", "openvino/openvino_model.bin"]
    assert needed([*openvino, "model.safetensors"]) == ["model.safetensors", *sorted(openvino)]


def test_an_engine_beside_a_checkpoint_does_not_decide_about_its_weights() -> None:
    assert needed(["rank0.engine", "model.safetensors", "deeper/a.bin"]) == sorted(
        ["rank0.engine", "model.safetensors", "deeper/a.bin"]
    )


def test_folders_are_not_files() -> None:
    assert needed(["", "sub/", "config.json"]) == ["config.json"]


def test_for_its_tokenizer_alone_a_model_comes_without_weights() -> None:
    kept = ["config.json", "qwen.tiktoken", "tokenization_qwen.py", "tokenizer.json", "tokenizer.model", "vocab.json"]
    weights = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "1/rank0.engine"]
    assert tokenizer_files([*kept, *weights, "onnx/tokenizer.json"]) == kept
    pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"]
    assert tokenizer_files([*kept, *pickled]) == kept


def test_what_describes_a_model_is_small() -> None:
    kept = ["config.json", "hf_quant_config.json", "model.safetensors.index.json", "serving.properties"]
    kept += ["tensorrt_llm/config.pbtxt", "tokenizer_config.json"]
    other = ["model-00001-of-00002.safetensors", "tokenizer.json", "model.py", "README.md", ".gitattributes"]
    assert config_files([*kept, *other]) == kept
    assert config_files(other) == []


@pytest.mark.parametrize(
    ("present", "nested"),
    [
        (
            ["a/config.json", "a/rank0.engine", "b/c/rank0.engine", "x"],
            ["a/config.json", "a/rank0.engine", "b/c/rank0.engine"],
        ),
        (["config.json", "a/openvino_model.xml"], ["a/openvino_model.xml"]),
        (["config.json", "rank0.engine", "a/rank0.engine"], []),
        (["config.json", "model.safetensors", "a/rank0.engine"], []),
        (["pytorch_model.bin", "a/rank0.engine"], []),
        (["a/model.safetensors", "a/rank0.engine"], ["a/model.safetensors", "a/rank0.engine"]),
        (["tensorrt_llm/1/rank0.engine"], []),
        (["packages/inflight_batcher_llm/tensorrt_llm/1/rank0.engine"], []),
        (["1/rank0.engine"], []),
        (["config.json", "engine/rank0.engine"], []),
        (["config.json", "a/model.onnx"], []),
    ],
)
def test_engines_in_other_folders_are_found(present: list[str], nested: list[str]) -> None:
    assert nested_engines(present) == nested
    if nested:
        with pytest.raises(DownloadError, match=", ".join(nested)):
            served_files(iter(present))
    else:
        assert served_files(iter(present)) == needed(present)
