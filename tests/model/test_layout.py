from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import LayoutError
from djl_trtllm.model import Kind, inspect

HF = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
BUILT = {
    "version": "1.2.0",
    "pretrained_config": {"mapping": {"world_size": 2}},
    "build_config": {"max_num_tokens": 8192},
}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"


def safetensors(path: Path, tensors: dict[str, int] | None = None) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in (tensors or {"weight": 8}).items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(end))


def write(path: Path, **files: Any) -> Path:
    """Files by name with `__` for `/`: objects as JSON, text and bytes as they are, None for safetensors."""
    for name, content in files.items():
        file = path / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            safetensors(file)
        elif isinstance(content, bytes):
            file.write_bytes(content)
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_hugging_face_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, **{"config.json": HF, "model.safetensors": None, "tokenizer.json": "{}"})
    layout = inspect(tmp_path)
    assert layout.kind is Kind.HF_CHECKPOINT and not layout.kind.is_engine
    assert layout.config == HF
    assert layout.weight_files == (tmp_path / "model.safetensors",)
    assert layout.tokenizer_dir == tmp_path
    assert layout.bundled_engine is None and layout.engine_dir is None
    assert layout.shape.parameter_bytes == 8


def test_safetensors_come_before_pytorch_files(tmp_path: Path) -> None:
    write(tmp_path, **{"config.json": HF, "pytorch_model.bin": b"x"})
    assert [file.name for file in inspect(tmp_path).weight_files] == ["pytorch_model.bin"]
    write(tmp_path, **{"model.safetensors": None})
    assert [file.name for file in inspect(tmp_path).weight_files] == ["model.safetensors"]


def test_the_index_says_which_files_are_the_weights(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "part-2.safetensors", "b": "part-1.safetensors", "c": "part-1.safetensors"}}
    files = {"part-1.safetensors": None, "part-2.safetensors": None, "adapter.safetensors": None}
    write(tmp_path, **{"config.json": HF, "model.safetensors.index.json": index}, **files)
    assert [file.name for file in inspect(tmp_path).weight_files] == ["part-1.safetensors", "part-2.safetensors"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors", "c": "part-3.safetensors"}}
    write(tmp_path, **{"config.json": HF, "model.safetensors.index.json": index, "part-2.safetensors": None})
    with pytest.raises(LayoutError, match=r"2 of 3 .* are missing: part-1.safetensors, part-3.safetensors"):
        inspect(tmp_path)


def test_a_missing_shard_is_noticed_without_an_index(tmp_path: Path) -> None:
    write(tmp_path, **{"config.json": HF, "model-00001-of-00002.safetensors": None})
    with pytest.raises(LayoutError, match=r"1 of 2 .* are missing: model-00002-of-00002.safetensors"):
        inspect(tmp_path)


def test_the_list_of_missing_files_is_bounded(tmp_path: Path) -> None:
    index = {"weight_map": {str(number): f"part-{number:03}.safetensors" for number in range(100)}}
    write(tmp_path, **{"config.json": HF, "model.safetensors.index.json": index})
    with pytest.raises(LayoutError, match="and 80 more"):
        inspect(tmp_path)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    write(
        tmp_path, **{"config.json": HF, "model.safetensors.index.json": {"weight_map": {"a": "../other.safetensors"}}}
    )
    with pytest.raises(LayoutError, match="outside its own directory"):
        inspect(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": []}', "{}"])
def test_a_damaged_index_is_named(tmp_path: Path, index: str) -> None:
    write(tmp_path, **{"config.json": HF, "model.safetensors.index.json": index})
    with pytest.raises(
        LayoutError, match=r"index\.json (is not valid JSON|holds a JSON list|has no `weight_map` object)"
    ):
        inspect(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 8, 20, -1])
def test_a_cut_off_weight_file_is_named(tmp_path: Path, kept: int) -> None:
    write(tmp_path, **{"config.json": HF, "model.safetensors": None})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(LayoutError, match=r"model\.safetensors is (cut off|not a safetensors file)"):
        inspect(tmp_path)


def test_git_lfs_pointers_are_recognised(tmp_path: Path) -> None:
    write(tmp_path, **{"config.json": HF, "model.safetensors": POINTER})
    with pytest.raises(LayoutError, match=r"these are Git LFS pointers, .*fetch the files"):
        inspect(tmp_path)
    write(tmp_path, **{"config.json": POINTER})
    with pytest.raises(LayoutError, match="Git LFS pointer"):
        inspect(tmp_path)


def test_a_compiled_openvino_engine(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{"openvino_model.xml": "<net/>", "openvino_model.bin": b"x", "config.json": HF, "tokenizer.model": b"x"},
    )
    layout = inspect(tmp_path)
    assert layout.kind is Kind.OPENVINO_ENGINE and layout.kind.is_engine
    assert layout.engine_dir == layout.tokenizer_dir == tmp_path
    assert layout.config == HF
    (tmp_path / "openvino_model.bin").unlink()
    with pytest.raises(LayoutError, match=r"without openvino_model\.bin"):
        inspect(tmp_path)


def test_a_compiled_tensorrt_engine(tmp_path: Path) -> None:
    write(tmp_path, **{"config.json": BUILT, "rank1.engine": b"x", "rank0.engine": b"x"})
    layout = inspect(tmp_path)
    assert layout.kind is Kind.TENSORRT_ENGINE
    assert [file.name for file in layout.weight_files] == ["rank0.engine", "rank1.engine"]
    assert layout.tokenizer_dir is None


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    write(tmp_path, **{"config.json": BUILT, "rank0.engine": b"x"})
    with pytest.raises(LayoutError, match="1 of 2 ranks are missing: rank 1"):
        inspect(tmp_path)
    (tmp_path / "rank0.engine").unlink()
    with pytest.raises(LayoutError, match=r"there is no rank0\.engine"):
        inspect(tmp_path)


def test_ranks_are_in_order_of_number(tmp_path: Path) -> None:
    config = {**BUILT, "pretrained_config": {"mapping": {"world_size": 12}}}
    write(tmp_path, **{"config.json": config}, **{f"rank{rank}.engine": b"x" for rank in range(12)})
    assert [file.name for file in inspect(tmp_path).weight_files] == [f"rank{rank}.engine" for rank in range(12)]


@pytest.mark.parametrize(
    "config", [{"architecture": "LlamaForCausalLM", "quantization": {}}, {"mapping": {"world_size": 1}}]
)
def test_a_tensorrt_checkpoint(tmp_path: Path, config: dict[str, Any]) -> None:
    write(tmp_path, **{"config.json": config, "rank0.safetensors": None})
    layout = inspect(tmp_path)
    assert layout.kind is Kind.TENSORRT_CHECKPOINT and not layout.kind.is_engine


@pytest.mark.parametrize("engine", ["rank0.engine", "trt_llm_model_float16_tp1_rank0.engine"])
@pytest.mark.parametrize("above", [True, False])
def test_an_lmi_repository(tmp_path: Path, engine: str, above: bool) -> None:
    write(
        tmp_path,
        **{
            "tensorrt_llm__config.pbtxt": "x", f"tensorrt_llm__1__{engine}": b"x", "tensorrt_llm__config.json": HF,
            "tensorrt_llm__1__config.json": {"builder_config": {"num_layers": 3}},
            "tensorrt_llm__tokenizer.model": b"x",
        },
    )  # fmt: skip
    layout = inspect(tmp_path if above else tmp_path / "tensorrt_llm")
    assert layout.kind is Kind.LMI_REPOSITORY and layout.kind.is_engine
    assert layout.engine_dir == tmp_path / "tensorrt_llm" / "1"
    assert layout.tokenizer_dir == tmp_path / "tensorrt_llm"
    assert layout.shape.num_layers == 3


def test_an_lmi_repository_without_its_engine(tmp_path: Path) -> None:
    write(tmp_path, **{"tensorrt_llm__config.pbtxt": "x", "tensorrt_llm__1__model.cache": "x"})
    with pytest.raises(LayoutError, match=r"found model\.cache; expected rank0\.engine"):
        inspect(tmp_path)


def test_a_checkpoint_may_carry_its_engine_beside_it(tmp_path: Path) -> None:
    write(tmp_path, **{"config.json": HF, "model.safetensors": None, "tokenizer.json": "{}"})
    write(tmp_path / "engine", **{"openvino_model.xml": "<net/>", "openvino_model.bin": b"x"})
    layout = inspect(tmp_path)
    assert layout.kind is Kind.HF_CHECKPOINT
    assert layout.bundled_engine == layout.engine_dir == tmp_path / "engine"
    assert inspect(tmp_path / "engine").tokenizer_dir == tmp_path
    (tmp_path / "model.safetensors").unlink()
    assert inspect(tmp_path).kind is Kind.OPENVINO_ENGINE
    assert inspect(tmp_path).path == tmp_path / "engine"


def test_an_engine_does_not_take_a_strangers_tokenizer(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{"tokenizer.json": "{}", "engine-a__openvino_model.xml": "<net/>", "engine-a__openvino_model.bin": b"x"},
    )
    assert inspect(tmp_path / "engine-a").tokenizer_dir is None


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "found nothing, it is empty"),
        ({"serving.properties": "engine=MPI"}, r"option\.model_id has to say"),
        ({"config.json": {"a": 1}, "x.safetensors": None}, r"config\.json has neither \(its keys: a\)"),
        ({"model.safetensors": None}, r"without a config\.json"),
        ({"config.json": HF}, r"config\.json without weights"),
        ({"a__config.json": HF, "b__readme": "x"}, r"found a/, b/; there may be a model in a/"),
        ({f"f{number}": "x" for number in range(30)}, "and 10 more"),
    ],
)
def test_what_is_no_model_is_listed_with_what_was_expected(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    with pytest.raises(LayoutError, match=says) as caught:
        inspect(write(tmp_path, **files))
    for kind in ("Hugging Face checkpoint", "OpenVINO engine", "TensorRT-LLM engine", "TensorRT-LLM checkpoint", "LMI"):
        assert kind in str(caught.value)


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="there is nothing"):
        inspect(tmp_path / "missing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(LayoutError, match="it is a file"):
        inspect(tmp_path / "file")


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"config\.json is not valid JSON"):
        inspect(write(tmp_path, **{"config.json": "{", "model.safetensors": None}))
    with pytest.raises(LayoutError, match="holds a JSON list"):
        inspect(write(tmp_path, **{"config.json": "[]"}))
