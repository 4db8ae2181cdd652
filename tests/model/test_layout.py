from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import LayoutError
from djl_trtllm.model import ModelKind, inspect, inspect_config

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
    assert layout.kind is ModelKind.HF_CHECKPOINT and not layout.kind.is_engine
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
    write(tmp_path, **{"config.json": HF, "model.safetensors.index.json": index, "adapter.safetensors": None})
    safetensors(tmp_path / "part-1.safetensors", {"b": 1, "c": 1})
    safetensors(tmp_path / "part-2.safetensors", {"a": 1})
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
    with pytest.raises(LayoutError, match=r"model\.safetensors is (truncated|not a safetensors file)"):
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
    assert layout.kind is ModelKind.OPENVINO_ENGINE and layout.kind.is_engine
    assert layout.engine_dir == layout.tokenizer_dir == tmp_path
    assert layout.config == HF
    (tmp_path / "openvino_model.bin").unlink()
    with pytest.raises(LayoutError, match=r"without openvino_model\.bin"):
        inspect(tmp_path)


def test_a_compiled_tensorrt_engine(tmp_path: Path) -> None:
    write(tmp_path, **{"config.json": BUILT, "rank1.engine": b"x", "rank0.engine": b"x"})
    layout = inspect(tmp_path)
    assert layout.kind is ModelKind.TENSORRT_ENGINE
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
    ("mapping", "tensor_parallel", "pipeline_parallel"),
    [(None, 1, 1), ({"world_size": 1}, 1, 1), ({"world_size": 4, "tp_size": 2, "pp_size": 2}, 2, 2)],
)
def test_a_tensorrt_checkpoint(
    tmp_path: Path, mapping: dict[str, int] | None, tensor_parallel: int, pipeline_parallel: int
) -> None:
    config = {"architecture": "LlamaForCausalLM", "dtype": "float16", "num_hidden_layers": 3}
    if mapping is not None:
        config["mapping"] = mapping
    ranks = {f"rank{rank}.safetensors": None for rank in range(tensor_parallel * pipeline_parallel)}
    layout = inspect(write(tmp_path, **{"config.json": config}, **ranks))
    assert layout.kind is ModelKind.TENSORRT_CHECKPOINT and not layout.kind.is_engine
    assert (layout.tensor_parallel, layout.pipeline_parallel) == (tensor_parallel, pipeline_parallel)
    assert (layout.shape.architecture, layout.shape.dtype, layout.shape.num_layers) == (
        "LlamaForCausalLM",
        "float16",
        3,
    )


@pytest.mark.parametrize("missing", ["architecture", "dtype"])
def test_a_tensorrt_checkpoint_is_what_tensorrt_llm_takes_for_one(tmp_path: Path, missing: str) -> None:
    config = {"architecture": "LlamaForCausalLM", "dtype": "float16", "mapping": {"world_size": 1}}
    del config[missing]
    with pytest.raises(LayoutError, match=r"config\.json with `architecture` and `dtype`"):
        inspect(write(tmp_path, **{"config.json": config, "rank0.safetensors": None}))


def test_a_hugging_face_checkpoint_has_no_degrees(tmp_path: Path) -> None:
    layout = inspect(write(tmp_path, **{"config.json": HF, "model.safetensors": None}))
    assert layout.tensor_parallel is None and layout.pipeline_parallel is None


def lmi_repository(path: Path, name: str = "tensorrt_llm__") -> Path:
    """The layout of the LMI document with engine files of today, in a folder `name` of `path`."""
    return write(
        path,
        **{
            f"{name}config.pbtxt": "x",
            f"{name}1__rank0.engine": b"x",
            f"{name}1__rank1.engine": b"x",
            f"{name}1__config.json": {
                "pretrained_config": {"mapping": {"tp_size": 2, "world_size": 2}, "num_hidden_layers": 3},
                "build_config": {"max_batch_size": 32},
            },
            f"{name}1__model.cache": b"x",
            f"{name}config.json": {**HF, "model_type": "baichuan", "num_hidden_layers": 4},
            f"{name}tokenizer.model": b"x",
        },
    )


@pytest.mark.parametrize("above", [True, False])
def test_an_lmi_repository(tmp_path: Path, above: bool) -> None:
    layout = inspect(lmi_repository(tmp_path) if above else lmi_repository(tmp_path) / "tensorrt_llm")
    assert layout.kind is ModelKind.LMI_REPOSITORY and layout.kind.is_engine
    assert layout.engine_dir == tmp_path / "tensorrt_llm" / "1"
    assert [file.name for file in layout.weight_files] == ["rank0.engine", "rank1.engine"]
    assert layout.tokenizer_dir == tmp_path / "tensorrt_llm"
    assert layout.tensor_parallel == 2 and layout.pipeline_parallel == 1


def test_an_lmi_repository_may_have_another_name(tmp_path: Path) -> None:
    layout = inspect(lmi_repository(tmp_path, ""))
    assert layout.kind is ModelKind.LMI_REPOSITORY and layout.engine_dir == tmp_path / "1"


def test_the_sizes_are_the_engines_and_the_type_is_that_of_the_model_one_level_up(tmp_path: Path) -> None:
    lmi_repository(tmp_path)
    for path in (tmp_path, tmp_path / "tensorrt_llm", tmp_path / "tensorrt_llm" / "1"):
        layout = inspect(path)
        assert (layout.shape.model_type, layout.shape.num_layers) == ("baichuan", 3)
        assert layout.config is not None and layout.config["build_config"] == {"max_batch_size": 32}
        assert layout.model_config is not None and layout.model_config["num_hidden_layers"] == 4
    (tmp_path / "tensorrt_llm" / "config.json").unlink()
    assert inspect(tmp_path).shape.model_type is None


@pytest.mark.parametrize("name", ["", "tensorrt_llm__", "packages__inflight_batcher_llm__tensorrt_llm__"])
def test_a_repository_with_an_openvino_engine(tmp_path: Path, name: str) -> None:
    files: dict[str, Any] = {f"{name}config.pbtxt": "x", f"{name}1__openvino_model.bin": b"x"}
    path = write(tmp_path, **files, **{f"{name}1__openvino_model.xml": "x", f"{name}1__config.json": HF})
    engine = tmp_path / name.replace("__", "/") / "1"
    layout = inspect(path)
    assert (layout.kind, layout.path, layout.engine_dir) == (ModelKind.OPENVINO_ENGINE, engine, engine)
    assert layout.config == HF and layout.tokenizer_dir is None
    (engine.parent / "tokenizer.json").touch()
    assert inspect(path).tokenizer_dir == engine.parent
    (engine / "tokenizer.json").touch()
    assert inspect(path).tokenizer_dir == engine


@pytest.mark.parametrize(("built", "context"), [(64, 128), (256, 256), (None, 128)])
def test_the_context_of_an_engine_is_at_least_what_it_was_compiled_for(
    tmp_path: Path, built: int | None, context: int
) -> None:
    config = {
        "pretrained_config": {"max_position_embeddings": 128, "mapping": {"world_size": 1}},
        "build_config": {"max_seq_len": built},
    }
    layout = inspect(write(tmp_path, **{"config.json": config, "rank0.engine": b"x"}))
    assert layout.shape.max_position_embeddings == context


@pytest.mark.parametrize("kept", ["model.cache", "config.json", "rank0.engine"])
def test_an_lmi_repository_without_its_engine(tmp_path: Path, kept: str) -> None:
    lmi_repository(tmp_path)
    for file in (tmp_path / "tensorrt_llm" / "1").iterdir():
        if file.name != kept:
            file.unlink()
    with pytest.raises(
        LayoutError, match=rf"found {kept}; expected config\.json with `build_config`, and rank0\.engine"
    ):
        inspect(tmp_path)


@pytest.mark.parametrize("files", [{"config.json": {"builder_config": {}}}, {}])
@pytest.mark.parametrize("folder", ["", "tensorrt_llm/1/"])
def test_engines_of_before_0_8_are_refused_with_what_reads_them_and_the_command(
    tmp_path: Path, folder: str, files: dict[str, Any]
) -> None:
    old = {f"{folder}{name}": content for name, content in files.items()}
    old[f"{folder}trt_llm_model_float16_tp2_rank0.engine"] = b"x"
    old[f"{folder}trt_llm_model_float16_tp2_rank1.engine"] = b"x"
    if folder:
        old["tensorrt_llm/config.pbtxt"] = "x"
    with pytest.raises(LayoutError) as caught:
        inspect(write(tmp_path, **{name.replace("/", "__"): content for name, content in old.items()}))
    message = str(caught.value)
    assert "TensorRT-LLM before 0.8 (trt_llm_model_float16_tp2_rank0.engine; LMI containers 0.25 and 0.26" in message
    assert "`OPTION_TENSOR_PARALLEL_DEGREE=2 OPTION_DTYPE=fp16 djl-trtllm compile CHECKPOINT OUT`" in message


def test_old_engines_beside_a_checkpoint_do_not_keep_it_from_being_served(tmp_path: Path) -> None:
    write(tmp_path, **{"config.json": HF, "model.safetensors": None, "llama_float16_tp1_rank0.engine": b"x"})
    assert inspect(tmp_path).kind is ModelKind.HF_CHECKPOINT


def test_the_quantisation_that_is_stored_is_known(tmp_path: Path) -> None:
    quantized = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    write(tmp_path / "hf", **{"config.json": HF, "model.safetensors": None})
    assert inspect(tmp_path / "hf").quantization is None
    write(tmp_path / "hf", **{"hf_quant_config.json": {"producer": {"name": "modelopt"}, **quantized}})
    assert inspect(tmp_path / "hf").quantization == "FP8"
    write(tmp_path / "hf", **{"hf_quant_config.json": "{"})
    with pytest.raises(LayoutError, match=r"hf_quant_config\.json is not valid JSON"):
        _ = inspect(tmp_path / "hf").quantization
    checkpoint = {"architecture": "LlamaForCausalLM", "dtype": "float16", "quantization": {"quant_algo": "W4A16_AWQ"}}
    write(tmp_path / "checkpoint", **{"config.json": checkpoint, "rank0.safetensors": None})
    assert inspect(tmp_path / "checkpoint").quantization == "W4A16_AWQ"
    engine = {"pretrained_config": quantized, "build_config": {}}
    write(tmp_path / "engine", **{"config.json": engine, "rank0.engine": b"x"})
    assert inspect(tmp_path / "engine").quantization == "FP8"


def test_a_checkpoint_may_carry_its_engine_beside_it(tmp_path: Path) -> None:
    write(tmp_path, **{"config.json": HF, "model.safetensors": None, "tokenizer.json": "{}"})
    write(tmp_path / "engine", **{"openvino_model.xml": "<net/>", "openvino_model.bin": b"x"})
    layout = inspect(tmp_path)
    assert layout.kind is ModelKind.HF_CHECKPOINT
    assert layout.bundled_engine == layout.engine_dir == tmp_path / "engine"
    assert inspect(tmp_path / "engine").tokenizer_dir == tmp_path
    (tmp_path / "model.safetensors").unlink()
    assert inspect(tmp_path).kind is ModelKind.OPENVINO_ENGINE
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
        ({"serving.properties": "engine=MPI"}, r"option\.model_id must name"),
        ({"config.json": {"a": 1}, "x.safetensors": None}, r"config\.json has neither \(its keys: a\)"),
        ({"model.safetensors": None}, r"without a config\.json"),
        ({"config.json": HF}, r"config\.json without weights"),
        ({"a__config.json": HF, "b__readme": "x"}, r"found a/, b/; there may be a model in a/"),
        (
            {"a__b__config.json": BUILT, "a__b__rank0.engine": "x"},
            r"a compiled engine is further down \(a/b/config\.json, a/b/rank0\.engine\): name its directory",
        ),
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


def test_a_checkpoint_is_known_by_its_config_alone(tmp_path: Path) -> None:
    assert inspect_config(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({**HF, "num_hidden_layers": 3}))
    layout = inspect_config(tmp_path)
    assert layout is not None and (layout.kind, layout.weight_files) == (ModelKind.HF_CHECKPOINT, ())
    assert layout.shape.num_layers == 3
    (tmp_path / "config.json").write_text(json.dumps(BUILT))
    assert inspect_config(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LayoutError):
        inspect_config(tmp_path)
