"""What is fetched of a repository."""

from __future__ import annotations

import pytest

from djl_trtllm.model.remote.selection import needed, tokenizer_files

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


def test_folders_are_not_files() -> None:
    assert needed(["", "sub/", "config.json"]) == ["config.json"]


def test_for_its_tokenizer_alone_a_model_comes_without_weights() -> None:
    kept = ["config.json", "qwen.tiktoken", "tokenization_qwen.py", "tokenizer.json", "tokenizer.model", "vocab.json"]
    weights = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "1/rank0.engine"]
    assert tokenizer_files([*kept, *weights, "onnx/tokenizer.json"]) == kept
    pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"]
    assert tokenizer_files([*kept, *pickled]) == kept
