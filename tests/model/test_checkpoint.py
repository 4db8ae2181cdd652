"""Checkpoints: their JSON files, weight files, tensors, quantisation and sizes."""

from __future__ import annotations

import json
import struct
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.numpy import save_file

from djl_trtllm.errors import LayoutError
from djl_trtllm.model import ModelShape, checkpoint, inspect
from djl_trtllm.model.checkpoint import (
    check_tensors,
    is_lfs_pointer,
    read_object,
    stored_kv_quantization,
    stored_quantization,
)
from tests.model.test_layout import safetensors
from tests.support.tables import by_rows, by_table

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


def test_an_object_is_read_with_or_without_a_byte_order_mark(file: Path) -> None:
    assert read_object(file, LayoutError) is None
    for mark in (b"", b"\xef\xbb\xbf"):
        file.write_bytes(mark + '{"name": "Wölfe"}'.encode())
        assert read_object(file, LayoutError) == {"name": "Wölfe"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON: .*; copy it from the model again"),
        (b"\xff", "is not valid JSON: .*; copy it from the model again"),
        (b"[" * 200_000, "is not valid JSON: .*; copy it from the model again"),
        (b"[1]", "holds a JSON list, expected an object; copy it from the model again"),
        (POINTER, "is a Git LFS pointer, not the file; fetch the files with `git lfs pull`"),
    ],
)
def test_anything_else_is_an_error_that_names_the_file(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(LayoutError, match=rf"config\.json.* {message}"):
        read_object(file, LayoutError)


@by_rows(("around", "part", "most"), [(b'{"a":[%s0]}', b"0,", 249_998), (b'{"a":"%s"}', b"x", 2**23 - 8)])
def test_no_file_costs_more_memory_than_the_longest_that_is_known(
    file: Path, around: bytes, part: bytes, most: int
) -> None:
    file.write_bytes(around % (part * most))
    assert read_object(file, LayoutError) is not None
    file.write_bytes(around % (part * (most + 1)))
    with pytest.raises(LayoutError, match=r"config\.json .* more than [0-9,]+ (values|bytes)"):
        read_object(file, LayoutError)


def test_only_a_small_file_that_begins_as_one_is_a_pointer(file: Path) -> None:
    for content, is_pointer in (
        (POINTER, True),
        (POINTER.ljust(1024), True),
        (POINTER.ljust(1025), False),
        (b" " + POINTER, False),
    ):
        file.write_bytes(content)
        assert is_lfs_pointer(file) is is_pointer, content


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    numpy = pytest.importorskip("numpy")
    file = tmp_path / "model.safetensors"
    save_file({"a": numpy.zeros((3, 5), numpy.float16), "b": numpy.zeros(7, numpy.float32)}, file, {"format": "pt"})
    return file


def test_a_prefix_of_a_file_is_never_whole(saved: Path) -> None:
    assert checkpoint.read_header(saved)["a"].shape == (3, 5)
    assert checkpoint.parameter_bytes((saved,)) == 3 * 5 * 2 + 7 * 4
    data = saved.read_bytes()
    (saved.parent / "consolidated.safetensors").write_bytes(data)  # another library's, which is not counted
    assert checkpoint.find_weights(saved.parent) == (saved,)
    for length in range(len(data)):
        saved.write_bytes(data[:length])
        with pytest.raises(LayoutError, match=r"truncated|not a safetensors file"):
            checkpoint.find_weights(saved.parent)


@by_rows(
    "changes",
    [{"shape": shape} for shape in (["x"], [float("inf")], [-1], [2**48], [1] * 17, None)]
    + [{"dtype": dtype} for dtype in (1, "F" * 33)]
    + [{"data_offsets": offsets} for offsets in ([2, 1], [-1, 1], [0], [0, 10**4300 - 1])],
)
def test_a_tensor_that_the_format_does_not_have_is_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = tmp_path / "model.safetensors"
    entry = {"dtype": "F16", "shape": [1], "data_offsets": [0, 2], **changes}
    header = json.dumps({"__metadata__": {"format": "pt"}, "lm_head": entry}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(2))
    with pytest.raises(LayoutError, match=r"model\.safetensors has a damaged header \('lm_head': "):
        checkpoint.read_header(file)


def test_a_name_of_megabytes_is_shown_in_part(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    header = json.dumps({"a" * 2_000_000: {}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(LayoutError, match=r"damaged header \('aaa") as caught:
        checkpoint.read_header(file)
    assert len(str(caught.value)) < 1_000


_json = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data_offsets", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)
_tensors = st.fixed_dictionaries(
    {"dtype": st.just("F16"), "shape": st.lists(st.integers(), max_size=2), "data_offsets": _json}
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_json | st.dictionaries(st.text(max_size=5), _tensors, max_size=2))
def test_a_header_of_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    encoded = json.dumps(value).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    try:
        assert isinstance(checkpoint.read_header(file), dict)
        checkpoint.parameter_bytes((file,))
    except LayoutError as error:
        assert str(file) in str(error)


def test_files_of_pytorch_count_by_their_size_and_are_refused_if_they_are_cut(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    assert checkpoint.parameter_bytes(()) is None
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(1000))
    assert checkpoint.find_weights(tmp_path) == (file,)
    assert checkpoint.parameter_bytes((file,)) == file.stat().st_size
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 4}))
    inspect(tmp_path)  # it has no header that could name its layers
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(LayoutError, match=r"pytorch_model\.bin is truncated: 900 bytes of a PyTorch file"):
        checkpoint.find_weights(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(LayoutError, match="is empty"):
        checkpoint.find_weights(tmp_path)


PARTS = ("self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight")


def stack(layers: int, name: str = "model.layers", parts: tuple[str, ...] = PARTS) -> dict[str, int]:
    return {f"{name}.{layer}.{part}": 1 for layer in range(layers) for part in parts}


def saved_checkpoint(path: Path, tensors: dict[str, int], layers: int = 4, **config: Any) -> Path:
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers, **config}
    (path / "config.json").write_text(json.dumps(values))
    safetensors(path / "model.safetensors", {"model.embed_tokens.weight": 1, **tensors})
    return path


def sharded(path: Path, shards: dict[str, list[str]], weight_map: dict[str, str]) -> Path:
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, tensors in shards.items():
        safetensors(path / name, dict.fromkeys(tensors, 1))
    return path


def test_the_tensors_of_all_files_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sharded(tmp_path, {"one.safetensors": ["a", "b"], "two.safetensors": ["c"]}, {})
    files = tuple(sorted(path.glob("*.safetensors")))
    for most in (3, 2):
        monkeypatch.setattr("djl_trtllm.model.checkpoint._MOST_TENSORS", most)
        if most == 3:
            check_tensors(path, files, None)
        else:
            with pytest.raises(LayoutError, match="more than 2 tensors"):
                check_tensors(path, files, None)


def test_a_tensor_of_the_index_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    shards = {"model-1.safetensors": ["a", "rotary_emb.inv_freq"], "model-2.safetensors": ["b"]}
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    inspect(sharded(tmp_path, shards, weight_map))  # shards may have tensors that the index does not name
    sharded(tmp_path, shards, {**weight_map, "c": "model-2.safetensors"})
    with pytest.raises(LayoutError, match=r"1 of 3 tensors named in .* not in their files: c in model-2\.safetensors;"):
        inspect(tmp_path)


@by_table("tensors", "config", "refusal")
def test_a_checkpoint_has_the_layers_that_its_config_says(
    tmp_path: Path, tensors: dict[str, int], config: dict[str, Any], refusal: str
) -> None:
    saved_checkpoint(tmp_path, tensors, **config)
    with pytest.raises(LayoutError, match=refusal) if refusal else nullcontext():
        inspect(tmp_path)


@by_table("config", "algorithm")
def test_each_way_of_saying_it_is_one_name(tmp_path: Path, config: dict[str, Any], algorithm: str | None) -> None:
    assert stored_quantization(tmp_path, config) == algorithm


def test_the_quantisation_of_the_kv_cache_is_in_the_same_places(tmp_path: Path) -> None:
    own = {"quantization": {"kv_cache_quant_algo": "FP8"}}
    for config in (own, {"pretrained_config": own}, {"quantization_config": own}):
        assert stored_kv_quantization(tmp_path, config) == "FP8"
    assert stored_kv_quantization(tmp_path, {}) is None


# (config.json, layers, key-value heads, head size, hidden, positions)
FAMILIES: dict[str, list[Any]] = json.loads(Path(__file__).with_name("families.json").read_text())


@by_rows("family", FAMILIES)
def test_every_family_is_read_in_its_own_words(family: str) -> None:
    config, layers, kv_heads, head_dim, hidden, positions = FAMILIES[family]
    shape = ModelShape.from_config(config)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (layers, kv_heads, head_dim)
    assert (shape.hidden, shape.max_position_embeddings) == (hidden, positions)
    assert shape.vocab_size is not None
    named = {"llava, by its text part": ("LlavaForConditionalGeneration", "llama")}
    named["a TensorRT-LLM engine"] = ("LlamaForCausalLM", shape.model_type or "")
    assert (shape.architecture, shape.model_type or "") == named.get(
        family, (shape.architecture, shape.model_type or "")
    )


@by_table("config", "shape")
def test_what_is_not_given_is_none(config: dict[str, Any], shape: dict[str, Any]) -> None:
    assert ModelShape.from_config(config, parameter_bytes=7) == ModelShape(**shape, parameter_bytes=7)


_VALUES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3)
_KEYS = st.sampled_from(
    ["hidden_size", "num_attention_heads", "n_head", "text_config", "architectures", "model_type", "attn_config"]
)


@given(
    st.dictionaries(
        _KEYS, _VALUES | st.lists(_VALUES, max_size=2) | st.dictionaries(_KEYS, _VALUES, max_size=4), max_size=6
    )
)
def test_no_config_makes_it_fail(config: dict[str, Any]) -> None:
    shape = ModelShape.from_config(config)
    for value in (shape.hidden, shape.num_heads, shape.head_dim):
        assert value is None or value >= 0


@pytest.mark.parametrize(
    ("positions", "factor", "longest"),
    [(4096, 2.5, 10_240), (4096, float("inf"), 2**31 - 1), (4096, 10**400, 2**31 - 1), (10**400, 2.5, 2**31 - 1)],
)
def test_positions_fit_an_engine_whatever_stretches_them(positions: int, factor: float, longest: int) -> None:
    scaling = {"type": "linear", "factor": factor}
    shape = ModelShape.from_config({"max_position_embeddings": positions, "rope_scaling": scaling})
    assert shape.max_position_embeddings == longest


def test_names_of_shards_and_layers_are_no_memory(tmp_path: Path) -> None:
    saved_checkpoint(tmp_path, stack(4) | {f"model.layers.{'9' * 5000}.weight": 1})
    assert inspect(tmp_path).weight_files
    (tmp_path / "model.safetensors").rename(tmp_path / "model-000001-of-999999.safetensors")
    with pytest.raises(LayoutError, match="named as parts of 999999, expected at most 10000"):
        inspect(tmp_path)
