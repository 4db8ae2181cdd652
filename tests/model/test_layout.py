from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from djl_trtllm.errors import LayoutError, ModelError
from djl_trtllm.model import ModelKind, handle_requirements, inspect, inspect_config, layout
from djl_trtllm.model.adapter import AdapterLimits, check_adapter
from djl_trtllm.model.layout import old_engine
from tests.support.models import lora_tensors, write_adapter
from tests.support.tables import by_rows, by_table

HF = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
BUILT = {
    "version": "1.2.0",
    "pretrained_config": {"mapping": {"world_size": 2}},
    "build_config": {"max_num_tokens": 8192},
}


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
    assert (layout.config, layout.tokenizer_dir) == (HF, tmp_path)
    assert layout.weight_files == (tmp_path / "model.safetensors",)
    assert layout.bundled_engine is layout.engine_dir is None
    assert layout.tensor_parallel is layout.pipeline_parallel is None
    assert layout.shape.parameter_bytes == 8
    for file in layout.weight_files:
        file.unlink()
    assert layout.shape.parameter_bytes == 8  # headers are read once, however often a plan asks for sizes


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


@by_table("files", "says")
def test_what_is_not_whole_or_no_model_is_refused_by_its_files(
    tmp_path: Path, files: dict[str, Any], says: str
) -> None:
    with pytest.raises(LayoutError, match=rf"(?s){says}"):
        inspect(write(tmp_path, **files))


@by_rows(
    "counts",
    [
        {"num_hidden_layers": 10**12},
        {"text_config": {"n_layer": 20_000_000}},
        {"layers_block_type": ["attention"] * 10_001},
        {"num_attention_heads": 2**31},
        {"vocab_size": 10**400},
        {"head_dim": 10**400},
        {"rope_scaling": {"long_factor": [1, 10**400]}},
        {"pretrained_config": {"mapping": {"world_size": 10**9}}, "build_config": {}},
        *({name: 65_537} for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")),
    ],
)
def test_no_file_counts_more_than_any_model_has(tmp_path: Path, counts: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **counts}))
    safetensors(tmp_path / "model.safetensors", {"model.layers.0.mlp.weight": 1})
    (tmp_path / "rank0.engine").write_bytes(b"e")
    with pytest.raises(LayoutError, match=r"config\.json: \w+ is \d+, expected at most \d+"):
        inspect(tmp_path)


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, says in (("missing", "there is nothing"), ("file", "it is a file")):
        with pytest.raises(LayoutError, match=says):
            inspect(tmp_path / name)


def test_a_compiled_openvino_engine_does_not_take_a_strangers_tokenizer(tmp_path: Path) -> None:
    engine = write(tmp_path / "engine", **{"openvino_model.xml": "<net/>", "openvino_model.bin": b"x"})
    write(tmp_path, **{"tokenizer.json": "{}"})
    layout = inspect(engine)
    assert layout.kind is ModelKind.OPENVINO_ENGINE and layout.kind.is_engine
    assert (layout.engine_dir, layout.config, layout.tokenizer_dir) == (engine, None, None)
    write(engine, **{"config.json": HF})
    for name in ("tokenizer.json", "any.model", "vocab.json", "vocab.txt", "any.tiktoken", "tekken.json"):
        write(engine, **{name: b"x"})
        assert (inspect(engine).config, inspect(engine).tokenizer_dir) == (HF, engine)
        (engine / name).unlink()


def test_a_compiled_tensorrt_engine_has_its_ranks_in_order_of_number(tmp_path: Path) -> None:
    config = {**BUILT, "pretrained_config": {"mapping": {"world_size": 12}}}
    write(tmp_path, **{"config.json": config}, **{f"rank{rank}.engine": b"x" for rank in range(12)})
    layout = inspect(tmp_path)
    assert (layout.kind, layout.tokenizer_dir) == (ModelKind.TENSORRT_ENGINE, None)
    assert [file.name for file in layout.weight_files] == [f"rank{rank}.engine" for rank in range(12)]


@pytest.mark.parametrize(
    ("mapping", "tensor_parallel", "pipeline_parallel"),
    [(None, 1, 1), ({"world_size": 1}, 1, 1), ({"world_size": 4, "tp_size": 2, "pp_size": 2}, 2, 2)],
)
def test_a_tensorrt_checkpoint(
    tmp_path: Path, mapping: dict[str, int] | None, tensor_parallel: int, pipeline_parallel: int
) -> None:
    config = {"architecture": "LlamaForCausalLM", "dtype": "float16", "num_hidden_layers": 3}
    config |= {} if mapping is None else {"mapping": mapping}
    ranks = {f"rank{rank}.safetensors": None for rank in range(tensor_parallel * pipeline_parallel)}
    layout = inspect(write(tmp_path, **{"config.json": config}, **ranks))
    assert layout.kind is ModelKind.TENSORRT_CHECKPOINT and not layout.kind.is_engine
    assert (layout.tensor_parallel, layout.pipeline_parallel) == (tensor_parallel, pipeline_parallel)
    shape = layout.shape
    assert (shape.architecture, shape.dtype, shape.num_layers) == ("LlamaForCausalLM", "float16", 3)


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


@pytest.mark.parametrize(("name", "place"), [("tensorrt_llm__", ""), ("tensorrt_llm__", "tensorrt_llm"), ("", "")])
def test_an_lmi_repository(tmp_path: Path, name: str, place: str) -> None:
    layout = inspect(lmi_repository(tmp_path, name) / place)
    assert layout.kind is ModelKind.LMI_REPOSITORY and layout.kind.is_engine
    model = tmp_path / name.removesuffix("__")
    assert (layout.engine_dir, layout.tokenizer_dir) == (model / "1", model)
    assert [file.name for file in layout.weight_files] == ["rank0.engine", "rank1.engine"]
    assert layout.tensor_parallel == 2 and layout.pipeline_parallel == 1
    (model / "1").rename(model / "10")
    (model / "2").mkdir()
    assert inspect(tmp_path / place).engine_dir == model / "10"


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


@by_rows("folder", ["", "tensorrt_llm/1/"])
@by_table("file", "config")
def test_engines_of_before_0_8_are_refused_with_what_reads_them_and_the_command(
    tmp_path: Path, folder: str, file: str, config: dict[str, Any] | None
) -> None:
    model = write(tmp_path / folder, **{file: b"x"}, **({} if config is None else {"config.json": config}))
    if folder:
        write(tmp_path, **{"tensorrt_llm__config.pbtxt": "x"})
    with pytest.raises(LayoutError) as caught:
        inspect(tmp_path)
    assert f"{model} holds an engine of TensorRT-LLM before 0.8 ({file}; LMI containers" in str(caught.value)
    assert "`djl-trtllm compile CHECKPOINT OUT`" in str(caught.value)


@by_table("files")
def test_what_is_not_old_is_not_taken_for_it(tmp_path: Path, files: dict[str, Any]) -> None:
    assert old_engine(write(tmp_path, **files)) is None
    write(tmp_path, **{"config.json": HF, "model.safetensors": None, "llama_float16_tp1_rank0.engine": b"x"})
    assert (
        inspect(tmp_path).kind is ModelKind.HF_CHECKPOINT
    )  # which old engines beside it do not keep from being served


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
    (tmp_path / "engine" / "openvino_model.xml").unlink()
    write(tmp_path, **{"model.safetensors": None})
    assert inspect(tmp_path).bundled_engine is None
    write(tmp_path / "engine", **{"config.json": BUILT, "rank0.engine": b"x"})
    assert inspect(tmp_path).bundled_engine == tmp_path / "engine"


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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "requirements.txt").write_text("some-package==1.0\n")
    return tmp_path


@pytest.mark.parametrize(
    ("pip", "uv", "begins"),
    [
        (True, None, [sys.executable, "-m", "pip", "install"]),
        (False, "/bin/uv", ["/bin/uv", "pip", "install", "--python", sys.executable]),
        (False, None, None),
    ],
)
def test_requirements_are_installed_into_this_python_by_pip_or_uv(
    model: Path, monkeypatch: pytest.MonkeyPatch, pip: bool, uv: str | None, begins: list[str] | None
) -> None:
    run = Mock(return_value=subprocess.CompletedProcess([], 0, stdout=""))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if pip else None)
    monkeypatch.setattr(shutil, "which", lambda _: uv)
    if begins is None:
        with pytest.raises(ModelError, match="has no pip, and there is no uv"):
            handle_requirements(model, allowed=True)
        return
    handle_requirements(model, allowed=True)
    (command,) = run.call_args.args
    assert command[: len(begins)] == begins and command[-2:] == ["-r", str(model / "requirements.txt")]


def test_nothing_is_installed_unless_there_is_a_file_and_it_is_allowed(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("ran a command"))
    handle_requirements(model / "elsewhere", allowed=False)
    handle_requirements(model / "elsewhere", allowed=True)
    assert caplog.text == ""
    with caplog.at_level(logging.INFO):
        handle_requirements(model, allowed=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "SERVING_INSTALL_REQUIREMENTS=true" in caplog.text and str(model) in caplog.text


def test_a_failure_shows_the_installers_last_lines(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('\\n'.join(f'line {n}' for n in range(40))); sys.exit(3)"
    monkeypatch.setattr(layout, "_installer", lambda _: [sys.executable, "-c", program])
    with pytest.raises(ModelError, match=r"exit status 3") as caught:
        handle_requirements(model, allowed=True)
    assert "line 39" in str(caught.value) and "line 10\n" not in str(caught.value)


# -- directories of adapters ------------------------------------------------------------------------------------------


LIMITS = AdapterLimits(
    max_rank=8,
    rank_setting="option.max_lora_rank=8",
    modules=frozenset({"q_proj", "o_proj", "w1", "shared_expert.up_proj"}),
    modules_setting="option.lora_target_modules=attn_q",
    hidden=256,
    layers=2,
)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def refusal(folder: Path, limits: AdapterLimits = LIMITS) -> str:
    with pytest.raises(LayoutError) as caught:
        check_adapter(folder, limits)
    return str(caught.value)


@by_table("tensors")
def test_an_adapter_within_the_limits_is_taken(tmp_path: Path, tensors: dict[str, Any]) -> None:
    check_adapter(write_adapter(tmp_path, tensors), LIMITS)


def test_weights_of_pytorch_are_taken_by_the_rank_of_their_configuration(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    check_adapter(tmp_path, LIMITS)
    write_adapter(tmp_path, r=9)
    (tmp_path / WEIGHTS).unlink()
    assert "adapter_config.json: r is 9" in refusal(tmp_path)


def test_what_the_limits_do_not_name_is_not_compared(tmp_path: Path) -> None:
    tensors = lora_tensors(["attention.c_attn"], hidden=99, layers=(70,))
    check_adapter(write_adapter(tmp_path, tensors), AdapterLimits(max_rank=8, rank_setting=""))


@by_table("config", "told")
def test_a_configuration_that_cannot_be_used_is_refused_by_its_key(
    tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    folder = write_adapter(tmp_path)
    write_adapter(tmp_path, **config)
    assert refusal(folder) == f"{folder / CONFIG}: {told}"


@by_table("tensors", "told")
def test_weights_that_do_not_fit_are_refused_by_their_tensor(
    tmp_path: Path, tensors: dict[str, Any], told: str
) -> None:
    message = refusal(write_adapter(tmp_path, tensors))
    assert message.startswith(str(tmp_path / WEIGHTS))
    assert told in message


def test_broken_or_missing_files_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} holds no adapter: {CONFIG} is missing"
    write_adapter(tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    for content, told in ((whole[:-1], "is truncated"), (whole[:4], "is not a safetensors file"), (b"", "is not a")):
        (tmp_path / WEIGHTS).write_bytes(content)
        assert told in refusal(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    assert refusal(tmp_path).endswith(f"holds no weights of an adapter: expected {WEIGHTS} or adapter_model.bin")
    (tmp_path / CONFIG).write_text("{")
    assert f"{CONFIG} is not valid JSON" in refusal(tmp_path)
