"""Reading what `djl-trtllm size` is asked."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from djl_trtllm.commands import size_request
from djl_trtllm.commands.size_request import machines_of, read_request, remarks_on
from djl_trtllm.engines import gpu
from djl_trtllm.engines.gpu import Gpu
from djl_trtllm.engines.gpu_state import GpuState
from djl_trtllm.errors import ModelError, SizingError
from djl_trtllm.sizing.machines import of_gpu, of_instance
from tests.commands.sized import described, request
from tests.engines.helpers import write_tensorrt_engine
from tests.sizing.configs import llama

MIB = 1 << 20


def test_options_come_from_flags_and_from_the_models_own_file(tmp_path: Path) -> None:
    path = described(tmp_path)
    (path / "serving.properties").write_text("option.max_input_len=700\noption.tensor_parallel_degree=2\n")
    asked = request(path, max_output_len=300)
    assert (asked.input_len, asked.output_len, asked.length) == (700, 300, 1000)
    assert asked.degree_on(of_gpu("h100")) == 2
    assert asked.settings == {"max_output_len": "300"}


def test_the_models_own_file_may_name_the_checkpoint(tmp_path: Path) -> None:
    described(tmp_path / "weights")
    (tmp_path / "serving.properties").write_text("option.model_id=weights\n")
    assert request(tmp_path).sizes.shape.num_layers == 32
    (tmp_path / "serving.properties").write_text(f"option.model_id={tmp_path / 'weights'}\n")
    assert request(tmp_path).sizes.source == str(tmp_path / "weights")


def test_sequences_end_at_the_models_context(tmp_path: Path) -> None:
    long = request(described(tmp_path), max_input_len=30000, max_output_len=500)
    assert (long.input_len, long.output_len, long.length) == (8191, 1, 8192)
    assert long.shortened == (
        "sequences of 30000 + 500 tokens are longer than the model's context of 8192: counted are 8191 + 1"
    )
    assert request(described(tmp_path), max_input_len=8000, max_output_len=192).shortened is None
    short = request(described(tmp_path, max_position_embeddings=300))
    assert (short.input_len, short.output_len, short.shortened) == (200, 100, None)
    unknown = request(described(tmp_path, max_position_embeddings=None), max_input_len=30000)
    assert (unknown.input_len, unknown.shortened) == (30000, None)


def test_a_configuration_file_or_an_archive_names_the_model_too(tmp_path: Path) -> None:
    path = described(tmp_path / "model")
    (path / "serving.properties").write_text("option.max_input_len=700\n")
    assert request(path / "serving.properties").input_len == 700
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
        archive.add(path, ".")
    packed = request(tmp_path / "model.tar.gz", engine_cache_dir=tmp_path / "cache")
    assert (packed.input_len, packed.sizes.shape.num_layers) == (700, 32)
    with pytest.raises(ModelError, match="no model at"):
        request(tmp_path / "missing")


def test_an_engine_keeps_what_it_was_compiled_for(tmp_path: Path) -> None:
    write_tensorrt_engine(tmp_path / "engine", max_batch_size=8)
    with pytest.raises(SizingError, match="compiled TensorRT-LLM engine: it keeps what it was compiled for"):
        request(tmp_path / "engine")


def test_a_checkpoint_of_tensorrt_llm_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "LlamaForCausalLM", "dtype": "float16"}))
    save_file({"x": numpy.zeros(1)}, tmp_path / "rank0.safetensors")
    with pytest.raises(SizingError, match="TensorRT-LLM checkpoint, which is not read; name the Hugging"):
        request(tmp_path)


def test_max_is_as_many_gpus_as_there_are(tmp_path: Path) -> None:
    asked = request(described(tmp_path), tensor_parallel_degree="max")
    assert [asked.degree_on(of_gpu(name)) for name in ("h100", "h100:8")] == [1, 8]
    assert asked.degree_on(of_instance("g5.12xlarge")) == 4


def test_more_gpus_than_there_are_is_an_error(tmp_path: Path) -> None:
    asked = request(described(tmp_path), tensor_parallel_degree=8)
    with pytest.raises(SizingError, match=r"tensor parallel degree 8: g5\.12xlarge has 4 GPUs"):
        asked.degree_on(of_instance("g5.12xlarge"))
    grouped = request(described(tmp_path), tensor_parallel_degree=4, pipeline_parallel_degree=2)
    with pytest.raises(SizingError, match=r"degree 4 x 2 groups: g5\.xlarge has 1 GPU$"):
        grouped.degree_on(of_instance("g5.xlarge"))


def test_the_batch_is_the_one_that_max_num_tokens_raises_to(tmp_path: Path) -> None:
    path, machine = described(tmp_path), of_gpu("h100")
    assert request(path).on(machine, 1).estimate.conditions.max_batch_size == 256
    large = request(path, max_rolling_batch_size=300).on(machine, 1)
    assert large.estimate.conditions.max_batch_size == 300


@pytest.mark.parametrize(("backend", "engine"), [("auto", "tensorrt"), ("tensorrt",) * 2, ("pytorch",) * 2])
def test_the_backend_decides_what_is_estimated(tmp_path: Path, backend: str, engine: str) -> None:
    found = request(described(tmp_path), backend=backend).on(of_gpu("h100"), 1)
    assert found.estimate.conditions.backend == engine


def test_machines_are_those_that_flags_name() -> None:
    named = machines_of(["h100", "h200:2"], "40GB", ["g5.xlarge"], here=True)
    assert [machine.name for machine in named] == ["H100", "H200", "g5.xlarge", "a GPU of 37.3 GiB"]
    assert machines_of([], None, [], here=False) == []


def test_without_flags_it_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Gpu("NVIDIA A10G", (8, 6), 23028 * MIB)
    monkeypatch.setattr(gpu, "visible_gpus", lambda environ: ((found, found), None))
    (machine,) = machines_of([], None, [], here=True)
    assert (machine.name, machine.gpu, machine.gpus) == ("this machine", "NVIDIA A10G", 2)
    assert machine.known == of_gpu("a10g").known
    assert str(machine) == "this machine: 2 x NVIDIA A10G with 22.5 GiB"


GIB = 1024 * MIB
H200 = GpuState("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, 18, (1,), (1,))


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ((H200, replace(H200, peers=(0,))), ()),
        ((H200, replace(H200, peers=(0,), free=100 * GIB)), ("other programs use 40.0 of the 140.0 GiB of GPU 1",)),
        ((replace(H200, peers=()),) * 2, ("the GPUs do not reach each other's memory",)),
        ((replace(H200, peers=()),), ()),
    ],
)
def test_memory_in_use_and_missing_links_are_remarks(states: tuple[GpuState, ...], says: tuple[str, ...]) -> None:
    found = remarks_on(states)
    assert len(found) == len(says)
    assert all(remark.startswith(said) for remark, said in zip(found, says, strict=True))


def test_a_machine_of_which_cuda_shows_a_part_has_no_remarks(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Gpu("NVIDIA H200", (9, 0), 140 * GIB)
    busy = replace(H200, peers=(0,), free=0)
    monkeypatch.setattr(size_request, "read_states", lambda: (busy, busy))
    for gpus, remarks in (((shown,), 0), ((shown, shown), 2)):
        monkeypatch.setattr(gpu, "visible_gpus", lambda environ, gpus=gpus: (gpus, None))
        (machine,) = machines_of([], None, [], here=True)
        assert len(machine.remarks) == remarks


@pytest.mark.parametrize(
    ("gpus", "message"),
    [((), "this machine has no NVIDIA GPU: name one with --gpu"), ((Gpu(),), "the memory of this machine's GPUs is")],
)
def test_a_machine_without_known_gpus_wants_one_named(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...], message: str
) -> None:
    monkeypatch.setattr(gpu, "visible_gpus", lambda environ: (gpus, None))
    with pytest.raises(SizingError, match=message):
        machines_of([], None, [], here=True)


def test_a_remote_model_is_read_by_its_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from djl_trtllm.sizing.checkpoint import CheckpointSizes

    asked = []

    def read(source: str, **options: object) -> CheckpointSizes:
        asked.append((source, options["revision"]))
        return CheckpointSizes.from_config(llama(), source)

    monkeypatch.setattr(CheckpointSizes, "read", read)
    monkeypatch.setenv("OPTION_REVISION", "abc")
    monkeypatch.setenv("OPTION_MAX_INPUT_LEN", "77")
    found = read_request("owner/name", {}, "0.28")
    assert (asked, found.input_len) == ([("owner/name", "abc")], 77)
